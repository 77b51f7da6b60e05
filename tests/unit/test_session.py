"""What a rank makes of where it was started; whole ranks are in the tests of runs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from framework import engine, session
from framework.config.parse import parse
from framework.hardware import Sharers
from tests.unit.config.raw import raw_config
from tests.unit.simulated_ranks import cpu_context

SECOND_OF_TWO = cpu_context(1, world_size=2)


def config_of(launcher):
    raw = raw_config()
    raw["launcher"]["name"] = launcher
    return parse(raw)


@pytest.fixture(autouse=True)
def _bound(monkeypatch):
    """As in the second of two tasks of srun's, with eight cores each."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {
        "STEP_TASKS_PER_NODE": "2",
        "LOCALID": "1",
        "CPU_BIND_TYPE": "mask_cpu:",
        "CPU_BIND_LIST": "0xFF,0xFF00",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 16)), raising=False)


@pytest.mark.parametrize(("launcher", "shared"), [("auto", False), ("adopted", False), ("local", True)])
def test_the_cores_that_srun_bound_a_rank_to_are_not_divided_again(monkeypatch, launcher, shared):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(session, "threads_per_process", lambda procs: 8 // procs)
    monkeypatch.setattr(session, "set_deterministic", lambda *_, **__: None)
    config = config_of(launcher)
    session._prepare_process(config, SECOND_OF_TWO)
    assert threads == [4 if shared else 8]
    kept: list[set[int]] = []
    monkeypatch.setattr(engine, "keep_to_cores", kept.append)
    sharers = session.core_sharers(config, SECOND_OF_TWO)
    assert sharers == (Sharers(2, 1) if shared else Sharers(1, 0))
    engine._keep_to_own_cores(sharers)
    assert kept == [set(range(12, 16)) if shared else set(range(8, 16))]


@pytest.mark.parametrize(("device", "keeps"), [("cpu", True), ("cuda:1", False)])
def test_freed_memory_is_kept_where_the_cpu_computes(monkeypatch, device, keeps):
    asked: list[bool] = []
    monkeypatch.setattr(session, "keep_freed_memory", lambda: asked.append(True))
    monkeypatch.setattr(session, "set_deterministic", lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    session._prepare_process(config_of("local"), replace(SECOND_OF_TWO, devices=(torch.device(device),)))
    assert asked == [True] * keeps
