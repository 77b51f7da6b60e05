"""The engine against plain PyTorch: the same weights as a loop anyone could write, and on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from framework.checkpoint import find, load
from framework.data.sampler import GlobalOrder
from framework.seed import seed_everything
from recipes.toy import ToyModel, toy_regression

EPOCHS = 3
SHORT = ("logger=none", f"trainer.max_epochs={EPOCHS}")
Train = Callable[..., Path]


def weights_of(run_dir: Path) -> dict[str, Tensor]:
    """The last checkpoint's weights."""
    return load(find(run_dir), map_location="cpu", parts=["model"])["model"]


def plain_loop(*, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    seed_everything(0, rank=0)
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data: Any = toy_regression().train
    order = GlobalOrder(len(data), seed=0, shuffle=True)
    for epoch in range(EPOCHS):
        loader: Any = DataLoader(data, batch_size=batch_size, sampler=order.indices(epoch).tolist())
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def assert_close(given: dict[str, Tensor], wanted: dict[str, Tensor], *, tolerance: float) -> None:
    assert given.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(given[name], tensor, rtol=0.0, atol=tolerance)


@pytest.mark.usefixtures("own_state")
def test_one_process_is_the_plain_loop_bit_for_bit(train: Train) -> None:
    assert_close(weights_of(train(*SHORT, "recipe=toy")), plain_loop(batch_size=20), tolerance=0.0)


@pytest.mark.usefixtures("own_state")
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("topology.procs_per_node=2", "data.global_batch_size=20"), marks=pytest.mark.exhaustive),
        # 20 isn't a multiple of 3: shares of 7, 7 and 6.
        ("topology.procs_per_node=3", "data.global_batch_size=20"),
        ("topology.procs_per_node=2", "data.batch_size=5", "trainer.accumulate_grad_batches=2"),
        pytest.param(
            ("topology.procs_per_node=1", "data.batch_size=5", "trainer.accumulate_grad_batches=4"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("topology.procs_per_node=2", "data.global_batch_size=20", "data.num_workers=1"),
            marks=pytest.mark.exhaustive,
        ),
        ("recipe=toy_model_parallel", "topology.procs_per_node=2", "data.global_batch_size=20"),
        ("topology.procs_per_node=2", "data.global_batch_size=20", "strategy=ddp", "strategy.static_graph=true"),
        ("topology.procs_per_node=3", "data.global_batch_size=20", "strategy=fsdp", "strategy.min_num_params=50"),
    ],
    ids=" ".join,
)
def test_the_number_of_processes_changes_nothing(train: Train, overrides: tuple[str, ...]) -> None:
    recipe = () if any(text.startswith("recipe=") for text in overrides) else ("recipe=toy",)
    assert_close(weights_of(train(*SHORT, *recipe, *overrides)), plain_loop(batch_size=20), tolerance=1e-6)


@pytest.mark.usefixtures("own_state")
@pytest.mark.multiproc
def test_a_short_last_batch_weighs_its_samples(train: Train) -> None:
    """1,600 samples in batches of 37: the last has 9, for 4 processes 3, 2, 2 and 2."""
    many = weights_of(train(*SHORT, "recipe=toy", "topology.procs_per_node=4", "data.global_batch_size=37"))
    assert_close(many, plain_loop(batch_size=37), tolerance=1e-6)


@pytest.mark.usefixtures("own_state")
@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_samples_joins(train: Train, strategy: str) -> None:
    """1,600 samples in batches of 41: the last has 1, so one of the two processes has none."""
    two = ("topology.procs_per_node=2", "data.global_batch_size=41", f"strategy={strategy}")
    many = weights_of(train(*SHORT, "recipe=toy", *two))
    assert_close(many, plain_loop(batch_size=41), tolerance=1e-6)
