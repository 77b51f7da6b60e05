"""Replicas whose gradients are averaged once backward has ended; how is for those who inherit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, final

import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.context import Context
from framework.strategies.buckets import Bucket, by_kind, cap_in_bytes
from framework.strategies.buffers import begin_alike, broadcast, buffers_of_ranks, restore_buffers
from framework.strategies.trained import check_dense, check_same_change, refused_sparse, trained
from framework.types import Waiting

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Averaged(ABC):
    """Every rank begins with rank 0's parameters and buffers; after a backward that synchronises, each gradient is the
    mean over ranks.

    bucket_cap_mb: gradients are laid together in flat tensors of at most so many MiB, each reduced in one call; 0 makes
    a call for each gradient. broadcast_buffers: give every rank rank 0's buffers (BatchNorm's statistics) before the
    first forward of a step; false leaves each rank its own after the start.

    A gradient that some ranks lack counts as zeros there; one that all lack stays None, so that the optimizer leaves
    its parameter alone.
    """

    copies_gradients = True

    def __init__(self, *, context: Context, broadcast_buffers: bool = True, bucket_cap_mb: float = 25) -> None:
        self.name = type(self).__name__.lower()  # for messages: of the option that uses it
        self._context = context
        self._is_alone = context.world_size == 1
        self._broadcasts_buffers = broadcast_buffers and not self._is_alone
        self.buffers_differ = not broadcast_buffers and not self._is_alone
        self._cap_bytes = cap_in_bytes(bucket_cap_mb)
        self._buckets: list[Bucket] = []
        self._names: dict[int, str] = {}
        self._has_buffers = False
        self._begins_step = True  # the next forward is the first of a step
        self._waiting: Waiting | None = None
        self.groups: Sequence[dist.ProcessGroup] = ()
        self._exchange: AbstractContextManager[Any] = _NOTHING if self._is_alone else _Afterwards(self)

    def make_groups(self) -> Sequence[dist.ProcessGroup]:
        """Groups beside the default one that `begin_mean` needs, made by every rank."""
        return ()

    @abstractmethod
    def begin_mean(self, values: Tensor) -> dist.Work | None:
        """Begin to put the mean over ranks in the place of `values`, flat; what to wait for, None where it is done."""

    @final
    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module, with rank 0's weights and buffers. Raises ConfigError where no parameter is trained.

        And for an embedding that says that its gradients are sparse.
        """
        self.lay_out(model)
        if self._is_alone:
            return model
        begin_alike(model)
        self.groups = self.make_groups()
        self._has_buffers = any(True for _ in model.buffers())
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        return model

    @final
    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module; from here on, gradients of the parameters that are trained now are averaged."""
        check_same_change(changed, self._context)
        self.lay_out(model)
        return model

    @final
    def lay_out(self, model: nn.Module) -> None:
        """Make the buckets for the parameters that are trained. Raises ConfigError as `wrap` does."""
        parameters = trained(model, strategy=self.name)
        if not self._is_alone:
            check_dense(model, strategy=self.name)
            self._buckets = [Bucket(group) for group in by_kind(parameters, cap_bytes=self._cap_bytes)]

    @final
    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    @final
    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged where this is left without an error; before, they add up on each rank."""
        if self._begins_step and self._broadcasts_buffers and self._has_buffers:
            self._share_buffers(model)
        self._begins_step = synchronise
        return self._exchange if synchronise else _NOTHING

    @final
    def tell_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """The exchange is waiting as a whole: what a rank computes for it is little, and the same on all."""
        self._waiting = waiting
        return True

    @final
    def take_buffers(self, model: nn.Module, *, source: int) -> bool:
        """Give every rank rank `source`'s buffers, where they are kept equal. The first one's come with the step."""
        if self._broadcasts_buffers and source:
            self._share_buffers(model, source=source)
        return self._broadcasts_buffers

    @final
    def before_evaluation(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (BatchNorm's statistics), which its last forward left different."""
        if self._broadcasts_buffers:
            broadcast(model.buffers())

    @final
    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Each rank's buffers, where they aren't the same. The layout of sums is always the same one."""
        return {} if self._broadcasts_buffers else {"buffers": buffers_of_ranks(model, self._context)}

    @final
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Give this rank its own buffers back; those of another number of ranks are left as they are."""
        if not self._broadcasts_buffers:
            restore_buffers(model, state.get("buffers", []), self._context)

    @final
    def exchange(self) -> None:
        """Put the mean over ranks in the place of every gradient. Every rank must call it.

        Raises ConfigError for a sparse gradient.
        """
        if self._waiting is not None:
            self._waiting.begin_waiting()
        begun = []
        for bucket in self._buckets:
            try:
                bucket.fill()
            except RuntimeError as error:
                self._refuse_sparse(bucket, error)
            # While one is on its way the next is filled.
            begun.append(self.begin_mean(bucket.flat))
        for bucket, work in zip(self._buckets, begun, strict=True):
            if work is not None:
                work.wait()
            bucket.hand_out()

    def _share_buffers(self, model: nn.Module, *, source: int = 0) -> None:
        if self._waiting is not None:
            self._waiting.begin_waiting()
        # Read anew: a model may have put others in their places.
        broadcast(model.buffers(), source=source)
        if self._waiting is not None:
            self._waiting.end_waiting()

    def _refuse_sparse(self, bucket: Bucket, error: RuntimeError) -> NoReturn:
        names = [self._names[id(parameter)] for parameter in bucket.sparse()]
        if not names:
            raise error
        raise refused_sparse(names, strategy=self.name) from error


@final
class _Afterwards:
    """Exchanges gradients where it is left without an error. Entered anew for every step."""

    def __init__(self, strategy: Averaged) -> None:
        self._exchange = strategy.exchange

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._exchange()
