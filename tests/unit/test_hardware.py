"""GPUs, cores and threads of the machine, as drivers, control groups and SLURM leave them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from framework.errors import TopologyError
from tests.helpers.internals import hardware_module, processes_on_cores


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818 (NVML's name)
    pass


class FakeNvml:
    """The part of pynvml that is used, for a machine with these UUIDs."""

    NVMLError = NVMLError

    def __init__(self, uuids, *, on_init=None, mig=()):
        self.uuids = list(uuids)
        self.on_init = on_init
        self.mig = mig
        self.open = 0

    def nvmlInit(self):  # noqa: N802
        if self.on_init is not None:
            raise self.on_init
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.mig:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "Some GPU"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle


@pytest.fixture
def nvml(monkeypatch):
    def install(uuids=(), **how):
        fake = FakeNvml(uuids, **how)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


FOUR = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "aa11 aa22 bb33 cc44"),
        ("", ""),
        ("-1", ""),
        ("3, 0", "cc44 aa11"),
        ("1,-1,2", "aa22"),
        ("0,9,1", "aa11"),
        ("GPU-bb,GPU-aa22", "bb33 aa22"),
        ("GPU-aa", ""),
        ("MIG-1", "MIG-1"),
        ("0, MIG-1 ,GPU-cc", "aa11 MIG-1 cc44"),
        ("MIG-2,0", ""),
    ],
)
def test_visible_gpus_are_those_cuda_shows(nvml, monkeypatch, visible, expected):
    fake = nvml(FOUR, mig=("MIG-1",))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = hardware_module.visible_gpus()
    assert [gpu.uuid.removeprefix("GPU-") for gpu in gpus] == expected.split()
    assert {gpu.name for gpu in gpus} <= {"Some GPU"}
    assert fake.open == 0
    assert [hardware_module.resolve_gpus(number) for number in (None, 0)] == [len(gpus), 0]


def test_a_broken_driver_is_an_error(nvml):
    nvml(on_init=NVMLError_DriverNotLoaded())
    assert hardware_module.count_gpus() == 0
    nvml(on_init=NVMLError("Driver/library version mismatch"))
    with pytest.raises(TopologyError, match="version mismatch") as caught:
        hardware_module.resolve_gpus(None)
    assert "trainer.gpus=0" in str(caught.value)
    assert hardware_module.resolve_gpus(0) == 0


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818 (NVML's name)
    pass


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound("no library"), NVMLError_DriverNotLoaded("no library")])
def test_an_unreachable_driver_is_an_error(nvml, monkeypatch, tmp_path, error):
    """Some containers have the device without the library."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(hardware_module, "_DRIVER_DEVICE", tmp_path / "nvidiactl")
    nvml(on_init=error)
    for asked in (None, 1):
        with pytest.raises(TopologyError, match=r"NVML, .*: no library\.\nInstall libnvidia-ml\.so\.1") as caught:
            hardware_module.resolve_gpus(asked)
        assert "has no GPU" not in str(caught.value)
    assert hardware_module.resolve_gpus(0) == 0
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware_module.count_gpus() == 0


def test_the_driver_is_asked_once(nvml, monkeypatch):
    fake = nvml(FOUR)
    asked = []

    def count() -> int:
        asked.append(1)
        return 4

    monkeypatch.setattr(fake, "nvmlDeviceGetCount", count)
    assert hardware_module.count_gpus() == 4
    assert hardware_module.resolve_gpus(None) == 4
    assert len(hardware_module.visible_gpus()) == 4
    assert len(asked) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware_module.count_gpus() == 1


@dataclass(frozen=True, kw_only=True)
class TooMany:
    there: tuple[Any, ...] = FOUR
    visible: str | None = None
    asked: int = 8
    facts: list[str]


@pytest.mark.parametrize(
    "case",
    [
        TooMany(facts=["has 4 GPUs", "trainer.gpus=4 or trainer.gpus=auto"]),
        TooMany(there=(), facts=["has no GPU"]),
        TooMany(visible="1", asked=2, facts=["has 1 GPU (CUDA_VISIBLE_DEVICES='1')"]),
        TooMany(visible="MIG-1,0", asked=3, facts=["has 2 GPUs"]),
    ],
)
def test_too_many_gpus_are_refused(nvml, monkeypatch, case: TooMany):
    nvml(case.there, mig=("MIG-1",))
    if case.visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", case.visible)
    with pytest.raises(TopologyError) as caught:
        hardware_module.resolve_gpus(case.asked)
    for fact in (*case.facts, f"trainer.gpus=0 topology.procs_per_node={case.asked}"):
        assert fact in str(caught.value)
    assert ("trainer.gpus=auto" in str(caught.value)) == bool(case.there)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 64),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "350000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000"}, 2),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
    ],
)
def test_cores_respect_affinity_and_control_groups(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hardware_module.cpu_count(tmp_path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert hardware_module.cpu_count(tmp_path) == 1


def test_threads_are_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(hardware_module, "cpu_count", lambda: 7)
    assert [hardware_module.threads_per_process(n) for n in (1, 2, 7, 100)] == [7, 3, 1, 1]


def task_of_srun(local_rank, *, kind="mask_cpu:", listed="0x3,0xC,0x30,0xC0", tasks="4"):
    """What srun sets for a task: as it was seen under SLURM 22.05."""
    return {
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_LOCALID": str(local_rank),
        "SLURM_CPU_BIND_TYPE": kind,
        "SLURM_CPU_BIND_LIST": listed,
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (task_of_srun(2), 1),
        (task_of_srun(2, tasks="4(x2)"), 1),
        # Typed masks come without 0x and are repeated.
        (task_of_srun(2, listed="3,C"), 2),
        (task_of_srun(2, listed="0x3,0x3,0x30,0x30"), 2),
        # The binding isn't in force: otherwise there would be one core.
        (task_of_srun(2, kind="map_cpu:", listed="4,5,6,7"), 4),
        # A task has started this process.
        (task_of_srun(0), 4),
        ({**task_of_srun(2), "TORCHELASTIC_RUN_ID": "none"}, 4),
        ({}, 4),
    ],
)
def test_srun_tasks_share_their_bindings_cores(monkeypatch, environ, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5}, raising=False)
    assert processes_on_cores(local_rank=2, procs=4, environ=environ) == expected


@dataclass(frozen=True, kw_only=True)
class Load:
    """Running threads at each reading, the quota of cores, and if OpenMP may not spin."""

    running: list[int]
    quota: int | None = None
    passive: bool = False


@pytest.mark.parametrize(
    "load",
    [
        Load(running=[1]),
        Load(running=[3, 4, 3], passive=True),
        # The other threads were busy for a moment.
        Load(running=[9, 3, 1]),
        Load(running=[1], quota=3, passive=True),
        # There is no /proc.
        Load(running=[]),
    ],
)
def test_openmp_spins_only_on_its_own_cores(monkeypatch, tmp_path, load: Load):
    def to_the_next_reading(_seconds=0.0):
        (tmp_path / "proc/loadavg").write_text(f"9.00 9.00 9.00 {readings.pop(0)}/300 4711\n")

    readings = [*load.running, 9]
    if load.running:
        (tmp_path / "proc").mkdir()
        to_the_next_reading()
    monkeypatch.setattr("time.sleep", to_the_next_reading)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(hardware_module, "_cpu_quotas", lambda _: [] if load.quota is None else [load.quota])
    assert hardware_module.openmp_environment(tmp_path) == ({"OMP_WAIT_POLICY": "PASSIVE"} if load.passive else {})
    # One of several that begin at once counts nobody; what is granted counts.
    several = hardware_module.openmp_environment(tmp_path, alone=False)
    assert several == ({"OMP_WAIT_POLICY": "PASSIVE"} if load.quota is not None else {})
