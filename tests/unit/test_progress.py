from __future__ import annotations

from typing import Any

from framework.progress import Progress, hooks
from framework.types import Callback, Logger, StepReport, Stop

EVERY_HOOK = (
    "on_fit_start",
    "on_train_step_end",
    "on_validation_end",
    "on_fit_end",
    "evaluation_weights",
    "state_dict",
    "load_state_dict",
    "fit_start",
    "step",
)


class Plain:
    """Names no Protocol; writes one hook."""

    def on_train_step_end(self, report: StepReport) -> Stop | None:
        return Stop("enough")


class NamesTheProtocol(Callback):
    """Type checkers like it so; the hooks not written are the Protocol's empty ones."""

    def on_fit_end(self) -> None:
        return None


class QuietLogger(Logger):
    def metrics(self, values: Any, *, step: int, epoch: int) -> None:
        return None


# For a type checker a Protocol's empty methods are abstract; at run time they are empty.
make_callback: Any = NamesTheProtocol
make_logger: Any = QuietLogger


class Redefines(NamesTheProtocol):
    def on_validation_end(self, report: Any) -> None:
        return None


make_redefined: Any = Redefines


def test_steps_and_samples_are_counted_and_an_epoch_ends_at_the_next_ones_beginning() -> None:
    progress = Progress()
    progress.advance(global_count=8, epoch_end=False)
    progress.advance(global_count=8, epoch_end=False)
    assert progress == Progress(epoch=0, step=2, samples=16)
    progress.advance(global_count=3, epoch_end=True)
    assert progress == Progress(epoch=1, step=3, samples=0)


def test_progress_survives_its_state() -> None:
    progress, other = Progress(epoch=3, step=41, samples=7), Progress()
    other.load_state_dict(progress.state_dict())
    assert other == progress
    progress.advance(global_count=1, epoch_end=False)
    assert other.step == 41


def test_only_hooks_that_were_written_are_bound() -> None:
    plain = Plain()
    assert {name: hooks([plain], name) for name in EVERY_HOOK if hooks([plain], name)} == {
        "on_train_step_end": [plain.on_train_step_end]
    }


def test_a_protocol_named_as_base_costs_nothing() -> None:
    assert [name for name in EVERY_HOOK if hooks([make_callback()], name)] == ["on_fit_end"]
    assert [name for name in (*EVERY_HOOK, "metrics", "close") if hooks([make_logger()], name)] == ["metrics"]


def test_what_a_subclass_inherits_from_one_that_wrote_it_is_bound() -> None:
    assert [name for name in EVERY_HOOK if hooks([make_redefined()], name)] == ["on_validation_end", "on_fit_end"]


def test_hooks_come_in_the_order_of_the_observers_and_bound_to_them() -> None:
    first, other, last = Plain(), make_callback(), Plain()
    bound = hooks([first, other, last], "on_train_step_end")
    assert [hook.__self__ for hook in bound] == [first, last]  # type: ignore[attr-defined]


def test_a_hook_given_to_one_object_is_bound() -> None:
    observer = type("Nothing", (), {})()
    observer.on_fit_end = lambda: "called"
    assert [hook() for hook in hooks([observer], "on_fit_end")] == ["called"]
