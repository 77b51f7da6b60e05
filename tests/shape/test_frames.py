"""How far it is from the start of a rank to `loss.backward()`: four of our frames at most."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import framework
from framework import cli

MAX_FRAMES = 4
START = "run_rank"
PACKAGE = str(Path(framework.__file__).parent)


def own_frames(frame: FrameType | None) -> list[str]:
    """Names of the package's functions on the stack, the innermost last, from the start of the rank on."""
    names: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.insert(0, frame.f_code.co_name)
        if frame.f_code.co_name == START:
            return names
        frame = frame.f_back
    raise AssertionError(f"backward was called outside of {START}: {names}")


@pytest.mark.usefixtures("own_state")
def test_few_frames_lead_to_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    backward = torch.Tensor.backward

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(own_frames(sys._getframe(1)))
        backward(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", recording)
    monkeypatch.chdir(tmp_path)
    arguments = ["recipe=toy", "launcher=in_place", "trainer.gpus=0", "trainer.fast_dev_run=2", "logger=none"]
    assert cli.main(arguments) == 0
    assert len(seen) == 2
    assert all(len(names) <= MAX_FRAMES for names in seen), seen[0]
