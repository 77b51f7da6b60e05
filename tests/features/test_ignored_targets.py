"""Targets that a loss ignores, and samples that a collate function drops: a step is that of the whole global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from framework import Strategy, TensorSamples, transforms
from framework.errors import TargetError
from framework.strategies import AllReduce, LocalSGD
from framework.tasks import F1, Accuracy, Supervised
from framework.types import Datasets, StepOutput
from tests.helpers import results
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, Draws
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.recipes import write_recipe
from tests.unit.small_trainer import make_trainer, settings, weights

CLASSES = 3
SIZE = 40
BATCH = 16
CLASS_WEIGHTS = torch.tensor([0.5, 0.0, 2.0])


class Own(nn.Module):
    """A loss of a user's own around torch's, with its attribute."""

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = functional.cross_entropy(scores, target, ignore_index=self.ignore_index)
        return loss


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone())

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = 2 * self.inner(scores, target)
        return loss


def plain(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores, target)


def logged(scores: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(scores.log_softmax(dim=1), target, ignore_index=-7)


logged.ignore_index = -7  # type: ignore[attr-defined]


def flattened(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.transpose(1, -1).flatten(0, -2), target.flatten())


LOSSES: dict[str, Callable[[], Any]] = {
    "module": nn.CrossEntropyLoss,
    "class weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone()),
    "smoothing": lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
    "smoothing and class weights": lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS + 1, label_smoothing=0.2),
    "function": lambda: functional.cross_entropy,
    "partial": lambda: partial(functional.cross_entropy, ignore_index=-7, weight=CLASS_WEIGHTS + 1),
    "own function": lambda: plain,
    "own function, flattened": lambda: flattened,
    "own attribute": lambda: logged,
    "own module": lambda: Own(-7),
    "module around one": Holds,
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, CLASSES)


def points(mark: int, *, seed: int = 0, images: bool = False) -> TensorDataset:
    """Two in three targets are ignored, and whole micro-batches of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, 4, *([5] if images else []), generator=generator)
    classes = x[:, :CLASSES].argmax(dim=1)
    classes[torch.rand(classes.shape, generator=generator) < 0.5] = mark
    classes[: SIZE // 4] = mark
    return TensorDataset(x, classes)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Conv1d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x)
        return scores


def trained(
    context: Context,
    name: str,
    *,
    accumulate: int = 1,
    images: bool = False,
    keeps: bool = False,
    strategy: type[AllReduce] = AllReduce,
) -> tuple[list[Tensor], dict[str, float], dict[str, float]]:
    """Return the weights, what is logged and what is evaluated after two epochs. keeps: samples are resident."""
    loss = LOSSES[name]()
    mark = -7 if name in ("partial", "own attribute", "own module") else -100
    task = Supervised(loss, {"accuracy": Accuracy(), "f1": F1()}, train_metrics=True)
    data = points(mark, images=images)
    trainer = make_trainer(
        settings(accumulate_grad_batches=accumulate, max_epochs=2, log_every_n_steps=100),
        model=Pixels() if images else model(),
        task=task,
        data=data,
        val=points(mark, seed=1, images=images),
        context=context,
        strategy=Strategy() if context.world_size == 1 else strategy(context=context),
        shuffle=False,
    )
    if keeps:
        assert trainer.train_loader.whole is not None
        task.observe_samples(trainer.train_loader.whole)
    trainer.train_loader = with_batch(trainer.train_loader, accumulate, context)
    for epoch in range(2):
        for window in trainer.train_loader.epoch(epoch):
            trainer.train_step(window)
            trainer.progress.advance(window, global_batch_size=window.global_count)
    found = trainer.state.evaluate(trainer.val_loaders).metrics
    return weights(trainer), trainer.read_means(), found


def with_batch(loader: Any, accumulate: int, context: Context) -> Any:
    from tests.helpers.internals import BatchPlan

    return loader.replanned(BatchPlan(BATCH, accumulate, context.world_size))


def assert_same(one: Any, other: Any) -> None:
    for own, wanted in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-6)
        assert torch.isfinite(own).all()
    for own, wanted in zip(one[1:], other[1:], strict=True):
        assert own == pytest.approx(wanted, abs=1e-6)
        assert all(map(math.isfinite, own.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_an_ignored_target_has_no_weight(name: str, own_state: None, rank_pool: RankPool) -> None:
    whole = trained(cpu_context(), name)
    assert_same(trained(cpu_context(), name, accumulate=8), whole)
    assert_same(trained(cpu_context(), name, accumulate=8, keeps=True), whole)
    for rank in rank_pool.run(trained, name, accumulate=4):
        assert_same(rank, whole)


@pytest.mark.parametrize(
    "name", ["module", "function", "own function", "own function, flattened", "own module", "smoothing"]
)
def test_an_ignored_element_has_no_weight(name: str, own_state: None, rank_pool: RankPool) -> None:
    whole = trained(cpu_context(), name, images=True)
    assert_same(trained(cpu_context(), name, images=True, accumulate=8), whole)
    for rank in rank_pool.run(trained, name, images=True, accumulate=2):
        assert_same(rank, whole)


def test_one_batch_trains_as_torch_does(own_state: None) -> None:
    given, _, _ = trained(cpu_context(), "smoothing")
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
    x, classes = points(-100).tensors
    for _ in range(2):
        for batch in torch.arange(SIZE).split(BATCH):
            nn.CrossEntropyLoss(label_smoothing=0.2)(own(x[batch]), classes[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(given, own.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_without_ignored_targets_nothing_is_weighted(own_state: None) -> None:
    task = Supervised(nn.CrossEntropyLoss())
    x, classes = points(-100).tensors
    batch = [x, classes.clamp(min=0)]
    assert task.training_step(model(), batch).weight == SIZE
    task.observe_samples(batch)
    assert task.training_step(model(), batch).weight is None
    task.observe_samples([x, classes])
    assert task.training_step(model(), [x, classes]).weight == int((classes >= 0).sum())


class Doubled:
    """A transform that is no `Each`: it may change any tensor."""

    def __call__(self, batch: list[Tensor], draws: Draws) -> list[Tensor]:
        return [2 * batch[0], batch[1]]


@pytest.mark.parametrize(
    ("transform", "is_weighted"),
    [
        (None, False),
        (transforms.Each(transforms.Scale()), False),
        (transforms.Each(transforms.Scale(), None), False),
        # The targets that the loss gets aren't those in memory.
        (transforms.Each(None, transforms.Scale()), True),
        (Doubled(), True),
    ],
    ids=["nothing", "inputs", "inputs only", "targets", "anything"],
)
def test_targets_in_memory_are_looked_at_once(transform: Any, is_weighted: bool, own_state: None) -> None:
    x, classes = points(-100).tensors
    data = TensorSamples(x, classes.clamp(min=0), transform=transform)
    task = Supervised(nn.CrossEntropyLoss())
    trainer = make_trainer(settings(), model=model(), task=task, data=data)
    whole = trainer.train_loader.whole
    if whole is not None:
        task.observe_samples(whole)
    step = task.training_step(model(), [x, classes.clamp(min=0)])
    assert (step.weight is not None) is is_weighted


@pytest.mark.parametrize(
    ("output", "target", "weight"),
    [
        (torch.zeros(2, 3, 5), [[1, -100, 2], [-100, -100, 0]], 3),
        (torch.zeros(6, 5), [[1, -100, 2], [-100, -100, 0]], 3),
        (torch.zeros(3, 5), [[1], [-100], [0]], 2),
        ({"logits": torch.zeros(3, 5), "hidden": torch.zeros(3, 7)}, [1, -100, 0], 2),
        ((torch.zeros(()), torch.zeros(3, 5)), [1, -100, 0], 2),
        # Numbers, of which -100 is one as any other.
        (torch.zeros(3, 1), [1, -100, 0], None),
        (torch.zeros(3), [1, -100, 0], None),
        (torch.zeros(2, 3), [[1, -100, 2], [-100, -100, 0]], None),
        (torch.zeros(3, 2), [[1.0, -100.0], [0.0, 0.0], [0.0, 0.0]], None),
    ],
)
def test_a_custom_loss_ignores_class_minus_100(output: Any, target: Any, weight: int | None) -> None:
    class Gives(nn.Module):
        def forward(self, _: Tensor) -> Any:
            return output

    task = Supervised(lambda *_: torch.zeros(()))
    step = task.training_step(Gives(), [torch.zeros(2), torch.tensor(target)])
    assert step.weight == weight


def test_local_sgd_refuses_what_it_cannot_weight(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="each process steps by itself"):
        rank_pool.run(trained, "module", strategy=LocalSGD)


# Samples that are dropped


class Drops:
    """A task that leaves out samples, from a step on."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.steps = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        self.steps += 1
        if self.steps > self.begin:
            x = x[y > 0]
            y = y[y > 0]
        return StepOutput(functional.mse_loss(model(x)[:, 0], y), len(x), {"large": ((y > 1).sum(), len(y))})

    validation_step = training_step


def usable(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A collate function that drops samples: those of the first steps are all usable."""
    kept = [(x, y) for x, y in samples if y > 0]
    x = torch.stack([x for x, _ in kept]) if kept else torch.zeros(0, 3)
    return [x, torch.tensor([float(y) for _, y in kept])]


def numbers() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 3, generator=generator)
    y = x.sum(dim=1)
    # Whole micro-batches are ignored.
    y[: SIZE // 4] = -1.0
    return TensorDataset(x, y)


def late() -> Datasets:
    x, y = numbers().tensors
    y[:BATCH] = y[:BATCH].abs()
    return Datasets(TensorDataset(x, y), collate_fn=usable)


def filtered(context: Context, *, accumulate: int = 1, begin: int = 0) -> tuple[list[Tensor], dict[str, float]]:
    trainer = make_trainer(
        settings(accumulate_grad_batches=accumulate, log_every_n_steps=100),
        task=Drops(begin),
        data=numbers(),
        context=context,
        strategy=Strategy() if context.world_size == 1 else AllReduce(context=context),
    )
    for window in with_batch(trainer.train_loader, accumulate, context).epoch(0):
        trainer.train_step(window)
        trainer.progress.advance(window, global_batch_size=window.global_count)
    return weights(trainer), trainer.read_means()


def test_samples_the_task_drops_have_no_weight(own_state: None, rank_pool: RankPool) -> None:
    whole = filtered(cpu_context())
    assert_same(filtered(cpu_context(), accumulate=8), whole)
    for rank in rank_pool.run(filtered, accumulate=2):
        assert_same(rank, whole)


@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_samples_dropped_by_collate_have_no_weight(train: Any, tmp_path: Path, strategy: str) -> None:
    recipe = {
        "defaults": [{"override /logger": "jsonl"}],
        "model": {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1},
        "task": {"_target_": f"{__name__}.Drops", "begin": 10**6},
        "data": {"datasets": {"_target_": f"{__name__}.late"}, "global_batch_size": BATCH, "shuffle": False},
        "trainer": {"max_epochs": 2, "log_every_n_steps": 1},
        "optimizer": {"lr": 0.1},
    }
    write_recipe(tmp_path, "dropping", recipe)
    whole = train("recipe=dropping")
    for overrides in (
        ("trainer.accumulate_grad_batches=4",),
        ("topology.procs_per_node=2", f"strategy={strategy}"),
    ):
        run_dir = train("recipe=dropping", *overrides)
        results.assert_same(results.weights(run_dir), results.weights(whole), tolerance=1e-6)
        for name in ("train/loss", "train/large"):
            assert results.curve(run_dir, name) == pytest.approx(results.curve(whole, name), abs=1e-6)


def test_leaving_out_samples_later_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)returned num_samples=\d+ for a micro-batch of 8.*as `weight`"):
        rank_pool.run(filtered, begin=1)


@pytest.mark.parametrize(
    ("num_samples", "weight", "said"),
    [
        (0, 3.0, "num_samples=0 and weight=3"),
        (0, torch.tensor(3), "num_samples=0 and weight=3"),
        (4, -1.0, "weight=-1. It can't be negative"),
        (-1, None, "a num_samples that is -1"),
    ],
)
def test_contradictions_are_refused(num_samples: int, weight: Any, said: str) -> None:
    class Contradicts:
        def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
            return StepOutput(model(batch[0]).mean(), num_samples, weight=weight)

        validation_step = training_step

    trainer = make_trainer(task=Contradicts())
    with pytest.raises(TargetError, match=said):
        trainer.fit()
