"""What ranks run that have stages of one model each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from framework.checkpoint import load
from framework.checkpoint.resharding import load_spread
from framework.distributed.context import Context
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.strategies import Pipeline
from framework.trainer import Trainer
from tests.multiproc.collective_entries import group, leave
from tests.multiproc.spread_entries import together_manager
from tests.unit.simulated_ranks import cpu_context
from tests.unit.small_trainer import Numbers, make_trainer, manager, samples, settings

WAYS: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe", "num_microbatches": 3},
    {"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2},
    {"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2},
)
TIGHT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-6}


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [each for _ in range(2) for each in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), *layers, nn.Linear(6, 1))


def trainer_of(context: Context, *, copies: int, steps: int = 20, **more: Any) -> tuple[Trainer, Numbers]:
    """Clips by the norm of all gradients; validates twice. copies: of the model in the pipelines to compare with."""
    alone = context.world_size == 1
    how = settings(
        max_steps=steps,
        max_epochs=None,
        gradient_clip_val=0.5,
        val_check_interval=10,
        accumulate_grad_batches=copies if alone else 1,
    )
    numbers = Numbers()
    trainer = make_trainer(
        how,
        model=network(),
        optimizer=lambda parameters: Adam(parameters, lr=0.01),
        context=context,
        val=samples(13),
        loggers={"numbers": numbers},
        **more,
    )
    return trainer, numbers


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, and what the optimizer keeps of them, by name; this rank's."""
    model, optimizer = trainer.parts.bare_model, trainer.parts.optimizer
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return found


def end_as_one_process(rank: RankArguments, _link: Link) -> None:
    """Every way on four ranks: weights, states, logged and evaluated numbers; then the checkpoints of each."""
    folder = Path(rank.run_dir).parent
    with group(rank) as context:
        for number, way in enumerate(WAYS):
            strategy = Pipeline(context=context, **way)
            copies = strategy.data_share.world_size
            alone, wanted = trainer_of(cpu_context(), copies=copies)
            alone.fit()
            place = folder / f"pipeline_{number}"
            checkpoints = together_manager(place, context, holds_own=True, every_n_steps=20)
            trainer, logged = trainer_of(context, copies=copies, strategy=strategy, checkpoints=checkpoints)
            trainer.fit()
            checkpoints.close()
            _compare(trainer, state_of(alone), whole=len(state_of(alone)))
            for (step, epoch, mine), (at, then, theirs) in zip(logged.logged, wanted.logged, strict=True):
                assert (step, epoch) == (at, then)
                assert _computed(mine) == pytest.approx(_computed(theirs), abs=1e-5)
            _as_a_whole(place, alone)
            _into_others(place, trainer, context, way=WAYS[number - 1])
        leave(rank, len(WAYS))


def _computed(values: Mapping[str, float]) -> dict[str, float]:
    """All but what was measured of time."""
    names = {"train/loss", "train/lr", "train/grad_norm", "val/loss"}
    return {name: value for name, value in values.items() if name in names}


def _compare(trainer: Trainer, wanted: dict[str, Tensor], *, whole: int) -> None:
    found = state_of(trainer)
    assert 0 < len(found) < whole
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], **TIGHT)


def _as_a_whole(place: Path, alone: Trainer) -> None:
    """The checkpoint is that of one process, numbers of parameters too."""
    state = load(place / "step_00000020", map_location="cpu")
    model, theirs = state["model"], alone.parts.bare_model.state_dict()
    assert model.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(model[name], value, **TIGHT)
    saved, plain = state["training"]["optimizer"], alone.parts.optimizer.state_dict()
    assert saved["param_groups"] == plain["param_groups"]
    assert saved["state"].keys() == plain["state"].keys()
    for number, entry in plain["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(saved["state"][number][name], value, **TIGHT)
    alone.parts.load_state_dict(state["training"])


def _into_others(place: Path, trainer: Trainer, context: Context, *, way: dict[str, Any]) -> None:
    """Bit for bit into stages made in another way; and the checkpoint of one process into these."""
    directory = place / "step_00000020"
    state = load(directory, map_location="cpu")
    other, _ = trainer_of(context, copies=1, steps=2, strategy=Pipeline(context=context, **way))
    other.fit()
    read = load_spread(directory, other.parts.bare_model, other.parts.optimizer)
    other.load_state_dict(read["training"])
    assert other.progress.step == 20
    assert all(torch.equal(value, state["model"][name]) for name, value in other.parts.bare_model.state_dict().items())
    plain_folder = place / f"plain_{context.rank}"
    plain = manager(plain_folder, every_n_steps=4)
    alone, _ = trainer_of(cpu_context(), copies=1, steps=4, checkpoints=plain)
    alone.fit()
    plain.close()
    read = load_spread(plain_folder / "step_00000004", trainer.parts.bare_model, trainer.parts.optimizer)
    trainer.load_state_dict(read["training"])
    wanted = state_of(alone)
    assert all(torch.equal(value, wanted[name]) for name, value in state_of(trainer).items())
