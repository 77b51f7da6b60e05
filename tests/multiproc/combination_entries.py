"""What ranks run that train with every strategy in every number format, all options of a step at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from framework.activations import recompute
from framework.build import check_precision_fits
from framework.config.schema import ClipAlgorithm, Precision, TrainerConfig
from framework.data.batching import plan_batches
from framework.data.loader import TrainLoader
from framework.data.sampler import GlobalOrder
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.tensors import whole
from framework.errors import ConfigError
from framework.late_dynamo import late_dynamo
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.optim import clip_gradients
from framework.precision import PrecisionPlugin
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD, Pipeline
from framework.trainer import Trainer
from framework.types import StepOutput, Strategy, Window, data_share
from recipes.digits import ConvNet
from tests.multiproc.collective_entries import group, leave
from tests.unit.simulated_ranks import CPU, cpu_context
from tests.unit.small_trainer import BATCH, make_trainer, samples, settings

STEPS, EVERY = 20, 6
POWERSGD = {"powersgd": {"start_powerSGD_iter": 4, "min_compression_rate": 1}}
ASKED, IMAGES = "asked.json", "images.pt"
Weights = Mapping[str, Tensor]


def strategies(context: Context) -> dict[str, Callable[[], Strategy]]:
    """By name, those that go with so many ranks."""
    several = context.world_size > 1
    made: dict[str, Callable[[], Strategy]] = {
        "ddp": lambda: DDP(context=context),
        "ddp butterfly": lambda: DDP(context=context, comm_hook="butterfly"),
        "ddp fp16": lambda: DDP(context=context, comm_hook="fp16"),
        "ddp bf16": lambda: DDP(context=context, comm_hook="bf16"),
        "ddp powersgd": lambda: DDP(context=context, comm_hook=POWERSGD),
        "allreduce": lambda: AllReduce(context=context),
        "butterfly": lambda: Butterfly(context=context),
        "fsdp": lambda: FSDP(context=context, min_num_params=30),
        "hsdp": lambda: FSDP(context=context, min_num_params=30, data_parallel_shard_degree=2),
        "pipeline": lambda: Pipeline(context=context, schedule="gpipe", num_microbatches=2),
        "pipelines": lambda: Pipeline(context=context, num_stages=2, num_microbatches=2),
        "local_sgd": lambda: LocalSGD(context=context, every_n_steps=EVERY),
    }
    left_out = {"pipelines", "hsdp"} if context.world_size != 4 else {"pipeline"}
    return {name: make for name, make in made.items() if name not in (left_out if several else left_out | {"pipeline"})}


@dataclass(frozen=True)
class How:
    """What a step is made of, beside its strategy. step: of TrainerConfig. recomputed: classes of modules."""

    precision: Precision
    step: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    recomputed: tuple[str, ...] = ()
    compiles: bool = False

    @property
    def passes(self) -> int:
        return int(self.step.get("accumulate_grad_batches", 1))

    def settings(self, *, passes: int) -> TrainerConfig:
        length = {"max_steps": STEPS, "max_epochs": None, "log_every_n_steps": STEPS}
        return settings(**{**self.step, **length, "accumulate_grad_batches": passes})

    def plugin(self) -> PrecisionPlugin:
        return PrecisionPlugin(self.precision, device=CPU, channels_last=self.channels_last)

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """As the engine makes it."""
        model = self.plugin().convert_model(make())
        recompute(model, self.recomputed or None)
        return model


BY_NORM = {"gradient_clip_val": 0.005, "gradient_clip_algorithm": ClipAlgorithm.NORM}
BY_VALUE = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": ClipAlgorithm.VALUE}
TWICE = {"accumulate_grad_batches": 2}
HOWS = {
    "32-true": How(Precision.FP32, {**BY_VALUE, **TWICE}, channels_last=True),
    "bf16-mixed": How(Precision.BF16_MIXED, {**BY_NORM, **TWICE}, recomputed=("Linear", "Conv2d")),
    "16-mixed": How(Precision.FP16_MIXED, {**BY_NORM, **TWICE}, recomputed=("Linear",)),
    "bf16-true": How(Precision.BF16, BY_VALUE),
    "64-true": How(Precision.FP64, {**BY_NORM, **TWICE}, channels_last=True, recomputed=("Linear", "Conv2d")),
}
"""64 bits tell any mistake from rounding, so most comes together there."""


class Small:
    """A hundredth of the mean squared error: 16-mixed has no step to leave out. The learning rate makes up for it."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        return StepOutput(0.01 * (model(inputs).squeeze(1) - targets).square().mean(), len(targets))

    validation_step = training_step


class Classes:
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        images, labels = batch
        return StepOutput(nn.functional.cross_entropy(model(images), labels), len(labels))

    validation_step = training_step


def network() -> nn.Module:
    torch.manual_seed(3)
    convolved = (nn.Linear(3, 16), nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 6, 2), nn.Tanh(), nn.Flatten())
    return nn.Sequential(*convolved, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def digits_network() -> nn.Module:
    torch.manual_seed(3)
    return ConvNet(conv_dropout=0.0, dropout=0.0)


@dataclass(frozen=True)
class Training:
    """A model, data and task that every strategy trains alike. An epoch's last global batch is a short one."""

    make: Callable[[], nn.Module]
    task: Any
    data: Any
    lr: float

    def trainer(self, how: How, context: Context, *, passes: int, strategy: Strategy | None = None) -> Trainer:
        return make_trainer(
            how.settings(passes=passes),
            model=how.model(self.make),
            task=self.task,
            optimizer=lambda parameters: SGD(parameters, lr=self.lr),
            data=self.data,
            context=context,
            strategy=strategy,
            precision=how.precision,
        )

    def alone(self, how: How, *, parts: int) -> Weights:
        """After 20 steps of one process, with the global batches of so many."""
        trainer = self.trainer(how, cpu_context(), passes=how.passes * parts)
        trainer.fit()
        return dict(trainer.parts.bare_model.named_parameters())

    def apart(self, how: How, *, ranks: int) -> Weights:
        """The mean after 20 steps of so many replicas that train by themselves and take their mean every 6."""
        plugin, models = how.plugin(), [how.model(self.make) for _ in range(ranks)]
        optimizers = [SGD(model.parameters(), lr=self.lr) for model in models]
        windows = [self._windows(how, rank=rank, ranks=ranks) for rank in range(ranks)]
        for step in range(1, STEPS + 1):
            for model, optimizer, own in zip(models, optimizers, windows, strict=True):
                window = next(own)
                for batch, count in window.micro_batches:
                    with plugin.autocast():
                        loss = self.task.training_step(model, plugin.convert_batch(batch)).loss
                    (loss * (count * ranks / window.global_count)).backward()
                if "gradient_clip_val" in how.step:
                    value, algorithm = how.step["gradient_clip_val"], how.step["gradient_clip_algorithm"]
                    clip_gradients(list(model.parameters()), value=value, algorithm=algorithm)
                optimizer.step()
                optimizer.zero_grad()
            mean = {
                name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).mean(dim=0)
                for name, _ in models[0].named_parameters()
            }
            if step % EVERY == 0:
                for model in models:
                    model.load_state_dict(mean)
        return mean

    def _windows(self, how: How, *, rank: int, ranks: int) -> Iterator[Window]:
        size = BATCH * ranks * how.passes
        plan = plan_batches(batch_size=BATCH, global_batch_size=size, world_size=ranks, accumulate=how.passes)
        order = GlobalOrder(len(self.data), seed=0, shuffle=True)
        loader = TrainLoader(self.data, order=order, plan=plan, rank=rank, device=CPU)
        for epoch in range(STEPS):
            yield from loader.epoch(epoch)


class Asked(NamedTuple):
    """kind: one of HOWS. names: of strategies; empty: all. images: those that the test has put there, by plain steps.
    compiles: what is wrapped is captured by the compiler, but run as it was captured."""

    kind: str
    names: Sequence[str] = ()
    images: bool = False
    compiles: bool = False


def train_all(rank: RankArguments, _link: Link) -> None:
    """Of each thing in the file ASKED, leaves by strategy how far it is from one process, or local_sgd from its rule,
    and how far that has gone; or why it is refused."""
    torch.set_num_threads(1)
    folder = Path(rank.run_dir).parent
    with late_dynamo(), group(rank) as context:
        every = [Asked(*each) for each in json.loads((folder / ASKED).read_text())]
        leave(rank, [_train(each, folder, context) for each in every])


def _train(asked: Asked, folder: Path, context: Context) -> dict[str, Any]:
    how, training = HOWS[asked.kind], Training(network, Small(), samples(70), lr=5.0)
    if asked.images:
        how = How(how.precision, channels_last=True)
        training = Training(digits_network, Classes(), TensorDataset(*torch.load(folder / IMAGES)), lr=0.01)
    made = {name: make for name, make in strategies(context).items() if name in (asked.names or [name])}
    return _of_all(training, replace(how, compiles=asked.compiles), context, made)


def _of_all(
    training: Training, how: How, context: Context, strategies: Mapping[str, Callable[[], Strategy]]
) -> dict[str, Any]:
    known: dict[int, Weights] = {}
    begun = dict(how.model(training.make).named_parameters())
    found: dict[str, Any] = {}
    for name, make in strategies.items():
        strategy = make()
        try:
            _check(strategy, how.precision)
        except ConfigError as error:
            found[name] = str(error)
            continue
        parts = data_share(strategy, rank=context.rank, world_size=context.world_size).world_size
        if name == "local_sgd":
            wanted = training.apart(how, ranks=context.world_size)
        else:
            wanted = known.get(parts) or known.setdefault(parts, training.alone(how, parts=parts))
        found[name] = [_off(_trained(training, how, context, strategy), wanted), _off(begun, wanted)]
    return found


def _check(strategy: Strategy, precision: Precision) -> None:
    """What is refused before training; of a pipeline that is done with the config, see its checks."""
    check_precision_fits(precision, strategy)
    if isinstance(strategy, Pipeline) and precision is Precision.FP16_MIXED:
        raise ConfigError("by the config's checks")


def _trained(training: Training, how: How, context: Context, strategy: Strategy) -> Weights:
    """The same on all ranks, and whole; of stages, this rank's own."""
    trainer = training.trainer(how, context, passes=how.passes, strategy=strategy)
    if how.compiles:
        trainer.parts.model.compile(backend="eager")
    trainer.fit()
    scaler = trainer.parts.precision.scaler
    assert not scaler.is_enabled() or scaler.get_scale() == 65536.0  # no step was left out
    with trainer.parts.evaluation_weights():
        weights = {name: whole(each.detach()).clone() for name, each in trainer.parts.bare_model.named_parameters()}
    for other in gather_to_all(weights, context):
        assert all(torch.equal(other[name], value) for name, value in weights.items() if name in other)
    return weights


def _off(found: Weights, wanted: Weights) -> float:
    """By how much of the greatest weight at most."""
    most = max(float(each.detach().abs().max()) for each in wanted.values())
    apart = [(each.detach().double() - wanted[name].detach().double()).abs().max() for name, each in found.items()]
    return float(max(apart)) / most
