"""`self.trainer` of a LightningModule, of a LightningDataModule and of Lightning's callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, final

from torch.optim import Optimizer

from framework.config.schema import Config
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.tasks.lightning.log import Log
from framework.tasks.lightning.logger import LoggerView
from framework.tasks.lightning.strategy import PrecisionView, StrategyView, core_of
from framework.types import Logger

Stage = Literal["train", "sanity_check", "validate", "test", "predict"]

_JOB_STAGES: dict[str, Stage] = {"eval": "test", "predict": "predict", "export": "predict"}
# Jobs that make training steps.
TRAINING_JOBS = ("train", "parity", "plan", "tune")
# The attribute of the context that keeps the rank's TrainerView.
_KEPT_AS = "_lightning_trainer"
# Attributes that are the framework's own.
_NOT_OFFERED = ("stage",)


class TrainerAttributeError(ConfigError, AttributeError):
    """Raised for an attribute that `self.trainer` doesn't have. `hasattr` is False then."""


@final
class TrainerView:
    """`self.trainer`: progress, ranks, data and loggers under Lightning's names, and the keys of section `trainer`."""

    def __init__(self, config: Config, context: Context) -> None:
        self._settings = config.trainer
        self._trains = config.job in TRAINING_JOBS
        self._world_size = context.world_size
        self.stage: Stage = _JOB_STAGES.get(config.job, "train")
        self.current_epoch = 0
        self.global_step = 0
        self.estimated_stepping_batches: float = math.inf
        # Known when training starts, and in configure_optimizers.
        self.num_training_batches: float = math.inf
        self.max_steps = -1 if config.trainer.max_steps is None else config.trainer.max_steps
        self.global_rank = context.rank
        self.local_rank = context.local_rank
        self.node_rank = context.node_rank
        self.world_size = context.world_size
        self.num_nodes = context.topology.nnodes
        self.num_devices = context.topology.procs_per_node
        self.device_ids = [device.index or 0 for device in context.devices]
        self.is_global_zero = context.is_main
        self.is_last_batch = False
        self.should_stop = False
        self.received_sigterm = False
        self.interrupted = False

        # The data, as the data module returns it.
        self.datamodule: Any = None
        self.train_dataloader: Any = None
        self.val_dataloaders: Any = None
        self.test_dataloaders: Any = None
        self.predict_dataloaders: Any = None

        # The metrics of the last validation and epoch, by the module's own names.
        self.callback_metrics: dict[str, Any] = {}

        # Lightning's callbacks that are called.
        self.callbacks: list[Any] = []
        self.progress_bar_callback = None
        self.checkpoint_callback = None
        self.checkpoint_callbacks: list[Any] = []
        self.early_stopping_callback = None
        self.early_stopping_callbacks: list[Any] = []
        self.profiler = None

        # Of all optimizers; filled by configure_optimizers.
        self.lr_scheduler_configs: list[Any] = []
        self.strategy = StrategyView(self, context)
        self.precision_plugin = PrecisionView(self.strategy)

        # Where the run is; known when training starts.
        self.default_root_dir = str(Path(config.path.outputs).absolute())
        self._logger = LoggerView(self) if config.logger and not config.trainer.fast_dev_run else None
        # Weak references: the module may be copied, and refers to this.
        self._module: Callable[[], Any] = lambda: None
        # Set by the task.
        self._log: Log | None = None
        self._built_optimizers: Callable[[], Optimizer | None] = lambda: None

    @property
    def training(self) -> bool:
        return self.stage == "train"

    @property
    def sanity_checking(self) -> bool:
        return self.stage == "sanity_check"

    @property
    def validating(self) -> bool:
        return self.stage == "validate"

    @property
    def testing(self) -> bool:
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        return self.stage in ("sanity_check", "validate", "test")

    @property
    def state(self) -> Any:
        """Lightning's TrainerState, of the module's package."""
        states = import_module(core_of(self.lightning_module).replace(".core", ".trainer.states"))
        state = states.TrainerState()
        state.status = states.TrainerStatus.RUNNING
        state.stage = states.RunningStage(self.stage)
        is_fitting = self.stage in ("train", "sanity_check") or (self.stage == "validate" and self._trains)
        state.fn = states.TrainerFn.FITTING if is_fitting else states.TrainerFn(self.stage)
        return state

    @property
    def fit_loop(self) -> Any:
        """What modules ask of Lightning's loops: the steps so far, the length, and whether there is validation."""
        # Loaders that no data module has made aren't known here.
        validates = self.datamodule is None or self.enable_validation
        source = SimpleNamespace(is_defined=lambda: validates)
        val_loop = SimpleNamespace(_data_source=source)
        epoch_loop = SimpleNamespace(global_step=self.global_step, val_loop=val_loop)
        return SimpleNamespace(max_epochs=self._settings.max_epochs, epoch_loop=epoch_loop)

    @property
    def lightning_module(self) -> Any:
        return self._module()

    @property
    def model(self) -> Any:
        """The module itself, without the strategy's wrapper."""
        return self._module()

    @property
    def optimizers(self) -> list[Optimizer]:
        built: Any = self._built_optimizers()
        if built is None:
            return []
        # Several are one for the framework.
        named = vars(built).get("named")
        return [built] if named is None else list(named.values())

    @property
    def logger(self) -> LoggerView | None:
        return self._logger

    @property
    def loggers(self) -> list[LoggerView]:
        return [] if self._logger is None else self._logger.views()

    @property
    def log_dir(self) -> str | None:
        """The run's folder."""
        return None if self._logger is None else self._logger.log_dir

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """The setting, if gradients are clipped."""
        return None if self._settings.gradient_clip_val is None else self._settings.gradient_clip_algorithm

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    @property
    def num_val_batches(self) -> list[int | float]:
        """The validation batches of a process, of each set."""
        return self._num_batches(self.val_dataloaders, limit=self._settings.limit_val_batches)

    @property
    def num_test_batches(self) -> list[int | float]:
        return self._num_batches(self.test_dataloaders, limit=self._settings.limit_test_batches)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        most = self._settings.num_sanity_val_steps
        return [min(most, number) for number in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        return self.val_dataloaders is not None and self._settings.limit_val_batches != 0

    def _num_batches(self, loaders: Any, *, limit: int | float | None) -> list[int | float]:
        numbers: list[int | float] = []
        for loader in _listed(loaders):
            try:
                number = math.ceil(len(loader) / self._world_size)
            except TypeError:
                # A stream has no length.
                numbers.append(math.inf)
                continue
            if isinstance(limit, float):
                number = int(number * limit)
            elif limit is not None:
                number = min(number, limit)
            numbers.append(number)
        return numbers

    def _observe_run(self, loggers: Mapping[str, Logger], folder: Path) -> None:
        """Note where the run is, and its loggers."""
        self.default_root_dir = str(folder)
        if self._logger is not None:
            self._logger.observe_run(loggers, folder)

    def __deepcopy__(self, memo: object) -> TrainerView:
        """Return the view itself: a copied module, such as one of averaged weights, is part of the same run."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(self._settings, name):
            return getattr(self._settings, name)
        attributes = {*vars(self), *vars(type(self))}
        offered = [name for name in attributes if not name.startswith("_") and name not in _NOT_OFFERED]
        raise TrainerAttributeError(
            f"There is no self.trainer.{name}: the framework trains, not Lightning's Trainer. Available are "
            f"{', '.join(sorted(offered))}, and the keys of the section `trainer`."
        )


def _listed(loaders: Any) -> Sequence[Any]:
    """Return the loaders of a part as a list."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return loaders
    return [loaders]


def trainer_of(config: Config, context: Context) -> TrainerView:
    """Return `self.trainer` of this rank: the same for its module and its data module."""
    view: TrainerView | None = vars(context).get(_KEPT_AS)
    if view is None:
        view = TrainerView(config, context)
        # The context is frozen, but lives as long as this rank's run.
        object.__setattr__(context, _KEPT_AS, view)
    return view
