"""What a training step consists of: frames, calls of hooks, and operators."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import framework
from framework import Callback, FitInfo, Log, StepInfo
from recipes.toy import ToyModel, toy_regression
from tests.helpers.internals import compose

MAX_FRAMES = 4
START = "run_rank"
PACKAGE = str(Path(framework.__file__).parent)
# A training of nothing but steps, in this process.
BARE = (
    "recipe=toy",
    "launcher=in_process",
    "trainer.gpus=0",
    "logger=none",
    "checkpoint=none",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
)


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

        sys.setprofile(note)
        try:
            assert compose.main([*BARE, f"trainer.max_steps={steps}", *overrides]) == 0
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


class Operators(TorchDispatchMode):
    """Notes the operators that are called in this thread, each of which allocates what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))

    def of_a_step(self) -> Counter[str]:
        """Return those from the second loss to the third one: without what the first and the last step add."""
        losses = [position for position, name in enumerate(self.names) if name == "aten.mse_loss.default"]
        return Counter(self.names[losses[1] : losses[2]])


def operators_of_a_plain_step() -> Counter[str]:
    model = ToyModel()
    inputs, targets = toy_regression().train.tensors
    batch = (inputs[:20], targets[:20])
    with Operators() as operators:
        for _ in range(3):
            mse_loss(model(batch[0]), batch[1]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.add_(parameter.grad, alpha=-0.001)
                    parameter.grad = None
    return operators.of_a_step()


@pytest.mark.usefixtures("own_state")
def test_a_step_without_guards_is_a_plain_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of a callback, no tensor that a guard makes, and no waiting for a value."""
    monkeypatch.chdir(tmp_path)
    called: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/callbacks/"):
            called.append(frame.f_code.co_name)

    def operators_of_a_step(*overrides: str) -> Counter[str]:
        called.clear()
        sys.setprofile(note)
        try:
            with Operators() as operators:
                assert compose.main([*BARE, "trainer.max_steps=4", *overrides]) == 0
        finally:
            sys.setprofile(None)
        return operators.of_a_step()

    bare = operators_of_a_step()
    # What is imported is called `<module>`, or by the name of a class.
    assert not [name for name in called if name.startswith("on_")]
    # The losses that are returned and logged.
    assert bare - operators_of_a_plain_step() == Counter({"aten.detach.default": 2})
    assert not operators_of_a_plain_step() - bare

    for guard in ("spike_guard", "nan_guard"):
        guarded = operators_of_a_step(f"callbacks=[{guard}]")
        assert "on_micro_batch_start" in called
        assert guarded["aten.linalg_vector_norm.default"] > 0
