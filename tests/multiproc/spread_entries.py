"""What ranks run that spread a model over them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from framework.checkpoint import complete_steps, sharded
from framework.checkpoint.manager import CheckpointManager
from framework.checkpoint.resharding import load_spread
from framework.checkpoint.together import Together
from framework.config.schema import ClipAlgorithm, Precision
from framework.distributed.collectives import gather_to_all, sum_over_ranks
from framework.distributed.context import Context
from framework.distributed.group import limit_groups, set_timeout, side_group, timeout_of
from framework.distributed.tensors import local, whole
from framework.errors import CheckpointError, DiskError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.optim import clip_gradients
from framework.precision import PrecisionPlugin
from framework.strategies import FSDP
from framework.trainer import Trainer
from framework.types import own_groups
from tests.multiproc.collective_entries import group, leave, wait_for
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
        strategy=FSDP(context=context, min_num_params=20, data_parallel_shard_degree=more.pop("degree", None)),
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


def together_manager(folder: Path, context: Context, *, holds_own: bool = False, **changes: Any) -> CheckpointManager:
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
        together=Together(side_group(20.0), holds_own=holds_own),
    )


def train_and_save(rank: RankArguments, _link: Link, *, degree: int | None = None) -> None:
    """Leaves a checkpoint and, beside it, what is in it as plain tensors; where each part is written once."""
    folder = Path(rank.run_dir).parent
    with group(rank) as context:
        checkpoints = together_manager(folder / "checkpoints", context, every_n_steps=3)
        trainer = spread_trainer(context, checkpoints=checkpoints, degree=degree)
        groups = own_groups(trainer.parts.strategy)
        limit_groups(20.0, groups)
        shape = [context.world_size] if degree is None else [context.world_size // degree, degree]
        assert [each.size() for each in groups] == shape
        trainer.fit()
        checkpoints.close()
        plain = tensors_of(trainer)
        if context.is_main:
            torch.save(plain, folder / "plain.pt")
        tensors = trainer.state_dict()["sharded"]
        mine = sharded.shards_of(tensors, is_first=context.is_main).tensors
        written = torch.tensor([float(sum(each.numel() for each in mine.values()))])
        assert sum_over_ranks(written, context).item() == sum(each.numel() for each in tensors.values())
        # Copies of the model are alike, bit for bit.
        held = {name: local(each) for name, each in trainer.parts.bare_model.named_parameters()}
        over = degree or context.world_size
        for other in gather_to_all(held, context)[context.rank % over :: over]:
            assert all(torch.equal(value, other[name]) for name, value in held.items())
        leave(rank, trainer.progress.step)


def train_copies_and_save(rank: RankArguments, link: Link) -> None:
    """Each copy of the model is over two ranks."""
    train_and_save(rank, link, degree=2)


def load_copies_again(rank: RankArguments, link: Link) -> None:
    load_again(rank, link, degree=2)


def load_again(rank: RankArguments, _link: Link, *, degree: int | None = None) -> None:
    """What another number of ranks left, into a trainer that has gone elsewhere."""
    folder = Path(rank.run_dir).parent
    with group(rank) as context:
        trainer = spread_trainer(context, steps=2, degree=degree)
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


def wait_in_a_copy_in_vain(rank: RankArguments, _link: Link) -> None:
    """The groups that copies of a model have get the time-out that the others get; rank 1 doesn't come to a forward."""
    with group(rank) as context:
        strategy = FSDP(context=context, data_parallel_shard_degree=2)
        model = strategy.wrap(nn.Linear(2, 2))
        assert [timeout_of(each) for each in own_groups(strategy)] == [timedelta(seconds=30)] * 2  # the first group's
        set_timeout(1.0, context, groups=own_groups(strategy))
        if context.rank == 1:
            wait_for(Path(rank.run_dir, "rank_0.json"), within_s=25.0)
            leave(rank, "waited")
        elif context.rank == 0:
            try:
                model(torch.ones(1, 2))
            except RuntimeError as error:
                leave(rank, str(error))
        else:
            model(torch.ones(1, 2))
            leave(rank, "computed")


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


PAIRS: tuple[tuple[Precision, str | None, str | None], ...] = (
    (Precision.FP32, None, None),
    (Precision.FP32, "bf16", None),
    (Precision.FP32, "bf16", "bf16"),
    (Precision.FP32, None, "bf16"),
    (Precision.BF16_MIXED, None, None),
    (Precision.BF16_MIXED, "bf16", "fp32"),
    (Precision.BF16_MIXED, "bf16", "bf16"),
    (Precision.FP16_MIXED, None, None),
    (Precision.FP16_MIXED, "fp16", "fp32"),
    (Precision.FP16_MIXED, "fp16", "fp16"),
    (Precision.FP16_MIXED, "fp32", "fp16"),
    (Precision.BF16, None, None),
    (Precision.BF16, "bf16", "fp32"),
    (Precision.FP64, None, None),
)
SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def every_number_format(rank: RankArguments, _link: Link) -> None:
    """Of each precision and policy, how far the weights are from those of the same rule in one process; in place 1 from
    those of 32 bits. Two ranks take a half of the samples each; the norm that gradients are clipped by is that of all.
    """
    with group(rank) as context:
        exact = _steps_alone(Precision.FP32, None, None)[0]
        off = []
        for precision, param, reduce in PAIRS:
            strategy = FSDP(
                context=context, min_num_params=20, mp_policy={"param_dtype": param, "reduce_dtype": reduce}
            )
            strategy.check_precision(precision)
            plugin = PrecisionPlugin(precision, device=context.device)
            model = strategy.wrap(plugin.convert_model(_plain()))
            found, norms = _steps(model, plugin, shares=[_share(context.rank)], strategy=strategy)
            wanted, wanted_norms = _steps_alone(precision, param, reduce)
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(wanted_norms), rtol=1e-2, atol=0.0)
            off.append([_off(found, wanted), _off(found, exact)])
        leave(rank, off)


def _share(rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = samples(32).tensors
    return inputs[rank::2], targets[rank::2]


def _off(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, wanted, strict=True))


def _steps(
    model: nn.Module, plugin: PrecisionPlugin, *, shares: list[tuple[Tensor, Tensor]], strategy: Any
) -> tuple[list[Tensor], list[float]]:
    """The weights after 20 steps as a Trainer makes them, and the norms of gradients."""
    optimizer, norms = SGD(model.parameters(), lr=0.05), []
    for _ in range(20):
        for share in shares:
            inputs, targets = plugin.convert_batch(share)
            with strategy.accumulate(model, synchronise=True):
                with plugin.autocast():
                    loss = (model(inputs).squeeze(1) - targets).square().mean()
                plugin.scaler.scale(loss).backward()
        plugin.scaler.unscale_(optimizer)
        norm = clip_gradients(list(model.parameters()), value=1.0, algorithm=ClipAlgorithm.NORM)
        assert norm is not None
        norms.append(float(norm))
        plugin.scaler.step(optimizer)
        plugin.scaler.update()
        optimizer.zero_grad()
    return [whole(each.detach()).clone() for each in model.parameters()], norms


class _Rule:
    """What `mp_policy` says, by one process for two ranks: a model whose weights are rounded for each forward, and a
    strategy that adds rounded gradients."""

    def __init__(self, model: nn.Module, param: str | None, reduce: str | None) -> None:
        self._model, self._parameters = model, dict(model.named_parameters())
        self._kept = next(iter(self._parameters.values())).dtype
        self._param = SHORT[param] if param else self._kept
        self._reduce = SHORT[reduce] if reduce else self._kept
        self._sums: dict[str, Tensor] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        self.short = {name: each.detach().to(self._param).requires_grad_() for name, each in self._parameters.items()}
        output = torch.func.functional_call(self._model, self.short, inputs.to(self._param))
        return output if self._param == self._kept else output.to(self._kept)

    def parameters(self) -> Any:
        return self._model.parameters()

    @contextmanager
    def accumulate(self, _: Any, *, synchronise: bool) -> Iterator[None]:
        yield
        for name, parameter in self._parameters.items():
            assert self.short[name].grad is not None
            half = self.short[name].grad.to(self._reduce) / 2  # type: ignore[union-attr]
            # The first of the two is kept until the second comes.
            parameter.grad = (self._sums.pop(name) + half).to(self._kept) if name in self._sums else None
            if parameter.grad is None:
                self._sums[name] = half


def _steps_alone(precision: Precision, param: str | None, reduce: str | None) -> tuple[list[Tensor], list[float]]:
    plugin = PrecisionPlugin(precision, device=torch.device("cpu"))
    rule: Any = _Rule(plugin.convert_model(_plain()), param, reduce)
    return _steps(rule, plugin, shares=[_share(0), _share(1)], strategy=rule)
