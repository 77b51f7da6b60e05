from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from framework.launch import heartbeat
from framework.launch.heartbeat import beating
from framework.pulse import Pulse, PulseReader

WAIT_S = 20.0


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    made = Pulse()
    yield made
    made.close()


@pytest.fixture
def reader(pulse: Pulse) -> Iterator[PulseReader]:
    made = PulseReader(os.dup(pulse.fd))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.02)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def next_beat(reader: PulseReader) -> None:
    """Return after one that began after this call."""
    for _ in range(2):
        before = reader.read().beat_s
        wait_for(lambda before=before: reader.read().beat_s > before)  # type: ignore[misc]


def test_it_beats_until_it_is_left(pulse: Pulse, reader: PulseReader) -> None:
    with beating(pulse):
        next_beat(reader)
    assert all(thread.name != "heartbeat" for thread in threading.enumerate())
    last = reader.read().beat_s
    time.sleep(0.1)
    assert reader.read().beat_s == last


def test_it_counts_the_collectives_that_were_begun_and_never_goes_back(pulse: Pulse, reader: PulseReader) -> None:
    with beating(pulse):
        next_beat(reader)
        assert reader.read().collectives == 0
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            next_beat(reader)
            before = reader.read().collectives
            for _ in range(3):
                dist.all_reduce(torch.ones(1))
            next_beat(reader)
            assert reader.read().collectives == before + 3
        finally:
            dist.destroy_process_group()
        next_beat(reader)
        assert reader.read().collectives == before + 3
