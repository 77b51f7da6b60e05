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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from framework.config.schema import Config
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.sharded import is_model_sharded
from framework.errors import ConfigError, TargetError
from framework.optim.optimizer import give_closure
from framework.optim.several import Optimizers
from framework.system.rank_log import warn
from framework.tasks.lightning.callbacks import Configured, callback_hooks, configured_callbacks
from framework.tasks.lightning.data import overrides_method
from framework.tasks.lightning.initial_training import read_initial_training
from framework.tasks.lightning.kept_state import KeptState
from framework.tasks.lightning.log import Log, LogPart, metric_name, short_name
from framework.tasks.lightning.optimization import HookedSteps, ManualSteps
from framework.tasks.lightning.trainer import TRAINING_JOBS, Stage, TrainerView, trainer_of
from framework.types import (
    Batch,
    Callback,
    EpochInfo,
    EvalInfo,
    FitInfo,
    InitialTraining,
    Interval,
    Logger,
    LRSchedulerConfig,
    StepInfo,
    StepOutput,
    Stop,
)

_CORE = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
# The attribute of an optimizer that keeps the schedule that came with it.
_SCHEDULE = "_lightning_schedule"

# The hooks that are called. Loaders come from `data.datasets`.
_CALLED = {
    "setup",
    "teardown",
    "configure_callbacks",
    "configure_model",
    "configure_optimizers",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
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
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_model_eval",
    "on_test_model_train",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "lr_scheduler_step",
}
# Those for which the task makes the steps itself.
_OF_STEPS = {
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
}
_CALLED |= _OF_STEPS
# Those that Lightning's callbacks don't have, or that are called in another way.
_OF_MODULES = {
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_optimizers",
    "lr_scheduler_step",
    "on_load_checkpoint",
    "on_save_checkpoint",
    "optimizer_step",
    "optimizer_zero_grad",
}

# What to use in place of hooks that are refused.
_INSTEAD = {
    "clip_gradients": "Override configure_gradient_clipping.",
    "manual_backward": "Override backward.",
    "on_validation_model_zero_grad": "Gradients are set to None before each validation.",
}

# The strategies under which `automatic_optimization = False` works, by their targets.
_MANUAL_STRATEGIES = ("auto", "Single", "DDP", "AllReduce")

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

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
        # None: its optimizers step automatically, as the framework or `optimizer_step` says.
        self._manual: ManualSteps | None = None
        self._trains = config.job in TRAINING_JOBS
        self._accumulated = config.trainer.accumulate_grad_batches
        self._is_scaled = config.trainer.precision == "16-mixed"

        self._trainer = trainer_of(config, context)
        self._trainer._module = weakref.ref(module)
        module.trainer = self._trainer
        self._callback_hooks: dict[str, list[Callable[..., Any]]] = {}
        self._configured = Configured()
        self._is_fast_dev_run = config.trainer.fast_dev_run
        # Lightning calls callbacks in prediction, too, whose hooks have no counterpart.
        if self._trains and "configure_callbacks" in self._overridden:
            self._configured = configured_callbacks(module, config, val_dataloaders=self._trainer.val_dataloaders)
            self._trainer.callbacks = self._configured.own
            self._callback_hooks = callback_hooks(
                self._trainer.callbacks, self._trainer, module, called=_CALLED - _OF_MODULES
            )
        for setup in self._callback_hooks.get("setup", ()):
            setup("fit")
        module.setup(_SETUP_STAGES.get(config.job, "fit"))
        module.configure_model()
        if self._overridden & {"setup", "configure_model"}:
            # They may have made further modules.
            module.to(context.device)

        # What the module itself overrides, and what one of both does.
        self._of_module = self._overridden
        self._overridden = self._of_module | self._callback_hooks.keys()

        # `lightning.pytorch`, or the older `pytorch_lightning`.
        self.package = base.__module__.removesuffix(".core.module")
        utilities = f"{self.package}.utilities"
        extract_batch_size = import_module(f"{utilities}.data").extract_batch_size
        self._detached = import_module(f"{utilities}.memory").recursive_detach
        self._log = Log(module, context, infer_batch_size=extract_batch_size)
        module.log = self._log.log
        self._trainer._log = self._log

        self._steps: dict[str, Any] = {stage: getattr(module, name) for stage, name in _STEPS.items()}
        self._num_arguments = {stage: _num_arguments(step) for stage, step in self._steps.items()}
        self._transfers = self._transfer_hooks()
        self._kept = KeptState(self._trainer, saves="on_save_checkpoint" in self._of_module)
        # What the last evaluation has logged.
        self._evaluated: Mapping[str, float] = {}
        # Known once a strategy has wrapped the model.
        self._is_sharded: bool | None = None

        # Where the task is. `validation` or `test`: which of the module's steps and hooks evaluate the present part.
        self._stage = "validation"
        self._batches_trained = 0
        self._batch_idx = 0
        # Known once training begins.
        self._steps_of_epoch: Callable[[int], int | None] = lambda _: None
        # The sets of the part that is evaluated, and the argument `dataloader_idx` of those that get one.
        self._sets: list[str] = []
        self._dataloader_idx: tuple[int, ...] = ()
        self._has_called_fit_start = False
        self._has_begun = False
        # The training batch that was begun, and its number, if the task makes the steps itself.
        self._makes_steps = False
        # An optimizer calls its closure again.
        self._is_repeating = False
        self._begun: tuple[Batch, int] = (None, 0)
        # Outputs, batch and number of the last training batch, for on_train_batch_end.
        self._finished: tuple[Any, Batch, int] | None = None
        # training_step returned None.
        self.skips_backward = False
        # The training mode of each module that on_validation_model_eval or on_validation_model_train has chosen.
        self._modes_of_training = _Modes(module)
        self._eval_modes = _Modes()
        self._train_modes = _Modes()
        if self._trains:
            self._take_over_steps(config)

    def _take_over_steps(self, config: Config) -> None:
        """Make the steps in the place of the trainer, if the module optimizes manually or overrides hooks of them.

        Raises ConfigError if that isn't possible with the other settings.
        """
        module = self.module
        if not module.automatic_optimization:
            _refuse_manual(self._name, config)
            broadcasts_buffers = bool(config.strategy.get("broadcast_buffers", True))
            self._manual = ManualSteps(self, self._trainer, self._context, broadcasts_buffers=broadcasts_buffers)
            self.run_step = self._manual.run_step
            self._makes_steps = True
        elif self._overridden & _OF_STEPS:
            clips = "configure_gradient_clipping" in self._overridden
            self.run_step = HookedSteps(self, self._trainer, clips=clips).run_step
            self._makes_steps = True

    # Steps

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        if not self._makes_steps:
            self.begin_train_batch(batch)
        output = self.compute(model)
        loss = _loss_in(output)
        self.skips_backward = output is None
        if loss is None:
            return self._without_loss(output)
        self.note_outputs(output, loss)
        return StepOutput(loss, self._log.num_samples)

    def begin_train_batch(self, batch: Batch) -> int:
        """Call what precedes the step, and return the number of the batch in its epoch."""
        number = self._batches_trained
        if self._is_repeating:
            self._batches_trained += 1
            batch = self._transferred(batch)
            self._log.begin_batch(batch)
            self._begun = (batch, number)
            return number
        self._end_batch()
        self._batches_trained += 1
        self._trainer.is_last_batch = self._batches_trained == self._trainer.num_training_batches
        batch = self._begin("train", batch, number)
        self._begun = (batch, number)
        return number

    def compute(self, model: nn.Module) -> Any:
        """Return the output of `training_step` for the batch that was begun."""
        batch, number = self._begun
        with self._log.within("train", in_step=True):
            return self._call("train", model, batch, number)

    def note_outputs(self, output: Any, loss: Tensor | None) -> None:
        """Keep what `on_train_batch_end` gets, as from Lightning: without graphs, and the loss as it accumulates."""
        if self._is_repeating or "on_train_batch_end" not in self._overridden:
            return
        outputs: dict[str, Any] = {}
        if isinstance(output, Mapping):
            outputs = self._detached(dict(output))
        if loss is not None:
            outputs["loss"] = loss.detach().clone() / self._accumulated
        batch, number = self._begun
        self._finished = (outputs, batch, number)

    def _without_loss(self, output: Any) -> StepOutput:
        """Return the output of a batch that Lightning skips: without a gradient, the optimizer changes nothing."""
        returned = "None" if output is None else "a dict without a loss"
        if output is not None or self._context.world_size > 1 or self._is_scaled:
            raise TargetError(
                f"{self._name}.training_step returned {returned}. With one process, None leaves the batch out; with "
                "several, or trainer.precision=16-mixed, every process takes part in every step.\n"
                "Return a loss: 0 * loss trains on nothing."
            )
        self.note_outputs(None, None)
        return StepOutput(torch.zeros((), device=self._context.device, requires_grad=True), 0)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of the step."""
        if hook in self._overridden:
            with self._log.within("train", in_step=True):
                self._hook(hook, *arguments)

    @property
    def num_samples(self) -> int:
        return self._log.num_samples

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
        batch = self._begin(stage, batch, number)
        with self._log.within(self._part, in_step=True):
            return self._call(stage, model, batch, number), batch

    def _begin(self, stage: str, batch: Batch, number: int) -> Batch:
        """Call the hooks before a batch. Return it as it was transferred."""
        batch = self._transferred(batch)
        self._log.begin_batch(batch)
        part = "train" if stage == "train" else self._part
        with self._log.within(part, in_step=True):
            if self._hook(f"on_{stage}_batch_start", batch, number, *self._dataloader_idx) == -1:
                raise TargetError(
                    f"{self._name}.on_train_batch_start returned -1, to leave out the rest of the epoch, which has no "
                    "counterpart. Use trainer.limit_train_batches, or set self.trainer.should_stop."
                )
        return batch

    def _transferred(self, batch: Batch) -> Batch:
        dataloader_idx = self._dataloader_idx or (0,)
        for transfer, arguments in self._transfers:
            batch = transfer(batch, *arguments, *dataloader_idx)
        return batch

    def _transfer_hooks(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Return the transfer hooks to call, each with its arguments. A data module's go first, as in Lightning."""
        datamodule = self._trainer.datamodule
        transfers: list[tuple[Any, tuple[Any, ...]]] = []
        for name in _TRANSFER_HOOKS:
            arguments = (self._context.device,) if name == "transfer_batch_to_device" else ()
            if datamodule is not None and overrides_method(datamodule, name):
                transfers.append((getattr(datamodule, name), arguments))
            elif name in self._of_module:
                transfers.append((getattr(self.module, name), arguments))
        return transfers

    def _call(self, stage: str, model: nn.Module, batch: Batch, number: int) -> Any:
        """Call a step of the module: through the model's forward if a strategy has wrapped or sharded it."""
        module = self.module
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

    # Continuing a training of Lightning

    def initial_training(self, content: Mapping[str, Any], *, source: Path) -> InitialTraining:
        is_manual = self._manual is not None
        training = read_initial_training(content, source=source, trainer=self._trainer, is_manual=is_manual)
        self._trainer.current_epoch = training.epoch
        if self._manual is not None:
            self._trainer.global_step = content["global_step"]
        self._kept.load_lightnings(content)
        return training

    # What `configure_callbacks` asks for

    def own_callbacks(self) -> Mapping[str, Callback]:
        # A fast_dev_run leaves them out, as in Lightning and as those of the configuration.
        return {} if self._is_fast_dev_run else self._configured.counterparts

    def checkpoint_keys(self) -> Mapping[str, Any]:
        if self._context.is_main:
            for note in self._configured.notes:
                warn(f"{self._name}.configure_callbacks: {note}")
        return self._configured.checkpoint

    # Hooks of training, called by the engine

    def observe_run(self, loggers: Mapping[str, Logger], callbacks: Mapping[str, Callback], folder: Path) -> None:
        self._trainer._observe_run(loggers, folder)

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
        if self._manual is None:
            self._trainer.global_step = info.start_step
        self._steps_of_epoch = info.steps_of_epoch
        if info.steps_per_epoch is not None:
            self._trainer.num_training_batches = info.steps_per_epoch * self._accumulated
        if not self._has_called_fit_start:
            self._hook("on_fit_start")
        with self._log.within("train"):
            self._hook("on_train_start")

    def on_train_epoch_start(self, info: EpochInfo) -> None:
        self._trainer.current_epoch = info.epoch
        steps = self._steps_of_epoch(info.epoch)
        if steps is not None:
            self._trainer.num_training_batches = steps * self._accumulated
        self._batches_trained = 0
        self._train_modes.set()
        with self._log.within("train"):
            self._hook("on_train_epoch_start")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self._log.within("train", in_step=True):
            self._hook("on_before_optimizer_step", optimizer)

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        # Lightning counts the steps of all optimizers, as this view does by itself in manual optimization.
        if self._manual is None:
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
        if self._finished is None or self._is_repeating:
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
        model_eval = f"on_{self._stage}_model_eval"
        self._eval_modes = _Modes()
        if model_eval in self._overridden:
            # It takes the place of `model.eval()`, which was called already.
            self._modes_of_training.set()
            self._hook(model_eval)
            self._eval_modes = _Modes(self.module)
        with self._log.within(self._part):
            self._hook(f"on_{self._stage}_start")
            self._hook(f"on_{self._stage}_epoch_start")

    def on_evaluation_start(self, model: nn.Module, prefix: str) -> None:
        self._batch_idx = 0
        self._eval_modes.set()
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
        # Reduced here, since the next hooks may read them.
        self._evaluated = self._log.reduce("evaluation")
        self._note_metrics(self._part, self._evaluated)
        with self._log.within(None):
            self._hook(f"on_{self._stage}_end")
        model_train = f"on_{self._stage}_model_train"
        if model_train in self._overridden:
            self._hook(model_train)
            # The framework gives each module its former mode when this is over.
            self._train_modes = _Modes(self.module)
        if self._trains:
            self._trainer.stage = "train"

    def on_validation_end(self, info: EvalInfo) -> None:
        """Set the modes that on_validation_model_train has chosen."""
        self._train_modes.set()

    def logged_evaluations(self) -> Mapping[str, float]:
        return self._evaluated

    def _note_metrics(self, part: LogPart, values: Mapping[str, float]) -> None:
        """Let the module read the values as `self.trainer.callback_metrics`, by its own names."""
        for name, value in values.items():
            set_name, _, short = name.rpartition("/")
            if set_name not in self._set_names:
                # A name of the module with a slash in it.
                set_name = ""
                short = name
            own_name = self._log.own_name(part, short)
            if set_name:
                own_name += f"/dataloader_idx_{self._set_names.index(set_name)}"
            self._trainer.callback_metrics[own_name] = torch.tensor(value)

    def logged(self, interval: Interval) -> Mapping[str, float]:
        # Those of all sets of an evaluation are read once, by `logged_evaluations`.
        if interval == "evaluation":
            return {}
        values = self._log.reduce(interval)
        if interval == "epoch":
            self._note_metrics("train", values)
            self._step_by_training_metrics(values)
        return values

    def _step_by_training_metrics(self, values: Mapping[str, float]) -> None:
        """Step the schedules that monitor what training logs, at the end of an epoch."""
        for config in self._trainer.lr_scheduler_configs:
            if self._manual is not None or not _monitors_training(config):
                continue
            short = short_name(config.monitor, "train")
            value = values.get(short, values.get(f"{short}_epoch", self._log.last_step_value(short)))
            if value is not None:
                self.module.lr_scheduler_step(config.scheduler, value)
            elif config.strict:
                raise ConfigError(
                    f"{self._name}: the learning-rate schedule monitors {config.monitor}, which training doesn't log. "
                    f"It logs {', '.join(values)}."
                )

    @property
    def _set_names(self) -> list[str]:
        return [prefix.partition("/")[2] for prefix in self._sets]

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
        optimizers = self._trainer.optimizers
        if optimizers:
            # By which `export.format=lightning` tells them apart.
            state["optimizer_groups"] = [len(optimizer.param_groups) for optimizer in optimizers]
        if self._manual is not None:
            state["global_step"] = self._trainer.global_step
            state["gradients"] = self._manual.gradients()
        kept = self._kept.save()
        if kept:
            state["kept"] = kept
        return {"ranks": gather_to_all(state, self._context)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. With another number of ranks, rank 0 gets the logged values of all."""
        states = state["ranks"]
        rank = self._context.rank
        self._trainer.current_epoch = states[0]["epoch"]
        self._batches_trained = states[0]["batches"]
        if self._manual is not None and "gradients" in states[0]:
            self._trainer.global_step = states[0]["global_step"]
            self._manual.load_gradients([state["gradients"] for state in states])
        self._kept.load(states[0].get("kept", {}))
        if len(states) == self._context.world_size:
            self._log.load_state_dict(states[rank]["log"])
        elif rank == 0:
            self._log.load_state_dict(states[0]["log"])
            for other in states[1:]:
                self._log.load_state_dict(other["log"], adds=True)

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        self._end_batch()
        finished = self._finished
        log = self._log.state_dict()
        batches_trained = self._batches_trained
        batch_idx = self._batch_idx
        try:
            yield
        finally:
            self._log.load_state_dict(log)
            self._batches_trained = batches_trained
            self._batch_idx = batch_idx
            self._finished = finished if self._is_repeating else None

    @contextmanager
    def repeating(self, num_batches: int) -> Iterator[None]:
        """In it, `training_step` computes batches of the step again, without the hooks around them."""
        log = self._log.state_dict()
        batches_trained = self._batches_trained
        self._batches_trained -= num_batches
        self._is_repeating = True
        try:
            yield
        finally:
            # The optimizer may catch what was raised, and try again.
            self._is_repeating = False
            self._batches_trained = batches_trained
            self._log.load_state_dict(log)

    @property
    def module(self) -> Any:
        # Not an attribute of the task, whose parameters are not those of the model.
        return self._log.module

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _hook(self, name: str, *arguments: Any) -> Any:
        """Call the hook of callbacks and of the module; return what the module's returns, or None without one."""
        if name not in self._overridden:
            return None
        for hook in self._callback_hooks.get(name, ()):
            hook(*arguments)
        if name not in self._of_module:
            return None
        return getattr(self.module, name)(*arguments)


def configure_optimizers(params: Sequence[Tensor], model: nn.Module, total_steps: int | None = None) -> Optimizer:
    """Return the optimizer from `configure_optimizers` of the model. `lr_scheduler` then returns its schedule.

    params: the model's. For others, which serve to measure the optimizer's state, return one with the same settings.
    Raises ConfigError if there is no optimizer, or several and no manual optimization.
    """
    module = cast("Any", model)
    name = type(model).__name__
    base = _base_of(model)
    if not isinstance(module._trainer, TrainerView):
        raise ConfigError(f"optimizer=lightning takes the optimizer of {name}. Use task=lightning, too.")

    own_ids = {id(parameter) for parameter in model.parameters()}
    is_probe = bool(params) and all(id(parameter) not in own_ids for parameter in params)
    built = module.trainer._built_optimizers()
    if is_probe and built is not None:
        # configure_optimizers is called once: the module may keep what it returns.
        return _like(module.trainer.optimizers[0], params)

    _set_length(module.trainer, total_steps)
    if not _overrides(module, base, "configure_optimizers"):
        raise ConfigError(f"{name} has no configure_optimizers. Write one, or choose an option: optimizer=adam")
    configured = module.configure_optimizers()
    if configured is None:
        raise ConfigError(
            f"{name}.configure_optimizers returned None, so nothing would be trained.\nReturn an optimizer, or choose "
            "one here: optimizer=adam"
        )
    optimizers, schedules = _parsed(configured, module, base)
    if is_probe:
        return _like(optimizers[0], params)

    optimizer = optimizers[0]
    if len(optimizers) > 1:
        optimizer = Optimizers({str(number): each for number, each in enumerate(optimizers)})
    makes_steps = module.trainer.strategy._optimization is not None
    if makes_steps and _needs_closure(optimizer):
        _give_closure(optimizer, module)
    module.trainer._built_optimizers = weakref.ref(optimizer)
    module.trainer.lr_scheduler_configs = schedules
    if len(optimizer.param_groups) > 1:
        for number, group in enumerate(optimizer.param_groups):
            # The name of its learning rate in the logs.
            group.setdefault("name", str(number))
    setattr(optimizer, _SCHEDULE, [_schedule(config, module) for config in schedules])
    return optimizer


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return True for an optimizer such as LBFGS, whose step computes the loss itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _give_closure(optimizer: Optimizer, module: Any) -> None:
    """Have the task call an optimizer with its closure. Raises ConfigError with several processes."""
    if module.trainer.world_size > 1:
        what = "optimizes manually"
        if module.automatic_optimization:
            what = "overrides hooks of its steps"
        name = type(optimizer).__name__
        raise ConfigError(
            f"{type(module).__name__} {what}, and configure_optimizers returned {name}, which would decide by the loss "
            "of each process alone how to go on.\nUse one process (topology.procs_per_node=1), or leave the steps to "
            f"the framework: without these hooks, {name} gets the loss of all processes."
        )
    give_closure(optimizer)


def _set_length(trainer: TrainerView, total_steps: int | None) -> None:
    """Set the attributes by which configure_optimizers may ask for the length of the run."""
    trainer.estimated_stepping_batches = math.inf if total_steps is None else total_steps
    # The view also has the keys of the section `trainer`.
    settings: Any = trainer
    if total_steps is not None and settings.max_epochs is not None and trainer.max_steps == -1:
        steps_per_epoch = total_steps // settings.max_epochs
        trainer.num_training_batches = steps_per_epoch * settings.accumulate_grad_batches


def _parsed(configured: Any, module: Any, base: type) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers and the schedules that configure_optimizers returned, in one of Lightning's forms.

    Raises ConfigError if there are several optimizers, and none but the module's own loop could step them.
    """
    name = type(module).__name__
    lightning_optimizer = import_module(base.__module__.replace(".module", ".optimizer"))
    try:
        optimizers, schedulers, monitor = lightning_optimizer._configure_optimizers(configured)
        if module.automatic_optimization:
            configs = lightning_optimizer._configure_schedulers_automatic_opt(schedulers, monitor)
        else:
            configs = lightning_optimizer._configure_schedulers_manual_opt(schedulers)
    except Exception as error:
        raise ConfigError(f"{name}.configure_optimizers: {error}") from error
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ConfigError(
            f"{name}: configure_optimizers returned {len(optimizers)} optimizers.\nSet self.automatic_optimization = "
            "False in __init__ and step them in training_step, as Lightning wants it; or name the losses, each with an "
            "optimizer: see docs/optimizers.md, several losses in a step."
        )
    return list(optimizers), configs


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


def lr_scheduler(optimizer: Optimizer) -> list[LRSchedulerConfig] | None:
    """Return the optimizer's schedules from `configure_optimizers`; None for a constant learning rate."""
    schedules: list[LRSchedulerConfig] | None = vars(optimizer).pop(_SCHEDULE, None)
    return schedules or None


def _schedule(config: Any, module: Any) -> LRSchedulerConfig:
    """Return the schedule, with the monitored metric under the name that validation gives it."""
    if not module.automatic_optimization:
        return LRSchedulerConfig(config.scheduler, "never")
    step = module.lr_scheduler_step if _overrides(module, _base_of(module), "lr_scheduler_step") else None
    if not isinstance(config.scheduler, ReduceLROnPlateau):
        return LRSchedulerConfig(config.scheduler, config.interval, config.frequency, None, config.strict, step)
    if config.interval == "step":
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers: ReduceLROnPlateau with interval=step. It steps after "
            "validations, or at the end of an epoch if it monitors what training logs: leave `interval` out."
        )
    if _monitors_training(config):
        # The task steps it, when it has reduced what training logged.
        return LRSchedulerConfig(config.scheduler, "never")
    monitor = metric_name(config.monitor, module.trainer.val_dataloaders)
    return LRSchedulerConfig(config.scheduler, config.interval, config.frequency, monitor, config.strict, step)


def _monitors_training(config: Any) -> bool:
    """Return True for ReduceLROnPlateau with a metric that is named after training, such as train_loss."""
    is_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    return is_plateau and short_name(config.monitor, "train") != config.monitor


@final
class _Modes:
    """The training mode of each module, to set again. Not a list: modules in the task's attributes count as its own."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._modes: list[tuple[nn.Module, bool]] = []
        if module is not None:
            self._modes = [(part, part.training) for part in module.modules()]

    def set(self) -> None:
        for part, is_training in self._modes:
            part.training = is_training


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
    hooks = {hook for hook in dir(base) if hook.startswith(("on_", "configure_"))} | _INSTEAD.keys()
    lines = []
    for hook in sorted(hooks - _CALLED):
        # In other jobs than job=predict, Lightning doesn't call hooks of predictions either.
        is_called = predicts or not hook.startswith("on_predict_")
        if is_called and _overrides(module, base, hook):
            lines.append(f"  {hook}: {_INSTEAD.get(hook, 'Leave it out.')}")
    if lines:
        raise ConfigError("\n".join([f"{name} overrides hooks that have no counterpart here:", *lines]))


def _refuse_manual(name: str, config: Config) -> None:
    """Raise ConfigError, with all reasons, for settings that manual optimization can't go with."""
    settings = config.trainer
    reasons = []
    strategy = config.strategy["_target_"].rpartition(".")[2]
    if strategy not in _MANUAL_STRATEGIES:
        reasons.append(f"strategy={strategy}: gradients are averaged before each step. Use strategy=ddp or allreduce.")
    for key in ("comm_hook", "sync_batchnorm"):
        if config.strategy.get(key):
            reasons.append(f"strategy.{key}: the strategy's own forward and exchange aren't used. Leave it out.")
    if settings.accumulate_grad_batches > 1:
        reasons.append("trainer.accumulate_grad_batches: step the optimizers after every n-th batch instead.")
    if config.job == "tune" and config.tune.find_batch_size and config.data.global_batch_size is not None:
        reasons.append(
            "job=tune with data.global_batch_size: it would split a batch into several. Use data.batch_size, or "
            "tune.find_batch_size=false."
        )
    if settings.gradient_clip_val is not None:
        reasons.append("trainer.gradient_clip_val: call self.clip_gradients(optimizer, gradient_clip_val=...) instead.")
    if settings.compile is not None:
        reasons.append("trainer.compile: compile parts of the model in configure_model instead.")
    if reasons:
        lines = "\n".join(f"  {reason}" for reason in reasons)
        raise ConfigError(f"{name} has automatic_optimization = False, which can't go with:\n{lines}")


def _num_arguments(step: Any) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step takes."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([kind for kind in kinds if kind in positional])
