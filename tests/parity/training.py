"""A small training on ranks with any strategy, and the plain PyTorch loop that it must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from framework import Strategy
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD, Pipeline
from framework.types import FitInfo, StepInfo
from tests.helpers.internals import (
    ClipAlgorithm,
    Context,
    GlobalOrder,
    Precision,
    PrecisionPlugin,
    Trainer,
    apply_activation_checkpointing,
    full_tensor,
    import_dynamo_late,
    micro_batches,
    plan_batches,
)
from tests.unit.small_trainer import BATCH, Numbers, make_trainer, samples, settings

STEPS = 20
LR = 0.05
MOMENTUM = 0.9
DECAY = 0.01
POWERSGD = {"powersgd": {"start_powerSGD_iter": 4, "min_compression_rate": 1}}
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": DDP,
    "ddp static": partial(DDP, static_graph=True),
    "ddp unused": partial(DDP, find_unused_parameters=True, gradient_as_bucket_view=False),
    "ddp bf16": partial(DDP, comm_hook="bf16"),
    "ddp fp16": partial(DDP, comm_hook="fp16"),
    "ddp powersgd": partial(DDP, comm_hook=POWERSGD),
    "allreduce": AllReduce,
    "allreduce each": partial(AllReduce, bucket_cap_mb=0),
    "butterfly": Butterfly,
    "fsdp": partial(FSDP, min_num_params=30),
    "fsdp classes": partial(FSDP, wrap=["Linear"], reshard_after_forward=False),
    "hsdp": partial(FSDP, min_num_params=30, data_parallel_shard_degree=2),
    "gpipe": partial(Pipeline, schedule="gpipe", num_microbatches=3),
    "gpipe whole": partial(Pipeline, schedule="gpipe", num_microbatches=1),
    "gpipe copies": partial(Pipeline, schedule="gpipe", num_stages=2, num_microbatches=1),
    "1f1b": partial(Pipeline, num_microbatches=3),
    "1f1b copies": partial(Pipeline, num_stages=2, num_microbatches=2, bucket_cap_mb=0),
    "interleaved": partial(Pipeline, schedule="interleaved", num_microbatches=2),
    "interleaved copies": partial(Pipeline, schedule="interleaved", num_stages=4, num_microbatches=2),
    "local_sgd": partial(LocalSGD, every_n_steps=6),
    "diloco": partial(LocalSGD, every_n_steps=6, warmup_steps=5, outer_lr=0.7, outer_momentum=0.9, nesterov=True),
}


class How(NamedTuple):
    """What a step is made of beside its strategy. recomputed: classes of modules."""

    network: str = "conv"
    precision: Precision = "64-true"
    clip: float | None = 0.5
    algorithm: ClipAlgorithm = "norm"
    passes: int = 2
    # In samples. The last global batch of an epoch is short, and some ranks have none of it.
    size: int = 73
    channels_last: bool = False
    recomputed: tuple[str, ...] = ()

    def plugin(self) -> PrecisionPlugin:
        return PrecisionPlugin(self.precision, device=torch.device("cpu"), channels_last=self.channels_last)

    def model(self, *, seed: int = 0) -> nn.Module:
        """Return the model as the engine makes it."""
        torch.manual_seed(seed)
        model = self.plugin().convert_model(NETWORKS[self.network]())
        apply_activation_checkpointing(model, self.recomputed or None)
        return model


def _conv() -> nn.Module:
    first = (nn.Linear(3, 16), nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 6, 2), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def _normed() -> nn.Module:
    first = (nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh())
    return nn.Sequential(*first, nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))


def _dense(drop: float = 0.0) -> nn.Module:
    first = (nn.Linear(3, 10), nn.Tanh(), nn.Dropout(drop))
    return nn.Sequential(*first, nn.Linear(10, 6), nn.Tanh(), nn.Dropout(drop), nn.Linear(6, 1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": _conv,
    "normed": _normed,
    "dense": _dense,
    "dropping": partial(_dense, 0.5),
}


def optimizer_of(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def trainer_of(
    context: Context, strategy: Strategy, how: How, *, steps: int = STEPS, every: int | None = None, **more: Any
) -> Trainer:
    """Each replica draws weights of its own: it is for the strategy to make them equal.

    every: evaluate and log after so many steps; None: log all, evaluate at the end.
    """
    share = strategy.data_share(context)
    changes: dict[str, Any] = {"max_steps": steps, "max_epochs": None}
    changes |= {"val_check_interval": every or steps, "log_every_n_steps": every or 1}
    changes |= {"gradient_clip_val": how.clip, "gradient_clip_algorithm": how.algorithm}
    return make_trainer(
        settings(**changes, accumulate_grad_batches=how.passes),
        model=more.pop("model", None) or how.model(seed=share.rank),
        optimizer=optimizer_of,
        data=samples(how.size),
        val=samples(13),
        context=context,
        strategy=strategy,
        precision=how.precision,
        **more,
    )


class WeightsOfSteps:
    """A callback that keeps the weights after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    def on_train_step_end(self, report: StepInfo) -> None:
        self.weights.append(weights_of(self.model))


class Trained(NamedTuple):
    """What a rank has after training: of a model in stages its own weights."""

    weights: dict[str, Tensor]
    norms: list[float]
    val_loss: float


def train(context: Context, strategy: str, how: How, **options: Any) -> Trained:
    """Call it on every rank. options: more of the strategy."""
    numbers = Numbers()
    import_dynamo_late()
    made = STRATEGIES[strategy](context=context, **options)
    trainer = trainer_of(context, made, how, loggers={"numbers": numbers})
    trainer.fit()
    with trainer.state.evaluation_weights():
        weights = weights_of(trainer.state.bare_model)
    norms = [values["train/grad_norm"] for _, _, values in numbers.logged if "train/grad_norm" in values]
    return Trained(weights, norms, trainer.state.val_metrics["val/loss"])


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters and buffers by name. Every rank must call it."""
    return {name: full_tensor(value.detach()).clone() for name, value in model.state_dict().items()}


Batch = tuple[Tensor, Tensor]
Exchange = Callable[[int, Sequence[Tensor]], Tensor]
"""Makes of the gradients of all ranks what each steps with; the number is the parameter's."""


def mean(_: int, gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).mean(dim=0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def steps_of(data: TensorDataset, *, ranks: int, passes: int, cuts: int = 1) -> Iterator[list[list[Batch]]]:
    """Yield the micro-batches of every rank, step by step. cuts: parts of each pass, in a pipeline."""
    plan = plan_batches(
        batch_size=BATCH, global_batch_size=BATCH * ranks * passes, world_size=ranks, accumulate=passes * cuts
    )
    order = GlobalOrder(len(data), seed=0, shuffle=True)
    for epoch in count():
        for batch in order.indices(epoch)[:].split(plan.global_batch_size):
            of_ranks = []
            for rank in range(ranks):
                parts = micro_batches(plan, global_count=len(batch), rank=rank)
                of_ranks.append([data[batch[list(part)]] for part in parts if part])
            yield of_ranks


def plain_loop(
    replicas: Sequence[nn.Module],
    steps: Iterator[list[list[Batch]]],
    *,
    forward: Callable[[nn.Module, Tensor], Tensor],
    clip: Callable[[list[nn.Parameter]], float],
    exchange: Exchange = mean,
    exchanging_steps: int = STEPS,
    after_step: Callable[[int], object] | None = None,
    is_scaled: bool = False,
) -> list[float]:
    """Train one replica for each rank, one after another in this process; return the norms before clipping.

    The first `exchanging_steps` begin with the first one's buffers on all, and step with the exchanged gradients.
    """
    optimizers = [optimizer_of(model.parameters()) for model in replicas]
    scalers = [torch.amp.GradScaler("cpu", enabled=is_scaled) for _ in replicas]
    norms = []
    for number, of_ranks in enumerate(steps, start=1):
        total = sum(len(targets) for _, targets in chain.from_iterable(of_ranks))
        exchanges = number <= exchanging_steps
        if exchanges:
            for model in replicas[1:]:
                copy_tensors(model.buffers(), replicas[0].buffers())
        for model, scaler, own in zip(replicas, scalers, of_ranks, strict=True):
            for inputs, targets in own:
                loss = (forward(model, inputs).squeeze(1) - targets.to(_type_of(model))).square().mean()
                scaler.scale(loss * (len(targets) * len(replicas) / total)).backward()
        for place, same in enumerate(zip(*(model.parameters() for model in replicas), strict=True)):
            if exchanges and any(each.grad is not None for each in same):
                exchanged = exchange(place, [_gradient(parameter) for parameter in same])
                for parameter in same:
                    parameter.grad = exchanged.clone()
        for model, optimizer, scaler in zip(replicas, optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            norms.append(clip(list(model.parameters())))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if after_step is not None:
            after_step(number)
    return norms[:: len(replicas)]


def copy_tensors(own: Any, values: Any) -> None:
    with torch.no_grad():
        for each, value in zip(own, values, strict=True):
            each.copy_(value)


def _type_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def forward_of(how: How, param: torch.dtype | None = None) -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward in the number formats of `trainer.precision`, with weights and inputs rounded to `param`."""
    short = AUTOCAST.get(how.precision)

    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        kept = _type_of(model)
        rounded = {name: each.to(param or kept) for name, each in model.named_parameters()}
        with torch.autocast("cpu", short) if short else nullcontext():
            return torch.func.functional_call(model, rounded, inputs.to(param or kept)).to(kept)

    return forward


def clip_of(how: How) -> Callable[[list[nn.Parameter]], float]:
    def clip(parameters: list[nn.Parameter]) -> float:
        if how.algorithm == "norm":
            return float(nn.utils.clip_grad_norm_(parameters, how.clip or float("inf")))
        nn.utils.clip_grad_value_(parameters, how.clip or float("inf"))
        return 0.0

    return clip


@lru_cache
def expect(
    how: How, *, ranks: int, cuts: int = 1, exchange: Exchange = mean, param: torch.dtype | None = None
) -> Trained:
    """What the plain loop comes to, with replicas that take their parts of the same global batches.

    cuts: of each pass, in a pipeline. param: what weights are rounded to for each forward.
    """
    how = how._replace(recomputed=(), channels_last=False)
    replicas = [how.model() for _ in range(ranks)]
    is_scaled = how.precision == "16-mixed"
    steps = islice(steps_of(samples(how.size), ranks=ranks, passes=how.passes, cuts=cuts), STEPS)
    forward = forward_of(how, param)
    norms = plain_loop(replicas, steps, forward=forward, exchange=exchange, clip=clip_of(how), is_scaled=is_scaled)
    return Trained(weights_of(replicas[0]), norms, val_loss(replicas[0], forward))


def val_loss(model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> float:
    inputs, targets = samples(13).tensors
    with torch.no_grad():
        outputs = forward(model.eval(), inputs).squeeze(1)
    return float((outputs - targets.to(_type_of(model))).square().mean())
