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
# The attribute of an optimizer that keeps the schedule that came with it.
_SCHEDULE = "_lightning_schedule"

# The hooks that are called. Loaders come from `data.datasets`.
_CALLED = {
    "setup",
    "teardown",
    "configure_model",
    "configure_optimizers",
    "on_after_batch_transfer",
    "on_before_optimizer_step",
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
}

# What to use in place of hooks that are refused.
_INSTEAD = {
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

_STEPS = {
    "train": "training_step",
    "validation": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}
# What `setup` gets in each job; `fit` in training.
_SETUP_STAGES = {"eval": "test", "predict": "predict", "export": "predict"}


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
        self._has_test_step = _overrides(module, base, "test_step")
        self._context = context
        self._trains = config.job == "train"
        self._accumulated = config.trainer.accumulate_grad_batches

        self._trainer = trainer_of(config, context)
        self._trainer._module = weakref.ref(module)
        module.trainer = self._trainer
        module.setup(_SETUP_STAGES.get(config.job, "fit"))
        module.configure_model()
        if self._overridden & {"setup", "configure_model"}:
            # They may have made further modules.
            module.to(context.device)

        utilities = f"{base.__module__.removesuffix('.core.module')}.utilities"
        extract_batch_size = import_module(f"{utilities}.data").extract_batch_size
        self._detached = import_module(f"{utilities}.memory").recursive_detach
        self._log = Log(module, context, infer_batch_size=extract_batch_size)
        module.log = self._log.log

        self._steps: dict[str, Any] = {stage: getattr(module, name) for stage, name in _STEPS.items()}
        self._num_arguments = {stage: _num_arguments(step) for stage, step in self._steps.items()}
        # Known once a strategy has wrapped the model.
        self._is_sharded: bool | None = None

        # Where the task is. `validation` or `test`: which of the module's steps and hooks evaluate the present part.
        self._stage = "validation"
        self._batches_trained = 0
        self._batch_idx = 0
        # The sets of the part that is evaluated, and the argument `dataloader_idx` of those that get one.
        self._sets: list[str] = []
        self._dataloader_idx: tuple[int, ...] = ()
        self._has_called_fit_start = False
        self._has_begun = False
        # Outputs, batch and number of the last training batch, for on_train_batch_end.
        self._finished: tuple[Any, Batch, int] | None = None

    # Steps

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self._end_batch()
        number = self._batches_trained
        self._batches_trained += 1
        output, batch = self._step("train", model, batch, number)
        loss = _loss_in(output)
        if loss is None:
            returned = "None" if output is None else "a dict without a loss"
            raise TargetError(
                f"{self._name}.training_step returned {returned}. Lightning skips such a batch, but here every process "
                "takes part in every step.\nReturn a loss: 0 * loss trains on nothing."
            )
        if "on_train_batch_end" in self._overridden:
            self._finished = (self._outputs(output, loss), batch, number)
        return StepOutput(loss, self._log.num_samples)

    def _outputs(self, output: Any, loss: Tensor) -> dict[str, Any]:
        """Return what on_train_batch_end gets, as from Lightning: without graphs, and the loss as it accumulates."""
        outputs: dict[str, Any] = {}
        if isinstance(output, Mapping):
            outputs = self._detached(dict(output))
        outputs["loss"] = loss.detach().clone() / self._accumulated
        return outputs

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        number = self._next_batch_idx()
        output, batch = self._step(self._stage, model, batch, number)
        with self._log.within(self._part, in_step=True):
            self._hook(f"on_{self._stage}_batch_end", output, batch, number, *self._dataloader_idx)
        loss = _loss_in(output)
        if isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point():
            return StepOutput(loss, self._log.num_samples)
        # Without a loss, only what is logged counts.
        return StepOutput(torch.zeros(()), 0)

    def predict_step(self, model: nn.Module, batch: Batch) -> Any:
        number = self._next_batch_idx()
        with self._log.within(None):
            return self._call("predict", model, self._transferred(batch), number)

    def _next_batch_idx(self) -> int:
        number = self._batch_idx
        self._batch_idx += 1
        return number

    def _step(self, stage: str, model: nn.Module, batch: Batch, number: int) -> tuple[Any, Batch]:
        """Call the hook before a batch and the step. Return the step's output and the batch as it was transferred."""
        batch = self._transferred(batch)
        self._log.begin_batch(batch)
        part = "train" if stage == "train" else self._part
        with self._log.within(part, in_step=True):
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
        module = self._module
        step = self._steps[stage]
        if self._is_sharded is None:
            self._is_sharded = is_model_sharded(module)
        arguments = (batch, number, *self._dataloader_idx)[: self._num_arguments[stage]]
        if model is module and not self._is_sharded:
            return step(*arguments)

        def forward(*arguments: Any) -> Any:
            # Inside the step, self(x) is the module's own forward.
            del module.forward
            return step(*arguments)

        module.forward = forward
        try:
            return model(*arguments)
        finally:
            vars(module).pop("forward", None)

    # Hooks of training, called by the engine

    def on_sanity_check_start(self) -> None:
        """Call `on_fit_start`, which Lightning calls before the sanity check."""
        self._has_called_fit_start = True
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
        if not self._has_called_fit_start:
            self._hook("on_fit_start")
        with self._log.within("train"):
            self._hook("on_train_start")

    def on_train_epoch_start(self, info: EpochInfo) -> None:
        self._trainer.current_epoch = info.epoch
        self._batches_trained = 0
        with self._log.within("train"):
            self._hook("on_train_epoch_start")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self._log.within("train", in_step=True):
            self._hook("on_before_optimizer_step", optimizer)

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        self._trainer.global_step = info.step
        self._end_batch()
        return self._stop

    def on_train_epoch_end(self, info: EpochInfo) -> Stop | None:
        with self._log.within("train"):
            self._hook("on_train_epoch_end")
        return self._stop

    def on_fit_end(self) -> None:
        self._hook("on_train_end")
        self._hook("on_fit_end")

    def close(self) -> None:
        self._hook("teardown", "fit")

    def _end_batch(self) -> None:
        """Call on_train_batch_end for the last batch: its optimizer step, if it has one, is done."""
        if self._finished is None:
            return
        outputs, batch, number = self._finished
        self._finished = None
        with self._log.within("train", in_step=True):
            self._hook("on_train_batch_end", outputs, batch, number)

    @property
    def _stop(self) -> Stop | None:
        if not self._trainer.should_stop:
            return None
        return Stop("self.trainer.should_stop was set")

    # Evaluations

    def on_evaluations_start(self, model: nn.Module, prefixes: Sequence[str]) -> None:
        part = prefixes[0].partition("/")[0]
        # Without a test_step, validation_step evaluates the test part, too.
        self._stage = "test" if part == "test" and self._has_test_step else "validation"
        self._sets = list(prefixes)
        self._trainer.stage = self._evaluation_stage
        with self._log.within(self._part):
            self._hook(f"on_{self._stage}_start")
            self._hook(f"on_{self._stage}_epoch_start")

    def on_evaluation_start(self, model: nn.Module, prefix: str) -> None:
        self._batch_idx = 0
        name = prefix.partition("/")[2]
        takes_index = self._num_arguments[self._stage] > 2
        if name and takes_index:
            self._dataloader_idx = (self._sets.index(prefix),)
        else:
            self._dataloader_idx = ()
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
        # Those of all sets of an evaluation are read once, by `logged_evaluations`.
        if interval == "evaluation":
            return {}
        return self._log.reduce(interval)

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
        state = {
            "epoch": self._trainer.current_epoch,
            "batches": self._batches_trained,
            "log": self._log.state_dict(),
        }
        return {"ranks": gather_to_all(state, self._context)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. With another number of ranks, rank 0 gets the logged values of all."""
        states = state["ranks"]
        rank = self._context.rank
        self._trainer.current_epoch = states[0]["epoch"]
        self._batches_trained = states[0]["batches"]
        if len(states) == self._context.world_size:
            self._log.load_state_dict(states[rank]["log"])
        elif rank == 0:
            self._log.load_state_dict(states[0]["log"])
            for other in states[1:]:
                self._log.load_state_dict(other["log"], adds=True)

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        self._end_batch()
        log = self._log.state_dict()
        batches_trained = self._batches_trained
        batch_idx = self._batch_idx
        yield
        self._log.load_state_dict(log)
        self._batches_trained = batches_trained
        self._batch_idx = batch_idx
        self._finished = None

    @property
    def _module(self) -> Any:
        # Not an attribute of the task, whose parameters are not those of the model.
        return self._log.module

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def _hook(self, name: str, *arguments: Any) -> Any:
        """Call the module's hook and return what it returns; None for one that it doesn't override."""
        if name not in self._overridden:
            return None
        return getattr(self._module, name)(*arguments)


def configure_optimizers(params: Sequence[Tensor], model: nn.Module, total_steps: int | None = None) -> Optimizer:
    """Return the optimizer from `configure_optimizers` of the model. `lr_scheduler` then returns its schedule.

    params: the model's. For others, which serve to measure the optimizer's state, return one with the same settings.
    Raises ConfigError if there is no optimizer, or more than one.
    """
    module = cast("Any", model)
    name = type(model).__name__
    base = _base_of(model)
    if not isinstance(module._trainer, TrainerView):
        raise ConfigError(f"optimizer=lightning takes the optimizer of {name}. Use task=lightning, too.")

    own_ids = {id(parameter) for parameter in model.parameters()}
    is_probe = bool(params) and all(id(parameter) not in own_ids for parameter in params)
    built = module.trainer._built_optimizer()
    if is_probe and built is not None:
        # configure_optimizers is called once: the module may keep what it returns.
        return _like(built, params)

    _set_length(module.trainer, total_steps)
    if not _overrides(module, base, "configure_optimizers"):
        raise ConfigError(f"{name} has no configure_optimizers. Write one, or choose an option: optimizer=adam")
    configured = module.configure_optimizers()
    if configured is None:
        raise ConfigError(
            f"{name}.configure_optimizers returned None, so nothing would be trained.\nReturn an optimizer, or choose "
            "one here: optimizer=adam"
        )
    optimizer, schedule = _parsed(configured, base, name)
    if is_probe:
        return _like(optimizer, params)

    module.trainer._built_optimizer = weakref.ref(optimizer)
    if len(optimizer.param_groups) > 1:
        for number, group in enumerate(optimizer.param_groups):
            # The name of its learning rate in the logs.
            group.setdefault("name", str(number))
    if schedule is not None:
        setattr(optimizer, _SCHEDULE, schedule)
    return optimizer


def _set_length(trainer: TrainerView, total_steps: int | None) -> None:
    """Set the attributes by which configure_optimizers may ask for the length of the run."""
    trainer.estimated_stepping_batches = math.inf if total_steps is None else total_steps
    # The view also has the keys of the section `trainer`.
    settings: Any = trainer
    if total_steps is not None and settings.max_epochs is not None and trainer.max_steps == -1:
        steps_per_epoch = total_steps // settings.max_epochs
        trainer.num_training_batches = steps_per_epoch * settings.accumulate_grad_batches


def _parsed(configured: Any, base: type, name: str) -> tuple[Optimizer, LRSchedulerConfig | None]:
    """Return the optimizer and the schedule of what configure_optimizers returned, in one of Lightning's forms.

    Raises ConfigError if there is more than one of them.
    """
    lightning_optimizer = import_module(base.__module__.replace(".module", ".optimizer"))
    try:
        optimizers, schedulers, monitor = lightning_optimizer._configure_optimizers(configured)
        configs = lightning_optimizer._configure_schedulers_automatic_opt(schedulers, monitor)
    except Exception as error:
        raise ConfigError(f"{name}.configure_optimizers: {error}") from error
    if len(optimizers) != 1:
        _refuse_several(name, f"configure_optimizers returned {len(optimizers)} optimizers")
    if len(configs) > 1:
        raise ConfigError(
            f"{name}.configure_optimizers returned {len(configs)} schedules of one optimizer. Return one: "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR joins several."
        )
    schedule = _schedule(configs[0], name) if configs else None
    return optimizers[0], schedule


def _like(optimizer: Optimizer, params: Sequence[Tensor]) -> Optimizer:
    """Return an optimizer of `params` with the same settings, and without hooks."""
    probe = copy.copy(optimizer)
    # A schedule's method, which steps the original.
    vars(probe).pop("step", None)
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    probe.state = defaultdict(dict)
    probe.param_groups = []
    probe.add_param_group({"params": list(params)})
    return probe


def _loss_in(output: Any) -> Any:
    """Return the loss that a step has returned, alone or in a dict."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return output


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
    hooks = {hook for hook in dir(base) if hook.startswith(("on_", "configure_"))} | _INSTEAD.keys()
    lines = []
    for hook in sorted(hooks - _CALLED):
        # In other jobs than job=predict, Lightning doesn't call hooks of predictions either.
        is_called = predicts or not hook.startswith("on_predict_")
        if is_called and _overrides(module, base, hook):
            lines.append(f"  {hook}: {_INSTEAD.get(hook, 'Leave it out.')}")
    if lines:
        raise ConfigError("\n".join([f"{name} overrides hooks that have no counterpart here:", *lines]))


def _refuse_several(name: str, what: str) -> NoReturn:
    raise ConfigError(
        f"{name}: {what}. A task with several optimizers names its losses, each with an optimizer:\n\n"
        "  class MyTask:\n"
        "      def __init__(self):\n"
        '          self.objectives = [framework.Objective("critic", self.critic, optimizer="critic"), ...]\n\n'
        "      def critic(self, model, batch):\n"
        '          return framework.StepOutput(model("critic", batch), len(batch))\n\n'
        "  optimizer: {critic: {_target_: torch.optim.Adam, params: '^critic', lr: 0.001}, ...}\n\n"
        "See docs/optimizers.md. A model is any nn.Module, this one too."
    )


def _num_arguments(step: Any) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step takes."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([kind for kind in kinds if kind in positional])
