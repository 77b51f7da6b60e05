"""`self.trainer.strategy` and `precision_plugin`: what Lightning's own methods of a module call."""

from __future__ import annotations

from importlib import import_module
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.collectives import any_over_ranks, barrier, broadcast_object, gather_to_all
from framework.distributed.context import Context
from framework.errors import TargetError

_WRAPPED = "_lightning_optimizer"


@final
class StrategyView:
    """What modules ask of `self.trainer.strategy`. What optimizes sets itself as `_optimization`."""

    def __init__(self, trainer: Any, context: Context) -> None:
        self._trainer = trainer
        self._context = context
        # Runs backward and optimizer steps, if the task does and not the trainer.
        self._optimization: Any = None

    @property
    def root_device(self) -> torch.device:
        return self._context.device

    @property
    def world_size(self) -> int:
        return self._context.world_size

    @property
    def global_rank(self) -> int:
        return self._context.rank

    @property
    def local_rank(self) -> int:
        return self._context.local_rank

    @property
    def is_global_zero(self) -> bool:
        return self._context.is_main

    @property
    def lightning_module(self) -> Any:
        return self._trainer.lightning_module

    @property
    def model(self) -> Any:
        return self._trainer.lightning_module

    @property
    def precision_plugin(self) -> Any:
        return self._trainer.precision_plugin

    @property
    def optimizers(self) -> list[Any]:
        optimizers: list[Any] = self._trainer.optimizers
        return optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        configs: list[Any] = self._trainer.lr_scheduler_configs
        return configs

    # Optimization

    @property
    def _lightning_optimizers(self) -> list[Any]:
        """The optimizers as Lightning gives them to modules: their `step` calls `optimizer_step`."""
        wrapped = []
        for optimizer in self.optimizers:
            attributes = vars(optimizer)
            if _WRAPPED not in attributes:
                attributes[_WRAPPED] = _lightning_optimizer(optimizer, self)
            wrapped.append(attributes[_WRAPPED])
        return wrapped

    def backward(self, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Called by `manual_backward`."""
        result: Tensor = self._optimizing("manual_backward").backward(loss, *args, **kwargs)
        return result

    def optimizer_step(self, optimizer: Any, closure: Any, **kwargs: Any) -> Any:
        """Called by `step` of Lightning's optimizers."""
        return self._optimizing("optimizer.step").optimizer_step(optimizer, closure, **kwargs)

    def _optimizing(self, what: str) -> Any:
        if self._optimization is None:
            name = type(self.lightning_module).__name__
            raise TargetError(
                f"{name} calls {what}, and the framework steps the optimizer.\nSet self.automatic_optimization = False "
                "in __init__ to do that yourself, or override optimizer_step."
            )
        return self._optimization

    # Communication

    def barrier(self, *_: Any, **__: Any) -> None:
        barrier(self._context)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return broadcast_object(obj, self._context, source=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the sum or mean over ranks of a tensor."""
        if self._context.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        return total / self._context.world_size if is_mean else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if all:
            return not any_over_ranks(not decision, self._context)
        return any_over_ranks(decision, self._context)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked. Raises TargetError, on every rank, if their shapes differ.

        Ranks make as many evaluation batches as they have samples for, so it is refused there.
        """
        if self._context.world_size == 1:
            return tensor
        name = type(self.lightning_module).__name__
        log = self._trainer._log
        if self._trainer.evaluating and log is not None and log.in_step:
            raise TargetError(
                f"{name} calls all_gather in an evaluation step, and processes may have different numbers of batches: "
                "it would hang.\nLog with self.log or a torchmetrics.Metric, which are reduced over processes; or "
                "gather in on_validation_epoch_end."
            )
        shapes = gather_to_all(tuple(tensor.shape), self._context)
        if len(set(shapes)) > 1:
            raise TargetError(
                f"{name} calls all_gather for tensors of different shapes: {', '.join(map(str, shapes))}.\nThe last "
                "batch of an epoch may be short: data.drop_last=true leaves it out."
            )
        gathered: Tensor = _all_gather(self.lightning_module)(tensor, group, sync_grads)
        return gathered


@final
class PrecisionView:
    """What `clip_gradients` of a module calls."""

    def __init__(self, strategy: StrategyView) -> None:
        self._strategy = strategy

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val > 0:
            algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            # Modules give what `self.optimizers()` returned, or the optimizer itself.
            optimizer = vars(optimizer).get("_optimizer", optimizer)
            self._strategy._optimizing("clip_gradients").clip_gradients(optimizer, clip_val, algorithm)


def core_of(module: Any) -> str:
    """Return the package with the class LightningModule of a module: `lightning.pytorch.core`, or the older one."""
    for cls in type(module).__mro__:
        if cls.__name__ == "LightningModule":
            return cls.__module__.rpartition(".")[0]
    raise AssertionError("a LightningModule has such a class")


def _lightning_optimizer(optimizer: Any, strategy: StrategyView) -> Any:
    core = core_of(strategy.lightning_module)
    wrapper = import_module(f"{core}.optimizer").LightningOptimizer
    return wrapper._to_lightning_optimizer(optimizer, strategy)


def _all_gather(module: Any) -> Any:
    package = core_of(module).partition(".")[0]
    fabric = "lightning.fabric" if package == "lightning" else "lightning_fabric"
    return import_module(f"{fabric}.utilities.distributed")._all_gather_ddp_if_available
