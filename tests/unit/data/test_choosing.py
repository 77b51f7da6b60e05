from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from framework.config.schema import LoaderKind
from framework.data import choosing
from framework.data.choosing import Loading, choose, worker_count
from framework.data.room import DEVICE_SHARE, UNKNOWN_HOST_ROOM, device_room, host_available, host_room
from framework.errors import DataError

CPU, META = torch.device("cpu"), torch.device("meta")
RESIDENT, DATALOADER = LoaderKind.RESIDENT, LoaderKind.DATALOADER
TENSORS = TensorDataset(torch.zeros(10, 100))


class Own(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.full((100,), float(index))


class Random(Own):
    def __getitem__(self, index):
        return torch.rand(1)


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch):
    monkeypatch.setattr(choosing, "threads_per_process", lambda procs: 16 // procs)


def chosen(dataset, device=CPU, **asked):
    return choose(dataset, part="val", device=device, loading=Loading(**asked))


def test_tensors_stay_where_they_are():
    rows, workers, why = chosen(TENSORS)
    assert rows is not None
    assert rows.tensors[0] is TENSORS.tensors[0]
    assert workers == 0
    assert why == "resident in the memory of cpu (tensors already, 0.0 MB)"


def test_a_dataset_of_ones_own_goes_to_workers():
    assert chosen(Own()) == (
        None,
        8,
        "loaded sample by sample by 8 worker process(es) (a Own may give other samples each time)",
    )
    assert chosen(Own(), procs=4).num_workers == 3
    assert chosen(Own(), num_workers=0).num_workers == 0


def test_it_is_decoded_where_that_is_asked_for():
    rows, workers, why = chosen(Own(), kind=RESIDENT)
    assert rows is not None
    assert (len(rows), workers) == (10, 0)
    assert "decoded once" in why


def test_workers_that_are_asked_for_are_used():
    assert chosen(TENSORS, num_workers=2)[:2] == (None, 2)
    assert chosen(TENSORS, kind=DATALOADER)[:2] == (None, 8)
    assert chosen(TENSORS, kind=DATALOADER, num_workers=0)[:2] == (None, 0)
    assert chosen(TENSORS, num_workers=0).rows is not None


def test_random_samples_are_refused_where_they_have_to_be_resident():
    with pytest.raises(DataError, match=r"Sample 0 of the val dataset draws(.|\n)*Use data.loader=dataloader, or"):
        chosen(Random(), kind=RESIDENT)


def test_what_has_to_be_resident_and_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(choosing, "host_available", lambda: 7999)
    assert chosen(Own(), kind=RESIDENT, procs=1).rows is not None
    with pytest.raises(DataError, match=r"can't be resident: decoded it takes 0.0 MB(.|\n)*data.loader=dataloader"):
        chosen(Own(), kind=RESIDENT, procs=2)


def test_where_memory_is_unknown_the_request_is_obeyed_and_auto_keeps_what_is_small(monkeypatch):
    monkeypatch.setattr(choosing, "host_available", lambda: None)
    monkeypatch.setattr(choosing, "host_room", lambda **_: 3999)
    assert chosen(Own(), kind=RESIDENT, procs=100).rows is not None
    monkeypatch.setattr(choosing, "is_known_to_repeat", lambda _: True)
    assert chosen(Own()).rows is None
    monkeypatch.setattr(choosing, "host_room", lambda **_: 4000)
    assert chosen(Own()).rows is not None


def joined(*sizes):
    return ConcatDataset([TensorDataset(torch.full((size, 100), float(size))) for size in sizes])


def test_tensors_that_have_to_be_joined_are_copied_only_where_there_is_room(monkeypatch):
    rows, _, why = chosen(joined(3, 7))
    assert rows is not None
    assert why == "resident in the memory of cpu (tensors joined, 0.0 MB)"
    monkeypatch.setattr(choosing, "host_room", lambda **_: 3999)
    refused = chosen(joined(3, 7))
    assert refused[:2] == (None, 8)
    assert "joined it takes 0.0 MB, and 0.0 MB of the host's memory are for it" in refused.why
    monkeypatch.setattr(choosing, "host_available", lambda: 3999)
    with pytest.raises(DataError, match=r"can't be resident: joined it takes 0.0 MB(.|\n)*data.loader=dataloader"):
        chosen(joined(3, 7), kind=RESIDENT)


def test_tensors_that_fit_a_device_are_joined_there_without_a_copy_on_the_host(monkeypatch):
    monkeypatch.setattr(choosing, "host_room", lambda **_: 0)
    monkeypatch.setattr(choosing, "device_room", lambda _, **__: 4000)
    rows, _, why = chosen(joined(3, 7), META)
    assert rows is not None
    assert (rows.device, len(rows)) == (META, 10)
    assert why == "resident in the memory of meta (tensors joined, 0.0 MB)"


def test_known_data_that_does_not_fit_is_loaded(monkeypatch):
    monkeypatch.setattr(choosing, "is_known_to_repeat", lambda _: True)
    assert chosen(Own()).rows is not None
    assert chosen(Random())[:2] == (None, 8)
    monkeypatch.setattr(choosing, "host_room", lambda **_: 3999)
    assert chosen(Own())[:2] == (None, 8)


def test_known_data_that_takes_long_to_decode_is_loaded(monkeypatch):
    monkeypatch.setattr(choosing, "is_known_to_repeat", lambda _: True)
    monkeypatch.setattr(choosing, "MOST_DECODING_S", 0.0)
    found = chosen(Own())
    assert found[:2] == (None, 8)
    assert "decoding all of it would take" in found.why
    assert chosen(Own(), kind=RESIDENT).rows is not None


def test_rows_go_to_the_device_where_they_fit(monkeypatch):
    monkeypatch.setattr(choosing, "device_room", lambda _, sharing: 4000 // sharing)
    there = chosen(TENSORS, META)
    assert there.rows is not None
    assert there.rows.device == META
    host = chosen(TENSORS, META, sharing=2)
    assert host.rows is not None
    assert host.rows.device == CPU
    assert "resident in the host's memory" in host.why


def test_one_rank_says_what_was_chosen(caplog):
    with caplog.at_level(logging.INFO, logger="framework"):
        chosen(TENSORS)
        chosen(TENSORS, tells=True)
    assert [record.getMessage() for record in caplog.records] == [
        "data: the val part is resident in the memory of cpu (tensors already, 0.0 MB)"
    ]


def test_workers_are_the_cores_left(monkeypatch):
    assert [worker_count(procs=procs) for procs in (1, 2, 4, 16)] == [8, 7, 3, 0]
    assert chosen(Own(), procs=4, core_sharers=2).num_workers == 7


# Room


def test_the_hosts_memory_is_what_linux_says_is_available(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:    800 kB\nHugePages_Total: 0\n")
    assert host_available(tmp_path) == 800 * 1024
    assert host_room(procs=2, root=tmp_path) == 100 * 1024


@pytest.mark.parametrize(
    ("line", "mount", "files"),
    [
        (
            "0::/a/b",
            "sys/fs/cgroup/a",
            {"memory.max": "300000", "memory.current": "200000", "memory.stat": "inactive_file 50000\n"},
        ),
        (
            "4:memory:/a/b",
            "sys/fs/cgroup/memory/a",
            {
                "memory.limit_in_bytes": "300000",
                "memory.usage_in_bytes": "200000",
                "memory.stat": "total_inactive_file 50000\n",
            },
        ),
    ],
)
def test_a_control_group_may_leave_less(tmp_path, line, mount, files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 800 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/a\n{line}\n")
    (tmp_path / mount).mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / mount / name).write_text(text)
    assert host_available(tmp_path) == 150_000


def test_a_system_that_does_not_tell_has_a_fixed_room(tmp_path):
    assert host_available(tmp_path) is None
    assert host_room(procs=4, root=tmp_path) == UNKNOWN_HOST_ROOM // 4


class Device:
    """A device module for a device of which everything is free, but what this process has taken."""

    def __init__(self, free, *, kept=0):
        self.free, self.kept, self.taken = free, kept, 0

    def mem_get_info(self, _):
        return self.free - self.memory_reserved(_), self.free

    def memory_reserved(self, _):
        return self.taken + self.kept

    def memory_allocated(self, _):
        return self.taken


def test_a_device_gives_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: Device(1000, kept=100))
    assert device_room(META, sharing=2) == 1000 * DEVICE_SHARE // 2
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    assert device_room(META, sharing=1) == 0


def test_the_parts_of_a_run_have_one_share_of_the_device_together(monkeypatch):
    device = Device(100_000)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    where = []
    for _ in range(3):  # of 10,000 bytes each
        rows = chosen(TensorDataset(torch.zeros(25, 100)), META).rows
        assert rows is not None
        where.append(rows.device)
        if rows.device == META:
            device.taken += rows.size_bytes
    assert where == [META, META, CPU]
    device.taken = 30_000  # more than the share
    assert device_room(META, sharing=1) == 0
