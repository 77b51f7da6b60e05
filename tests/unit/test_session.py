"""Which cores a rank has, by where it was started."""

from __future__ import annotations

import os

import pytest

from tests.helpers.contexts import cpu_context
from tests.helpers.internals import parse, procs_on_cores
from tests.unit.config.raw import raw_config


@pytest.mark.parametrize(("launcher", "shared"), [("auto", False), ("external", False), ("local", True)])
def test_cores_bound_by_srun_are_not_divided(monkeypatch, launcher, shared):
    """This process is the second of two tasks of srun with eight cores each."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    bound = {"STEP_TASKS_PER_NODE": "2", "LOCALID": "1", "CPU_BIND_TYPE": "mask_cpu:", "CPU_BIND_LIST": "0xFF,0xFF00"}
    for name, value in bound.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8, 16)), raising=False)
    raw = raw_config()
    raw["launcher"]["name"] = launcher
    assert procs_on_cores(parse(raw), cpu_context(1, world_size=2)) == (2 if shared else 1)
