from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.remote.faults import Bucket, Run, hooked, operations


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty place in memory."""
    bucket = Bucket()
    for operation in operations():
        monkeypatch.setattr(MemoryFileSystem, operation, hooked(bucket, operation))
    bucket.clear()
    yield bucket
    bucket.clear()


@pytest.fixture
def new_run(shared_run: Callable[..., Path], tmp_path: Path) -> Callable[..., Run]:
    """Make a run directory; each machine has its own cache."""
    settings = ("logger=[]", "trainer.max_steps=1", "trainer.limit_test_batches=0", "checkpoint.monitor=val/loss")

    def make(machine: str = "here", *, save_last_k: int = 1) -> Run:
        records = shared_run(
            "recipe=toy", *settings, "checkpoint.save_top_k=1", f"checkpoint.save_last_k={save_last_k}"
        )
        return Run(tmp_path / machine, records)

    return make
