"""A process that writes checkpoints is killed at any moment; what it leaves must be usable."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from framework.checkpoint import complete_steps, find, load
from tests.unit.checkpoint.states import write_small

WRITER = """
import sys
from pathlib import Path
import torch
from framework.checkpoint import CheckpointManager
from framework.config.schema import CheckpointConfig, Mode

settings = CheckpointConfig(
    path=None,
    enabled=True, monitor="val/loss", mode=Mode.MIN, save_top_k=1, save_last_k=1, every_n_steps=1, every_n_epochs=None,
    every_n_minutes=None,
)
manager = CheckpointManager(settings, Path(sys.argv[1]), config_text="", is_writer=True, warn=print)
print("ready", flush=True)
for count in range(10_000):
    step = count // 2 + 1  # every step twice, so that replacing is killed too
    value = torch.full((300_000,), float(step))
    state = {"model": {"weight": value}, "training": {"step": step}, "generators": []}
    manager.save(state, step=step, epoch=0, metrics={"val/loss": 1.0 / step})
"""


@pytest.mark.parametrize(
    "after_s", [0.03, 0.071, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (0.113, 0.157, 0.211))]
)
def test_whatever_moment_a_writer_is_killed_at_the_last_checkpoint_is_good(tmp_path: Path, after_s: float) -> None:
    folder = tmp_path / "checkpoints"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while not (folder / "last").is_symlink() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(after_s)
        writer.kill()
    for pointer in ("last", "best"):
        if pointer == "best" and not (folder / "best").is_symlink():
            continue  # killed between the first `last` and the first `best`
        read = load(find(folder / pointer), map_location="cpu")
        assert torch.equal(read["model"]["weight"], torch.full((300_000,), float(read["training"]["step"])))
    for path, manifest in complete_steps(folder).values():
        assert load(path, map_location="cpu")["training"]["step"] == manifest.step
    write_small(folder, 99_999)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], "the next save cleans up"
