"""Train an unchanged LightningModule: `task=lightning`. docs/lightning.md says what maps to what.

The module is the model. The task calls its steps and hooks; the optimizer and schedule come from
`configure_optimizers`; `self.log` and `self.trainer` are replaced.
"""

from __future__ import annotations

import copy
import inspect
import math
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from framework.config.schema import Config
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.sharded import is_model_sharded
from framework.errors import ConfigError, TargetError
from framework.tasks.lightning.log import Log, LogPart, short_name
from framework.tasks.lightning.trainer import Stage, TrainerView, trainer_of
from framework.types import Batch, EpochInfo, FitInfo, Interval, LRSchedulerConfig, StepInfo, StepOutput, Stop

_CORE = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
_SCHEDULE = "_lightning_schedule"  # an optimizer's attribute: the schedule that came with it

_STAGES = ("train", "validation", "test")
_CALLED = {
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_before_optimizer_step"),
    *("setup", "teardown", "configure_model", "configure_optimizers", "on_after_batch_transfer"),
    *(f"on_{stage}_{event}" for stage in _STAGES for event in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{event}" for stage in _STAGES for event in ("start", "end")),
}
"""The hooks that are called. Loaders come from `data.datasets`."""

_INSTEAD = {  # of hooks that are refused: what to use
    "backward": "The framework goes backward from the loss that training_step returns.",
    "configure_callbacks": "Write framework callbacks, and list them in the section `callbacks`.",
    "configure_gradient_clipping": "Use trainer.gradient_clip_val and gradient_clip_algorithm.",
    "clip_gradients": "Use trainer.gradient_clip_val and gradient_clip_algorithm.",
    "lr_scheduler_step": "Use a torch.optim.lr_scheduler.LRScheduler.",
    "optimizer_step": "Use on_before_optimizer_step, or a torch.optim.Optimizer with a `step` of its own.",
    "optimizer_zero_grad": "Gradients are set to None after each step.",
    "on_before_zero_grad": "Use on_train_batch_end.",
    "on_after_backward": "Use on_before_optimizer_step.",
    "on_save_checkpoint": "Keep the state in buffers (register_buffer), which checkpoints have.",
    "on_load_checkpoint": "Keep the state in buffers (register_buffer), which checkpoints have.",
    "transfer_batch_to_device": "Batches are moved to the device as they are. Use on_after_batch_transfer.",
    "on_before_batch_transfer": "Do it in the dataset or the collate function.",
}


@final
class LightningTask:
    """A task that calls the steps and hooks of the model, a LightningModule.

    Raises ConfigError for any other model, or one that overrides a hook without a counterpart.
    """

    def __init__(self, *, model: nn.Module, config: Config, context: Context) -> None:
        base = _base_of(model)
        module: Any = model
        _refuse_hooks(module, base, predicts=config.job == "predict")
        self._overridden = {name for name in _CALLED if _overrides(module, base, name)}
        self._context = context
        self._trains = config.job == "train"
        self._is_sharded: bool | None = None  # known once a strategy has wrapped the model
        self._tests = _overrides(module, base, "test_step")  # without it, validation_step does
        self._trainer = trainer_of(config, context)
        self._trainer._module = weakref.ref(module)
        module.trainer = self._trainer
        module.setup({"eval": "test", "predict": "predict", "export": "predict"}.get(config.job, "fit"))
        module.configure_model()
        if self._overridden & {"setup", "configure_model"}:
            module.to(context.device)  # with what these have made
        utilities = f"{base.__module__.removesuffix('.core.module')}.utilities"
        data = import_module(f"{utilities}.data")
        self._detached = import_module(f"{utilities}.memory").recursive_detach
        self._log = Log(module, context, infer_batch_size=data.extract_batch_size)
        module.log = self._log.log
        names = {"train": "training_step", **{stage: f"{stage}_step" for stage in ("validation", "test", "predict")}}
        self._steps: dict[str, Any] = {stage: getattr(module, name) for stage, name in names.items()}
        self._num_arguments = {stage: _num_arguments(step) for stage, step in self._steps.items()}
        self._stage = "validation"
        self._accumulated = config.trainer.accumulate_grad_batches
        self._sets: list[str] = []  # of the part that is evaluated
        self._dataloader_idx: tuple[int, ...] = ()
        self._batch_idx = self._batches_trained = 0
        self._has_begun = self._is_set_up = False
        self._finished: tuple[Any, Batch, int] | None = None  # for on_train_batch_end

    # Steps

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self._end_batch()
        number, self._batches_trained = self._batches_trained, self._batches_trained + 1
        output, batch = self._step("train", model, batch, number)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise TargetError(
                f"{self._name}.training_step returned {'None' if output is None else 'a dict without a loss'}. "
                "Lightning skips such a batch, but here every process takes part in every step.\n"
                "Return a loss: 0 * loss trains on nothing."
            )
        if "on_train_batch_end" in self._overridden:
            self._finished = self._outputs(output, loss), batch, number
        return StepOutput(loss, self._log.num_samples)

    def _outputs(self, output: Any, loss: Tensor) -> dict[str, Any]:
        """Return what on_train_batch_end gets, as from Lightning: without graphs, and the loss as it accumulates."""
        others = dict(output) if isinstance(output, Mapping) else {}
        return {**self._detached(others), "loss": loss.detach().clone() / self._accumulated}

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        number, self._batch_idx = self._batch_idx, self._batch_idx + 1
        output, batch = self._step(self._stage, model, batch, number)
        with self._log.within(self._part, in_step=True):
            self._hook(f"on_{self._stage}_batch_end", output, batch, number, *self._dataloader_idx)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return StepOutput(loss, self._log.num_samples)
        return StepOutput(torch.zeros(()), 0)  # only what is logged counts

    def predict_step(self, model: nn.Module, batch: Batch) -> Any:
        number, self._batch_idx = self._batch_idx, self._batch_idx + 1
        with self._log.within(None):
            return self._call("predict", model, self._transferred(batch), number)

    def _step(self, stage: str, model: nn.Module, batch: Batch, number: int) -> tuple[Any, Batch]:
        batch = self._transferred(batch)
        self._log.begin_batch(batch)
        with self._log.within("train" if stage == "train" else self._part, in_step=True):
            if self._hook(f"on_{stage}_batch_start", batch, number, *self._dataloader_idx) == -1:
                raise TargetError(
                    f"{self._name}.on_train_batch_start returned -1, to leave out the rest of the epoch, which has no "
                    "counterpart. Use trainer.limit_train_batches, or set self.trainer.should_stop."
                )
            return self._call(stage, model, batch, number), batch

    def _transferred(self, batch: Batch) -> Batch:
        if "on_after_batch_transfer" not in self._overridden:
            return batch
        return self._module.on_after_batch_transfer(batch, *(self._dataloader_idx or (0,)))

    def _call(self, stage: str, model: nn.Module, batch: Batch, number: int) -> Any:
        """Call a step of the module: through the model's forward if a strategy has wrapped or sharded it."""
        module, step = self._module, self._steps[stage]
        if self._is_sharded is None:
            self._is_sharded = is_model_sharded(module)
        arguments = (batch, number, *self._dataloader_idx)[: self._num_arguments[stage]]
        if model is module and not self._is_sharded:
            return step(*arguments)

        def forward(*arguments: Any) -> Any:
            del module.forward  # inside the step, self(x) is the module's own
            return step(*arguments)

        module.forward = forward
        try:
            return model(*arguments)
        finally:
            vars(module).pop("forward", None)

    # Hooks of training, called by the engine

    def on_sanity_check_start(self) -> None:
        """Call `on_fit_start`, which Lightning calls before the sanity check."""
        self._is_set_up = True
        self._hook("on_fit_start")

    def on_fit_start(self, info: FitInfo) -> None:
        if hasattr(info.optimizer, _SCHEDULE):
            raise ConfigError(
                f"{self._name}.configure_optimizers returns a schedule, and scheduler.schedule chooses another one.\n"
                "Leave one of them out: scheduler=lightning takes the module's."
            )
        self._has_begun = True
        self._trainer.stage = "train"
        self._trainer.global_step = info.start_step
        if info.steps_per_epoch is not None:
            self._trainer.num_training_batches = info.steps_per_epoch * self._accumulated
        if not self._is_set_up:
            self._hook("on_fit_start")
        with self._log.within("train"):
            self._hook("on_train_start")

    def on_train_epoch_start(self, report: EpochInfo) -> None:
        self._trainer.current_epoch, self._batches_trained = report.epoch, 0
        with self._log.within("train"):
            self._hook("on_train_epoch_start")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self._log.within("train", in_step=True):
            self._hook("on_before_optimizer_step", optimizer)

    def on_train_step_end(self, report: StepInfo) -> Stop | None:
        self._trainer.global_step = report.step
        self._end_batch()
        return self._stop

    def on_train_epoch_end(self, report: EpochInfo) -> Stop | None:
        with self._log.within("train"):
            self._hook("on_train_epoch_end")
        return self._stop

    def on_fit_end(self) -> None:
        self._hook("on_train_end")
        self._hook("on_fit_end")

    def close(self) -> None:
        self._hook("teardown", "fit")

    def _end_batch(self) -> None:
        if self._finished is not None:
            finished, self._finished = self._finished, None
            with self._log.within("train", in_step=True):
                self._hook("on_train_batch_end", *finished)

    @property
    def _stop(self) -> Stop | None:
        return Stop("self.trainer.should_stop was set") if self._trainer.should_stop else None

    # Evaluations

    def on_evaluations_start(self, model: nn.Module, prefixes: Sequence[str]) -> None:
        part = prefixes[0].partition("/")[0]
        self._stage = "test" if part == "test" and self._tests else "validation"
        self._sets = list(prefixes)
        self._trainer.stage = self._evaluation_stage
        with self._log.within(self._part):
            self._hook(f"on_{self._stage}_start")
            self._hook(f"on_{self._stage}_epoch_start")

    def on_evaluation_start(self, model: nn.Module, prefix: str) -> None:
        self._batch_idx = 0
        name = prefix.partition("/")[2]
        takes_index = self._num_arguments[self._stage] > 2
        self._dataloader_idx = (self._sets.index(prefix),) if name and takes_index else ()
        self._log.set_name = name

    def on_evaluation_end(self) -> None:
        self._dataloader_idx = ()
        self._log.set_name = ""

    def on_evaluations_end(self) -> None:
        with self._log.within(self._part):
            self._hook(f"on_{self._stage}_epoch_end")
            self._hook(f"on_{self._stage}_end")
        if self._trains:
            self._trainer.stage = "train"

    def logged_evaluations(self) -> Mapping[str, float]:
        return self._log.reduce("evaluation")

    def logged(self, interval: Interval) -> Mapping[str, float]:
        # Those of an evaluation are read once, by `logged_evaluations`.
        return {} if interval == "evaluation" else self._log.reduce(interval)

    @property
    def _evaluation_stage(self) -> Stage:
        if self._trains and not self._has_begun:
            return "sanity_check"
        return "test" if self._stage == "test" else "validate"

    @property
    def _part(self) -> LogPart:
        return "test" if self._stage == "test" else "val"

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks: logged values, torchmetrics, and the position in the epoch."""
        own = {"epoch": self._trainer.current_epoch, "batches": self._batches_trained, "log": self._log.state_dict()}
        return {"ranks": gather_to_all(own, self._context)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. With another number of ranks, rank 0 gets the logged values of all."""
        ranks, rank = state["ranks"], self._context.rank
        is_same = len(ranks) == self._context.world_size
        self._trainer.current_epoch, self._batches_trained = ranks[0]["epoch"], ranks[0]["batches"]
        for number, each in enumerate([ranks[rank]] if is_same else ranks if rank == 0 else ()):
            self._log.load_state_dict(each["log"], adds=number > 0)

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        self._end_batch()
        log, numbers = self._log.state_dict(), (self._batches_trained, self._batch_idx)
        yield
        self._log.load_state_dict(log)
        self._batches_trained, self._batch_idx = numbers
        self._finished = None

    @property
    def _module(self) -> Any:
        return self._log.module  # no attribute of its own: its parameters aren't the task's

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def _hook(self, name: str, *arguments: Any) -> Any:
        return getattr(self._module, name)(*arguments) if name in self._overridden else None


def configure_optimizers(params: Sequence[Tensor], model: nn.Module, total_steps: int | None = None) -> Optimizer:
    """Return the optimizer from `configure_optimizers` of the model. `lr_scheduler` then returns its schedule.

    params: the model's. For others, which serve to measure the optimizer's state, return one with the same settings.
    Raises ConfigError if there is no optimizer, or more than one.
    """
    module, name = cast("Any", model), type(model).__name__
    base = _base_of(model)
    if not isinstance(module._trainer, TrainerView):
        raise ConfigError(f"optimizer=lightning takes the optimizer of {name}. Use task=lightning, too.")
    is_probe = bool(params) and not {id(each) for each in params} & {id(each) for each in model.parameters()}
    if is_probe and (built := module.trainer._built_optimizer()) is not None:  # made once: the module may keep it
        return _like(built, params)
    trainer = module.trainer
    trainer.estimated_stepping_batches = math.inf if total_steps is None else total_steps
    if total_steps is not None and trainer.max_epochs is not None and trainer.max_steps == -1:
        trainer.num_training_batches = total_steps // trainer.max_epochs * trainer.accumulate_grad_batches
    if not _overrides(module, base, "configure_optimizers"):
        raise ConfigError(f"{name} has no configure_optimizers. Write one, or choose an option: optimizer=adam")
    given = module.configure_optimizers()
    if given is None:
        raise ConfigError(
            f"{name}.configure_optimizers returned None, so nothing would be trained.\nReturn an optimizer, or choose "
            "one here: optimizer=adam"
        )
    theirs = import_module(base.__module__.replace(".module", ".optimizer"))  # the forms that Lightning documents
    try:
        optimizers, schedulers, monitor = theirs._configure_optimizers(given)
        configs = theirs._configure_schedulers_automatic_opt(schedulers, monitor)
    except Exception as error:
        raise ConfigError(f"{name}.configure_optimizers: {error}") from error
    if len(optimizers) != 1:
        _refuse_several(name, f"configure_optimizers returned {len(optimizers)} optimizers")
    if len(configs) > 1:
        raise ConfigError(
            f"{name}.configure_optimizers returned {len(configs)} schedules of one optimizer. Return one: "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR joins several."
        )
    (optimizer,) = optimizers
    if is_probe:
        return _like(optimizer, params)
    module.trainer._built_optimizer = weakref.ref(optimizer)
    for number, group in enumerate(optimizer.param_groups if len(optimizer.param_groups) > 1 else ()):
        group.setdefault("name", str(number))  # of its learning rate in the logs
    for each in configs:
        setattr(optimizer, _SCHEDULE, _schedule(each, name))
    return cast("Optimizer", optimizer)


def _like(optimizer: Optimizer, params: Sequence[Tensor]) -> Optimizer:
    """Return an optimizer of `params` with the same settings, and without hooks."""
    probe = copy.copy(optimizer)
    vars(probe).pop("step", None)  # a schedule's, which steps the original
    probe._optimizer_step_pre_hooks, probe._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    probe.state, probe.param_groups = defaultdict(dict), []
    probe.add_param_group({"params": list(params)})
    return probe


def lr_scheduler(optimizer: Optimizer) -> LRSchedulerConfig | None:
    """Return the optimizer's schedule from `configure_optimizers`; None for a constant learning rate."""
    schedule: LRSchedulerConfig | None = vars(optimizer).pop(_SCHEDULE, None)
    return schedule


def _schedule(config: Any, name: str) -> LRSchedulerConfig:
    """Return the schedule, with the monitored metric under the name that validation gives it."""
    monitor = None
    if isinstance(config.scheduler, ReduceLROnPlateau):
        if config.interval == "step" or short_name(config.monitor, "train") != config.monitor:
            raise ConfigError(
                f"{name}.configure_optimizers: ReduceLROnPlateau with interval={config.interval} and monitor="
                f"{config.monitor}. It steps after validations: leave `interval` out, and monitor a metric of those."
            )
        monitor = f"val/{short_name(config.monitor, 'val')}"
    return LRSchedulerConfig(config.scheduler, config.interval, config.frequency, monitor, config.strict)


def _base_of(model: nn.Module) -> type:
    """Return the class LightningModule that the model inherits from. Raises ConfigError if there is none."""
    for cls in type(model).__mro__:
        if cls.__module__ in _CORE and cls.__name__ == "LightningModule":
            return cls
    raise ConfigError(
        "task=lightning trains a LightningModule, and the model is a "
        f"{type(model).__module__}.{type(model).__name__}.\n"
        "Choose another task: classification, regression, or one of your own."
    )


def _overrides(module: Any, base: type, name: str) -> bool:
    return getattr(type(module), name, None) is not getattr(base, name, None)


def _refuse_hooks(module: Any, base: type, *, predicts: bool) -> None:
    """Raise ConfigError if the module overrides hooks that would never be called."""
    name = type(module).__name__
    if not module.automatic_optimization:
        _refuse_several(name, "automatic_optimization=False")
    hooks = {each for each in dir(base) if each.startswith(("on_", "configure_"))} | _INSTEAD.keys()
    if not predicts:  # Lightning doesn't call them either
        hooks = {each for each in hooks if not each.startswith("on_predict_")}
    refused = sorted(each for each in hooks - _CALLED if _overrides(module, base, each))
    if refused:
        lines = [f"  {each}: {_INSTEAD.get(each, 'Leave it out.')}" for each in refused]
        raise ConfigError("\n".join([f"{name} overrides hooks that have no counterpart here:", *lines]))


def _refuse_several(name: str, what: str) -> NoReturn:
    raise ConfigError(
        f"{name}: {what}. A task with several optimizers names its losses, each with an optimizer:\n\n"
        "  class MyTask:\n"
        "      def __init__(self):\n"
        '          self.phases = [framework.Phase("critic", self.critic, optimizer="critic"), ...]\n\n'
        "      def critic(self, model, batch):\n"
        '          return framework.StepOutput(model("critic", batch), len(batch))\n\n'
        "  optimizer: {critic: {_target_: torch.optim.Adam, params: '^critic', lr: 0.001}, ...}\n\n"
        "See docs/optimizers.md. A model is any nn.Module, this one too."
    )


def _num_arguments(step: Any) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step takes."""
    kinds = [each.kind for each in inspect.signature(step).parameters.values()]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else sum(kind in named for kind in kinds)
