"""What a rank makes of where it was started; whole ranks are in the tests of runs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from framework import engine, session
from framework.config.parse import parse
from framework.hardware import Sharers
from tests.helpers.contexts import cpu_context
from tests.unit.config.raw import raw_config

SECOND_OF_TWO = cpu_context(1, world_size=2)


@pytest.mark.parametrize(
    ("launcher", "device", "shared"),
    [("auto", "cpu", False), ("adopted", "cpu", False), ("local", "cpu", True), ("local", "cuda:1", True)],
)
def test_cores_that_srun_bound_a_rank_to_are_not_divided_again(monkeypatch, launcher, device, shared):
    """In the second of two tasks of srun's, with eight cores each. Freed memory is kept if the CPU computes."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    bound = {"STEP_TASKS_PER_NODE": "2", "LOCALID": "1", "CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFF,0xFF00"}
    for name, value in bound.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 16)), raising=False)
    threads: list[int] = []
    kept: list[set[int]] = []
    kept_memory: list[bool] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(session, "threads_per_process", lambda procs: 8 // procs)
    monkeypatch.setattr(session, "set_deterministic", lambda *_, **__: None)
    monkeypatch.setattr(session, "keep_freed_memory", lambda: kept_memory.append(True))
    monkeypatch.setattr(engine, "keep_to_cores", kept.append)
    raw = raw_config()
    raw["launcher"]["name"] = launcher
    config, context = parse(raw), replace(SECOND_OF_TWO, devices=(torch.device(device),))
    session._prepare_process(config, context)
    assert (threads, kept_memory) == ([4 if shared else 8], [True] * (device == "cpu"))
    sharers = session.core_sharers(config, context)
    assert sharers == (Sharers(2, 1) if shared else Sharers(1, 0))
    engine._keep_to_own_cores(sharers)
    assert kept == [set(range(12, 16)) if shared else set(range(8, 16))]
