"""`self.trainer` of a LightningModule and of a LightningDataModule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn, final

from torch.optim import Optimizer

from framework.config.schema import Config
from framework.distributed.context import Context
from framework.errors import ConfigError

Stage = Literal["train", "sanity_check", "validate", "test", "predict"]

_JOB_STAGES: dict[str, Stage] = {"eval": "test", "predict": "predict", "export": "predict"}
# The attribute of the context that keeps the rank's TrainerView.
_KEPT_AS = "_lightning_trainer"
# Attributes that only raise an error, or are the framework's own.
_NOT_OFFERED = ("logger", "stage")


class TrainerAttributeError(ConfigError, AttributeError):
    """Raised for an attribute that `self.trainer` doesn't have. `hasattr` is False then."""


@final
class TrainerView:
    """`self.trainer`: progress and ranks under Lightning's names, and the keys of the section `trainer`."""

    def __init__(self, config: Config, context: Context) -> None:
        self._settings = config.trainer
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
        self.is_global_zero = context.is_main
        self.should_stop = False
        self.datamodule: Any = None
        self.progress_bar_callback = None
        self.logger = NoLogger()
        self.loggers: list[Any] = []
        # Weak references: the module may be copied, and refers to this.
        self._module: Callable[[], Any] = lambda: None
        self._built_optimizer: Callable[[], Optimizer | None] = lambda: None

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
    def lightning_module(self) -> Any:
        return self._module()

    @property
    def model(self) -> Any:
        """The module itself, without the strategy's wrapper."""
        return self._module()

    @property
    def optimizers(self) -> list[Optimizer]:
        optimizer = self._built_optimizer()
        if optimizer is None:
            return []
        return [optimizer]

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


@final
class NoLogger:
    """`self.logger`: False, as with `Trainer(logger=False)`. Using it raises an error that says what to do."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TrainerAttributeError(
            f"There is no self.trainer.logger: self.logger.{name} isn't available. The framework's loggers get what "
            "self.log is given.\nTo log images or text, write a framework callback or logger (docs/own_code.md)."
        )


def trainer_of(config: Config, context: Context) -> TrainerView:
    """Return `self.trainer` of this rank: the same for its module and its data module."""
    view: TrainerView | None = vars(context).get(_KEPT_AS)
    if view is None:
        view = TrainerView(config, context)
        # The context is frozen, but lives as long as this rank's run.
        object.__setattr__(context, _KEPT_AS, view)
    return view
