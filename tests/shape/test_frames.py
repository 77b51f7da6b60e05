"""How far it is from the start of a rank to `loss.backward()`: four of our frames at most."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import framework
from framework import Callback, FitInfo, Log, StepInfo
from tests.helpers.internals import compose

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
    arguments = ["recipe=toy", "launcher=in_process", "trainer.gpus=0", "trainer.fast_dev_run=2", "logger=none"]
    assert compose.main(arguments) == 0
    assert len(seen) == 2
    assert all(len(names) <= MAX_FRAMES for names in seen), seen[0]


class Idle(Callback):
    """Has every hook, as inherited."""

    def on_fit_start(self, info: FitInfo) -> None:
        return


class Silent:
    """Might report something after each step, and doesn't."""

    def on_train_step_end(self, report: StepInfo) -> Log | None:
        return None


@pytest.mark.usefixtures("own_state")
def test_hooks_that_nobody_wrote_are_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def calls(steps: int, *overrides: str) -> Counter[str]:
        """Count the calls of our functions in a training of so many steps."""
        counts: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
                counts[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

        short = ("logger=none", "checkpoint=none", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
        arguments = ["recipe=toy", "launcher=in_process", "trainer.gpus=0", f"trainer.max_steps={steps}", *short]
        sys.setprofile(note)
        try:
            assert compose.main([*arguments, *overrides]) == 0
        finally:
            sys.setprofile(None)
        return counts

    idle = "+callbacks.idle._target_=tests.shape.test_frames.Idle"
    silent = "+callbacks.silent._target_=tests.shape.test_frames.Silent"
    # Do what happens once in a process beforehand.
    calls(1, idle)
    bare, observed, reporting = (calls(20, *given) - calls(10, *given) for given in ((), (idle,), (silent,)))
    assert bare.total() > 20
    assert observed == reporting == bare
