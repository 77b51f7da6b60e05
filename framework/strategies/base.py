"""The base class of all strategies, one copy of the model per rank and nothing exchanged; and that of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.monitoring.rank_status import RankPhase
from framework.strategies.parameters import described_change
from framework.strategies.rules import SingleRules, StrategyRules, check_one_process
from framework.types import DataShare, NumberFormats, StepOutput, Task, Waiting, Window

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class StrategyCosts:
    """What a strategy takes in memory, in checkpoints and on the network: for job=plan and estimated sizes."""

    # The number of neighbouring ranks over which a copy of the model is sharded.
    num_shards: int = 1
    # The formats in which ranks gather weights and reduce gradients; None: as they are stored.
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    # Optimizer steps from one exchange to the next. If there are more than 1, weights are exchanged.
    exchanges_every: int = 1
    # If gradients are copied to exchange them.
    copies_gradients: bool = False
    # How many copies of all gradients, and of the trained weights, are kept from step to step and in checkpoints.
    gradients_kept: int = 0
    weight_copies: int = 0


class Strategy:
    """Keeps the ranks' copies of the model equal. Inherit from it and override what differs.

    After a backward that synchronises, each gradient must be the *mean* over the data shares, which are the ranks
    unless `data_share` says otherwise: the trainer has scaled the loss accordingly. `model` is always the module that
    `wrap` returned, and all ranks call each method at the same point, except where noted. If a constructor has a
    parameter `context`, it gets `framework.distributed.context.Context`.
    """

    # What the strategy asks of a request, checked before anything starts: a class in a module without torch.
    rules: ClassVar[type[StrategyRules] | None] = None
    # Ranks communicate in every forward, evaluation included, so each must run as many as any other.
    forward_communicates: bool = False
    # Ranks with the same index hold the same weights, which are compared at each checkpoint; None: compared with none.
    shard_index: int | None = 0
    # The number of stages the model is split into: then it is built on the CPU, and `wrap` moves it. None: not split.
    num_stages: int | None = None
    # Process groups made in `wrap`: they get the run's time-outs.
    groups: Sequence[ProcessGroup] = ()
    # CPU tensors are exchanged, even if the ranks compute on GPUs.
    exchanges_on_cpu: bool = False
    # A rank's forward depends on the samples of other ranks, as with SyncBatchNorm.
    mixes_samples: bool = False
    # Each rank keeps buffers of its own (BatchNorm's statistics) after the start.
    buffers_differ: bool = False
    # Each rank trains weights of its own between exchanges.
    replicas_differ: bool = False
    # Steps until the next exchange; None: one in every step.
    steps_to_exchange: int | None = None

    def data_share(self, context: Context) -> DataShare:
        """Return which part of the samples this rank gets.

        Ranks that share a copy of the model return the same: they train on the same samples and draw the same random
        numbers, and what they log and evaluate counts once.
        """
        return DataShare(context.rank, context.world_size)

    def costs(self) -> StrategyCosts:
        """Return what the strategy takes besides one copy of the model, its gradients and the optimizer's state."""
        # Strategies that users wrote for earlier versions have these as attributes.
        names = [field.name for field in fields(StrategyCosts) if hasattr(self, field.name)]
        attributes = {name: getattr(self, name) for name in names}
        return StrategyCosts(**attributes)

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError if the strategy doesn't support `trainer.precision`."""

    def allow_unused_parameters(self) -> None:
        """Called before `wrap` if a backward may leave trained parameters without a gradient, as objectives do."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training. `model` is on its device already."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's module inside what `wrap` returned."""
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the module to call in training from here on, after `requires_grad` of parameters has changed.

        Called before the next step, by the ranks where it has changed.

        Args:
            changed: By name, whether the parameter is trained now.
        """
        raise ConfigError(
            f"requires_grad of parameters has changed during training ({described_change(changed)}), and strategy "
            f"{type(self).__name__} has no `rewrap` method, which that needs.\n"
            "Set requires_grad when the model is built, or add that method: see framework.Strategy."
        )

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Return what surrounds forward and backward of a micro-batch; exchange gradients only if `synchronise`."""
        return NO_CONTEXT

    def broadcast_buffers(self, model: nn.Module, *, source: int) -> None:
        """Broadcast the buffers of rank `source`, unless each rank keeps its own.

        Called after the last backward of a step in which the ranks before `source` had no sample. If `source` is 0,
        rank 0's may also come with the next step.
        """

    def after_update(self, model: nn.Module) -> None:
        """Called after every optimizer step, when the gradients are None."""

    def before_evaluation(self, model: nn.Module) -> None:
        """Make the replicas equal, buffers included: rank 0's are saved."""

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the *unwrapped* `model` holds the weights to evaluate and save, equal on all ranks.

        Called only if `replicas_differ`.
        """
        return NO_CONTEXT

    def observe_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """Report to `waiting` whenever this rank waits for others in a step, and return True; False if that is unknown.

        Without it, only the times of data loading and callbacks are compared between ranks.
        """
        return False

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return state that decides the numbers, for checkpoints: plain types and tensors."""
        return {}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, once the weights are restored; `{}` from a checkpoint that has none."""

    def run_window(
        self,
        model: nn.Module,
        window: Window,
        *,
        task: Task,
        precision: NumberFormats,
        add: Callable[[StepOutput, int, float], Tensor],
        mark: Callable[[RankPhase], None],
    ) -> Tensor:
        """Run forward and backward of all micro-batches of a step, if overridden, in place of the trainer.

        Call `add` with each output of the task, its number of samples and the factor of all losses, and go backward
        from the loss that it returns. Call `mark` with each phase. Return the last loss, detached.
        """
        raise NotImplementedError

    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients, given the norm of those on this rank."""
        return norm


@final
class Single(Strategy):
    """One process. Raises TopologyError with more than one."""

    rules = SingleRules

    def __init__(self, *, context: Context) -> None:
        check_one_process(context.topology)

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        return model
