"""The loop on one rank: what is trained, logged, evaluated and observed, and what makes it fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from framework.errors import RunError, TargetError
from framework.types import Callback, FitInfo, StepInfo, StepOutput
from tests.helpers.internals import GlobalOrder, Interval, Trainer, step_times_module, trainer_module
from tests.unit.small_trainer import (
    BATCH,
    SIZE,
    STEPS_PER_EPOCH,
    BadAt,
    Marks,
    Numbers,
    Recorder,
    Squares,
    assert_equal,
    linear,
    link,
    make_trainer,
    manager,
    samples,
    saved_steps,
    settings,
    still,
    weights,
)

pytestmark = pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")


# Training equals a plain PyTorch loop


def windows(epoch: int, *, accumulate: int = 1) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each optimizer step of an epoch: a last, short step has fewer and smaller ones."""
    data = samples()
    for indices in GlobalOrder(SIZE, seed=0, shuffle=True).indices(epoch)[:].split(BATCH * accumulate):
        yield [data[part] for part in indices.tensor_split(-(-len(indices) // BATCH))]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return (model(inputs).squeeze(1) - targets).square().mean()


class PlainLoop:
    """What anyone would write, with each option in one line."""

    def __init__(
        self,
        *,
        accumulate: int = 1,
        clip: Callable[[Any], Any] | None = None,
        schedule: Callable[[Optimizer], Any] | None = None,
        interval: Interval | None = None,
        dtype: torch.dtype = torch.float32,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model = linear().to(dtype)
        self.norms: list[str] = []
        self.rates: list[float] = []
        optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        scheduler = schedule(optimizer) if schedule else None
        scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
        for epoch in range(2):
            for window in windows(epoch, accumulate=accumulate):
                scale = 1 / sum(len(targets) for _, targets in window)
                for inputs, targets in window:
                    with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                        loss = loss_of(self.model, (inputs.to(dtype), targets.to(dtype)))
                    scaler.scale(loss * (len(targets) * scale)).backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
                # As text, NaN equals NaN.
                self.norms.append(str(norm.item()))
                self.rates.append(optimizer.param_groups[0]["lr"])
                if clip is not None:
                    clip(self.model.parameters())
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if scheduler and interval == "step":
                    scheduler.step()
            if scheduler and interval == "epoch":
                scheduler.step()
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(math.inf)

    def weights(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


def halved(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def impatient(optimizer: Optimizer) -> ReduceLROnPlateau:
    """Nothing counts as an improvement."""
    return ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)


VALUE = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}


def by_norm(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(list(parameters), 0.5)


def by_value(parameters: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.1)


STEP = {"interval": "step"}
EPOCH = {"interval": "epoch"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the trainer is asked for something, and the plain loop."""

    settings: dict[str, Any] = field(default_factory=dict)
    # Arguments of `make_trainer`.
    parts: dict[str, Any] = field(default_factory=dict)
    # Arguments of `PlainLoop`.
    plain: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Training(),
    "3 batches": Training(settings={"accumulate_grad_batches": 3}, plain={"accumulate": 3}),
    "norm": Training(settings={"gradient_clip_val": 0.5}, plain={"clip": by_norm}),
    "value": Training(settings=VALUE, plain={"clip": by_value}),
    "by step": Training(parts={"scheduler": halved, **STEP}, plain={"schedule": halved, **STEP}),
    "by epoch": Training(parts={"scheduler": halved, **EPOCH}, plain={"schedule": halved, **EPOCH}),
    "plateau": Training(
        parts={"scheduler": impatient, "monitor": "val/loss", "val": samples(7)}, plain={"schedule": impatient}
    ),
    "bf16-mixed": Training(parts={"precision": "bf16-mixed"}, plain={"autocast": torch.bfloat16}),
    "64-true": Training(parts={"precision": "64-true"}, plain={"dtype": torch.float64}),
    "16-mixed": Training(
        settings={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        parts={"precision": "16-mixed"},
        plain={"autocast": torch.float16, "accumulate": 2, "clip": by_norm},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_plain_loop_bit_for_bit(case: str) -> None:
    """The weights, and what is logged of each step: the norm of the gradients before clipping, and the rate used."""
    training = CASES[case]
    plain = PlainLoop(**training.plain)
    numbers = Numbers()
    trainer = make_trainer(
        settings(**training.settings),
        optimizer=lambda p: SGD(p, lr=0.05, momentum=0.9),
        loggers={"numbers": numbers},
        **training.parts,
    )
    trainer.fit()
    assert_equal(weights(trainer), plain.weights())
    logged = [values for _, _, values in numbers.logged if "train/loss" in values]
    assert [values["train/lr"] for values in logged] == plain.rates
    if training.settings is not VALUE:
        assert [str(values["train/grad_norm"]) for values in logged] == plain.norms
    assert (trainer.progress.step, trainer.progress.epoch, trainer.progress.samples) == (len(plain.rates), 2, 0)


def test_a_schedule_waits_for_skipped_steps() -> None:
    steps: list[int] = []

    def counted(parameters: Any) -> SGD:
        optimizer = SGD(parameters, lr=0.05)
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        return optimizer

    trainer = make_trainer(
        precision="16-mixed",
        optimizer=counted,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
        interval="step",
    )
    trainer.fit()
    # The first scale is too large.
    assert 0 < len(steps) < trainer.progress.step
    assert trainer.state.schedule.state_dict()["last_epoch"] == len(steps)


def test_the_timeout_changes_after_the_first_step() -> None:
    calls: list[int] = []
    trainer = make_trainer(settings(max_steps=4), after_first_step=lambda: calls.append(trainer.progress.step))
    trainer.fit()
    again = make_trainer(settings(max_steps=8), after_first_step=lambda: calls.append(again.progress.step))
    again.progress.load_state_dict(asdict(trainer.progress))
    again.fit()
    assert calls == [1, 5]


# Logging


def test_it_logs_regularly_and_at_the_end() -> None:
    """Each time the mean over all samples since the last time; batches 6 and 10 aren't of the same size."""
    batches = [batch for epoch in range(2) for (batch,) in windows(epoch)]
    model = linear()
    errors = [(model(inputs).squeeze(1) - targets).square().detach() for inputs, targets in batches]
    for every, logged in ((4, [4, 8, 10]), (5, [5, 10]), (100, [10])):
        numbers = Numbers()
        how = settings(log_every_n_steps=every, max_steps=10)
        make_trainer(how, loggers={"numbers": numbers}, optimizer=still).fit()
        assert numbers.of("train") == [(step, (step - 1) // STEPS_PER_EPOCH) for step in logged]
        for begin, end in zip([0, *logged], logged, strict=False):
            assert numbers.losses()[end] == pytest.approx(torch.cat(errors[begin:end]).mean().item(), rel=1e-6)


class Slow(Squares):
    """A step takes 1 s and a batch of validation 1,000, by a clock that only this task advances."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.now += 1.0
        return super().training_step(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.now += 1000.0
        return super().training_step(model, batch)


@pytest.mark.parametrize("every", [1, 100])
def test_throughput_leaves_out_evaluation_and_saving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int
) -> None:
    clock = Slow()
    numbers = Numbers()
    for module in (trainer_module, step_times_module):
        monkeypatch.setattr(module, "time", clock)
    how = settings(log_every_n_steps=every, max_epochs=1, val_check_interval=4)
    checkpoints = manager(tmp_path, monitor="val/loss")
    make_trainer(how, task=clock, loggers={"numbers": numbers}, val=samples(5), checkpoints=checkpoints).fit()
    logged = [values for _, _, values in numbers.logged if "train/loss" in values]
    # A second for each step.
    assert [values["train/steps_per_s"] for values in logged] == pytest.approx([1.0] * len(logged))
    rates = [values["train/samples_per_s"] for values in logged]
    steps = min(every, STEPS_PER_EPOCH)
    assert rates[0] == pytest.approx(min(BATCH * steps, SIZE) / steps)
    assert rates[-1] == pytest.approx((SIZE - BATCH * (STEPS_PER_EPOCH - steps)) / steps)


# Evaluation


class Counts(nn.Linear):
    """A model with dropout and a buffer that every forward changes, in evaluation too."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(3, 1)
        self.forwards: Tensor
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(nn.functional.dropout(inputs, training=self.training)) + self.forwards / 100


class Noisy(Squares):
    """Draws a number in each step, and counts validation steps."""

    validations = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return super().training_step(model, [batch[0] + torch.randn(()), batch[1]])

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.validations += 1
        output = self.training_step(model, batch)
        return output._replace(metrics={"masked": (torch.tensor(0.0), torch.tensor(0))})


def noisy(**changes: Any) -> Trainer:
    trainer = make_trainer(settings(**changes), model=Counts(), task=Noisy(), val=samples(12))
    torch.manual_seed(6)
    return trainer


def test_the_sanity_check_changes_nothing() -> None:
    plain = noisy()
    plain.fit()
    checked = noisy(num_sanity_val_steps=2)
    # Metrics without samples in these batches are checked, too.
    assert checked.sanity_check() == ["val/loss", "val/masked"]
    assert vars(checked.state.task)["validations"] == 2
    assert checked.state.bare_model.training
    checked.fit()
    assert_equal(weights(checked), weights(plain))


def test_the_sanity_check_is_only_for_fresh_validation() -> None:
    for changes in ({"num_sanity_val_steps": 0}, {"check_val_every_n_epoch": None}, {"max_steps": 1}):
        trainer = noisy(**changes)
        if "max_steps" in changes:
            # The step is that of a resumed run.
            trainer.fit()
        assert trainer.sanity_check() == []
        assert not vars(trainer.state.task)


# What a task returns and raises

LOSS = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (LOSS, r"returned a tensor of shape \(\), float32. Return framework\.StepOutput"),
        ({"loss": LOSS}, r"returned a mapping with the keys \['loss'\]"),
        (StepOutput(0.5, 4), "a loss that is a float"),  # type: ignore[arg-type]
        (StepOutput(torch.zeros(4), 4), r"a loss that is a tensor of shape \(4,\)"),
        (StepOutput(LOSS, torch.tensor(4)), "a num_samples that is a tensor"),  # type: ignore[arg-type]
        (StepOutput(LOSS, 4, {"loss": (1.0, 4)}), "a metric called 'loss'"),
        (StepOutput(LOSS, 4, {"acc": 0.5}), "the metric 'acc' as a float"),  # type: ignore[dict-item]
        (StepOutput(LOSS, 4, {"acc": (torch.tensor(1j), 4)}), "the metric 'acc' as a tuple of 2"),
        (StepOutput(LOSS, 4, {"acc": (torch.zeros(3), 4)}), r"Return a pair \(sum over samples, count\)"),
    ],
)
def test_a_wrong_step_output_is_refused_early(output: Any, message: str) -> None:
    for method in ("training_step", "validation_step"):
        task = type("Wrong", (Squares,), {method: lambda *_: output})()
        trainer = make_trainer(task=task, val=samples(7))
        with pytest.raises(TargetError, match=rf"^Wrong\.{method} returned (.|\n)*{message.removeprefix('returned ')}"):
            (trainer.fit if method == "training_step" else trainer.sanity_check)()
        assert trainer.progress.step == 0


@pytest.mark.parametrize("name", ["lr", "lr/head", "grad_norm", "mfu", "steps_per_s"])
def test_a_metric_keeps_off_names_of_the_framework(name: str) -> None:
    output = StepOutput(LOSS, 4, {name: (1.0, 4)})
    trainer = make_trainer(task=type("Taken", (Squares,), {"training_step": lambda *_: output})())
    with pytest.raises(TargetError, match=f"a metric called '{name}', and the framework logs train/{name} itself"):
        trainer.fit()


def test_unusable_losses_and_predictions_are_refused() -> None:
    detached = StepOutput(torch.zeros(()), 4)
    trainer = make_trainer(task=type("Cut", (Squares,), {"training_step": lambda *_: detached})())
    with pytest.raises(TargetError, match=r"^Cut\.training_step returned a loss that doesn't depend on a trained"):
        trainer.fit()


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The step with a loss that is not finite, and the intervals of logs and checkpoints."""

    bad: int
    value: float
    log_every: int = 100
    save_every: int | None = None


@pytest.mark.parametrize(
    "case",
    [
        NonFinite(bad=7, value=math.nan, log_every=5, save_every=5),
        NonFinite(bad=1, value=math.inf, save_every=100),
        NonFinite(bad=7, value=math.inf, save_every=2),
        NonFinite(bad=12, value=math.nan),
    ],
)
def test_a_non_finite_loss_stops_without_saving(tmp_path: Path, case: NonFinite) -> None:
    checkpoints = case.save_every and manager(tmp_path, every_n_steps=case.save_every)
    how = settings(log_every_n_steps=case.log_every)
    with pytest.raises(RunError, match=rf"since step {case.bad} \(epoch \d\)"):
        make_trainer(how, task=BadAt(case.bad, value=case.value), checkpoints=checkpoints or None).fit()
    assert saved_steps(tmp_path) == [
        step for step in range(1, case.bad) if case.save_every and step % case.save_every == 0
    ]


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    trainer = make_trainer(task=BadAt(7, gradient_only=True), checkpoints=manager(tmp_path, every_n_steps=1))
    with pytest.raises(RunError, match="after step 7"):
        trainer.fit()
    assert saved_steps(tmp_path) == list(range(1, 7))


# Observers


def test_only_existing_hooks_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    for name in ("on_fit_start", "on_train_step_end", "on_validation_end"):
        monkeypatch.setattr(Callback, name, lambda *_, name=name: called.append(name))

    class OnlyAtTheEnd(Callback):
        def on_fit_end(self) -> None:
            called.append("on_fit_end")

    class Progressing(Numbers):
        def start(self, info: FitInfo) -> None:
            called.append(info)

        def on_train_step_end(self, info: StepInfo) -> None:
            called.append(info.step)

    trainer = make_trainer(
        settings(max_steps=3, val_check_interval=3),
        callbacks={"only": OnlyAtTheEnd(), "nothing": object()},
        loggers={"one": Progressing(), "other": Numbers()},
        val=samples(7),
    )
    trainer.fit()
    info = FitInfo(trainer.state.bare_model, 0, 3, STEPS_PER_EPOCH, max_epochs=2, optimizer=trainer.state.optimizer)
    assert called == [info, 1, 2, 3, "on_fit_end"]


def test_the_rank_status_shows_each_phase(tmp_path: Path) -> None:
    marks = Marks()
    how = settings(max_steps=2, accumulate_grad_batches=2, log_every_n_steps=100, val_check_interval=2)
    make_trainer(how, val=samples(7), checkpoints=manager(tmp_path), watched=link(marks)).fit()
    micro_batches = ["forward", "backward", "data"] * 2
    assert marks.seen == [
        # The hooks of the start count as logging, as all others do.
        "logging",
        "building",
        "data",
        "logging",
        "data",
        *micro_batches,
        "optimizer",
        1,
        "logging",
        "data",
        *micro_batches,
        "optimizer",
        2,
        "logging",
        "evaluate",
        "logging",
        "evaluate",
        "logging",
        "data",
        "checkpoint",
        "logging",
        # At the end, the rest is logged until the checkpoint is written.
        "checkpoint",
        "logging",
    ]


# The step path holds only the step

WAITING = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "__repr__")


@pytest.mark.parametrize("changes", [{}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}], ids=str)
def test_nothing_waits_for_the_device_between_logs(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    read: list[tuple[str, bool]] = []
    inside: list[bool] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            read.append((name, bool(inside)))
            return original(tensor, *args, **kwargs)

        return call

    trainer = make_trainer(
        settings(log_every_n_steps=5, max_steps=10, max_epochs=9, **changes),
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=halved,
        interval="step",
        callbacks={"recorder": Recorder()},
        loggers={"numbers": Numbers()},
    )
    log = trainer.log

    def marked() -> None:
        inside.append(True)
        log()
        inside.pop()

    monkeypatch.setattr(trainer, "log", marked)
    with monkeypatch.context() as patched:
        for name in WAITING:
            patched.setattr(Tensor, name, noting(name))
        trainer.fit()
    assert [name for name, in_log in read if not in_log] == []
    assert read, "logging reads tensors, so this must have seen it"
