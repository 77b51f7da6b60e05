"""What ranks run that spread a model over them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from framework.checkpoint import complete_steps, sharded
from framework.checkpoint.manager import CheckpointManager
from framework.checkpoint.resharding import load_spread
from framework.checkpoint.together import Together
from framework.config.schema import Precision
from framework.distributed.collectives import gather_to_all, sum_over_ranks
from framework.distributed.context import Context
from framework.distributed.group import side_group
from framework.distributed.tensors import local, whole
from framework.errors import CheckpointError, DiskError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.strategies import FSDP
from framework.trainer import Trainer
from tests.multiproc.collective_entries import group, leave
from tests.unit.simulated_ranks import cpu_context
from tests.unit.small_trainer import make_trainer, manager, samples, settings


def network() -> nn.Module:
    """Three ranks have nothing of the last layer."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 1))


def spread_trainer(context: Context, *, steps: int = 8, checkpoints: Any = None, **more: Any) -> Trainer:
    return make_trainer(
        more.pop("how", None) or settings(max_steps=steps, max_epochs=None, gradient_clip_val=0.5),
        model=more.pop("model", None) or network(),
        optimizer=more.pop("optimizer", None) or (lambda parameters: Adam(parameters, lr=0.01)),
        strategy=FSDP(context=context, min_num_params=20),
        context=context,
        checkpoints=checkpoints,
        data=samples(48),  # no batch of a single sample: BatchNorm wants two
        **more,
    )


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """All of the model's and the optimizer's, whole. Every rank must call it."""
    found = dict(trainer.parts.bare_model.state_dict())
    for number, entry in trainer.parts.optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": value for name, value in entry.items()}
    return {name: whole(value).clone() for name, value in found.items()}


def together_manager(folder: Path, context: Context, **changes: Any) -> CheckpointManager:
    """Warnings go to `warned_RANK`."""
    usual = manager(folder, **changes)

    def warn(text: str) -> None:
        Path(folder.parent, f"warned_{context.rank}").write_text(text)

    return CheckpointManager(
        usual._settings,
        folder,
        config_text="recipe: small\n",
        is_writer=context.is_main,
        warn=warn,
        together=Together(side_group(20.0)),
    )


def train_and_save(rank: RankArguments, _link: Link) -> None:
    """Leaves a checkpoint and, beside it, what is in it as plain tensors."""
    folder = Path(rank.run_dir).parent
    with group(rank) as context:
        checkpoints = together_manager(folder / "checkpoints", context, every_n_steps=3)
        trainer = spread_trainer(context, checkpoints=checkpoints)
        trainer.fit()
        checkpoints.close()
        plain = tensors_of(trainer)
        if context.is_main:
            torch.save(plain, folder / "plain.pt")
        leave(rank, trainer.progress.step)


def load_again(rank: RankArguments, _link: Link) -> None:
    """What another number of ranks left, into a trainer that has gone elsewhere."""
    folder = Path(rank.run_dir).parent
    with group(rank) as context:
        trainer = spread_trainer(context, steps=2)
        trainer.fit()
        state = load_spread(folder / "checkpoints" / "step_00000008", trainer.parts.bare_model, trainer.parts.optimizer)
        trainer.load_state_dict(state["training"])
        found, wanted = tensors_of(trainer), torch.load(folder / "plain.pt", weights_only=True)
        assert found.keys() == wanted.keys()
        different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        held = [local(parameter).numel() for parameter in trainer.parts.bare_model.parameters()]
        leave(rank, {"different": different, "step": trainer.progress.step, "held": sum(held)})


class HalfFails:
    """The shard of one rank can't be written, once."""

    def __init__(self, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))


def fail_and_go_on(rank: RankArguments, _link: Link) -> None:
    """The disk refuses rank 1 at step 3; the save of step 6 is whole again. Training talks meanwhile."""
    folder = Path(rank.run_dir) / "checkpoints"
    with group(rank) as context:
        checkpoints = together_manager(folder, context, every_n_steps=3)
        module = vars(sharded)
        real = module["ChecksummedFile"]

        class Breaks:
            def on_train_step_end(self, report: Any) -> None:
                if report.step == 3 and context.rank == 1:
                    module["ChecksummedFile"] = HalfFails
                if report.step == 5:
                    # Until here both talk at the same time.
                    checkpoints._wait()
                    module["ChecksummedFile"] = real

        trainer = spread_trainer(context, checkpoints=checkpoints, callbacks={"breaks": Breaks()})
        trainer.fit()
        checkpoints.close()
        left = sorted(path.name for path in folder.iterdir())
        warned = folder.parent / f"warned_{context.rank}"
        leave(rank, [left, sorted(complete_steps(folder)), warned.read_text() if warned.exists() else None])
        assert threading.active_count() < 20


def agree_on_a_fault(rank: RankArguments, _link: Link) -> None:
    """One rank has nothing to write: all hear why, and nothing is there."""
    with group(rank) as context:
        together = Together(side_group(20.0))
        shards = sharded.shards_of({"x": torch.ones(3)}, is_first=context.is_main)
        write = (lambda _: None) if context.is_main else None
        fault = "it changed" if context.rank == context.world_size - 1 else None
        try:
            together.write(shards, write, fault=fault, require_room=lambda _: None)
        except DiskError as error:
            told = str(error)
        try:
            together.write(shards, write, fault=None, require_room=_no_room)
        except (DiskError, CheckpointError) as error:
            told += f"; {error}"
        leave(rank, told)


def _no_room(size_bytes: int) -> None:
    raise DiskError(f"no room for {size_bytes}")


def evaluate_uneven_parts(rank: RankArguments, _link: Link) -> None:
    """Of 6 and of 1 samples in batches of 5, and of more; ranks have unlike many, or none."""
    with group(rank) as context:
        found, wanted = {}, {}
        for size in (1, 6, 22):
            trainer = spread_trainer(
                context, steps=2, val=samples(size), how=settings(max_steps=2, val_check_interval=2)
            )
            trainer.fit()
            found[size] = trainer.val_metrics["val/loss"]
            alone = _alone(trainer, val=samples(size))
            alone.evaluate(epoch=0)
            wanted[size] = alone.val_metrics["val/loss"]
            assert all(hasattr(each, "device_mesh") for each in trainer.parts.bare_model.parameters())
        leave(rank, [found, wanted])


def _alone(trainer: Trainer, **more: Any) -> Trainer:
    """A trainer of this rank alone with the same weights."""
    weights = {name: whole(value) for name, value in trainer.parts.bare_model.state_dict().items()}
    gathered = gather_to_all(weights, trainer.context)[0]  # rank 0's buffers, which are those that are evaluated
    alone = make_trainer(settings(max_steps=2), model=network(), context=cpu_context(), **more)
    alone.parts.bare_model.load_state_dict(gathered)
    return alone


def measure_gradients(rank: RankArguments, _link: Link) -> None:
    """The norm that is logged and clipped by is that of a plain model over all samples, and so are the weights."""
    with group(rank) as context:
        how = settings(max_steps=1, gradient_clip_val=0.01, accumulate_grad_batches=2)
        spread = spread_trainer(context, how=how, model=_plain(), optimizer=lambda p: SGD(p, lr=1.0))
        (window,) = [next(iter(spread.train_loader.epoch(0)))]
        taken = torch.cat([micro.indices[: micro.num_samples] for micro in window.indices])
        spread.train_step(window)
        total = torch.zeros(48)
        total[taken] = 1.0
        chosen = sum_over_ranks(total, context).nonzero().flatten()
        model = _plain()
        inputs, targets = (tensor[chosen] for tensor in samples(48).tensors)
        (model(inputs).squeeze(1) - targets).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        SGD(model.parameters(), lr=1.0).step()
        torch.testing.assert_close(spread._grad_norm, norm)
        for name, value in spread.parts.bare_model.state_dict().items():
            torch.testing.assert_close(whole(value), model.state_dict()[name], rtol=0.0, atol=1e-6)
        leave(rank, len(chosen))


def _plain() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


def leave_out_an_overflow(rank: RankArguments, _link: Link) -> None:
    """In the second step one gradient is infinite, of a row that only rank 1 holds."""
    with group(rank) as context:
        trainer = spread_trainer(context, how=settings(max_steps=1), model=_plain(), precision=Precision.FP16_MIXED)
        trainer.fit()
        parts, scaler = trainer.parts, trainer.parts.precision.scaler
        before, scale = tensors_of(trainer), scaler.get_scale()
        inputs, targets = samples().tensors
        with parts.strategy.accumulate(parts.model, synchronise=True):
            scaler.scale((parts.model(inputs).squeeze(1) - targets).square().mean()).backward()
        gradient: Any = next(parts.bare_model.parameters()).grad
        if context.rank == 1:
            local(gradient)[-1, 0] = float("inf")
        trainer._update()
        after = tensors_of(trainer)
        leave(
            rank,
            [
                [name for name, value in before.items() if not torch.equal(after[name], value)],
                scaler.get_scale() / scale,
            ],
        )
