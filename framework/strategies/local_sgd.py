"""Replicas that train by themselves for some steps and then take the mean of their weights: for slow links.

S. U. Stich, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767. With warm-up: T. Lin,
S. U. Stich, K. K. Patel, M. Jaggi, Don't Use Large Mini-Batches, Use Local SGD, https://arxiv.org/abs/1808.07217. With
an outer optimizer: A. Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.errors import CheckpointError, ConfigError
from framework.strategies.allreduce import AllReduce
from framework.strategies.buckets import by_kind, cap_in_bytes
from framework.strategies.buffers import begin_alike, broadcast
from framework.strategies.trained import check_same_change, trained
from framework.types import Waiting

_NAME = "local_sgd"
_NOTHING: AbstractContextManager[Any] = nullcontext()


@final
class LocalSGD:
    """Each rank steps its own optimizer on its own part of every global batch; every `every_n_steps` steps all take the
    mean of their weights.

    warmup_steps: so many steps first in which gradients are averaged, as with `AllReduce`. outer_lr, outer_momentum,
    nesterov: of torch's SGD, whose gradient is what the weights were after the last average minus the mean of what they
    have become; 1 without momentum takes the mean itself. The state of each rank's own optimizer stays its own.
    broadcast_buffers: give all rank 0's buffers (BatchNorm's statistics) with each average, and where the model is
    evaluated or kept; in a warm-up before each step. False leaves each rank its own. bucket_cap_mb: as `AllReduce` has
    it, of weights.

    A rank's gradient is that of its samples times W over the global batch's size, so that the mean over ranks, without
    weights, is the gradient of the whole batch, however it was dealt; a rank without samples steps with a gradient of
    zero. So weight decay and momentum act on all alike, and with an average in every step, SGD ends where `AllReduce`
    does.

    What is averaged are changes since the last average: weights that nothing has changed stay bit for bit. Alone, the
    rule is the same, and nothing is exchanged; nothing at all is done then without an outer optimizer.
    """

    def __init__(
        self,
        *,
        context: Context,
        every_n_steps: int = 10,
        warmup_steps: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
    ) -> None:
        _check(every_n_steps, warmup_steps, outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov)
        self._context = context
        self._is_alone = context.world_size == 1
        self._every, self._warmup = every_n_steps, warmup_steps
        self._rule = _Outer(outer_lr, outer_momentum, nesterov)
        self._is_idle = self._is_alone and self._rule.is_plain
        self._broadcasts_buffers = broadcast_buffers and not self._is_alone
        self._options: dict[str, Any] = {"broadcast_buffers": broadcast_buffers, "bucket_cap_mb": bucket_cap_mb}
        self._cap_bytes = cap_in_bytes(bucket_cap_mb)
        self._all_reduce = self._new_all_reduce()
        self._groups: list[_Group] = []
        self._steps = 0  # of the optimizer, in all
        self._source = 0  # the rank whose buffers all get with an average
        self._waiting: Waiting | None = None
        self.replicas_differ = not self._is_alone
        self.exchanges_every = every_n_steps
        self.copies_gradients = warmup_steps > 0
        self.weight_copies = 0 if self._is_idle else 1 + (outer_momentum > 0)

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss: each rank would leave out other steps."""
        if precision is Precision.FP16_MIXED and self.replicas_differ:
            raise ConfigError(
                f"trainer.precision={precision.value} scales the loss and leaves out a step whose gradients overflow. "
                f"Under strategy={_NAME} each process would leave out steps of its own, and their learning rates would "
                "go apart.\nUse trainer.precision=bf16-mixed, or another strategy."
            )

    @property
    def steps_to_exchange(self) -> int:
        """No rank ends so many more steps before every other has come to the last of them."""
        past = self._steps - self._warmup
        return 1 if past < 0 else self._every - past % self._every

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module, with rank 0's weights and buffers. Raises ConfigError where no parameter is trained."""
        self._groups = self._new_groups(model)
        if self._warmup:
            return self._all_reduce.wrap(model)
        if not self._is_alone:
            begin_alike(model)
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Weights are averaged first, so that those frozen now are equal on all ranks.

        Weights that stay trained keep their outer momentum.
        """
        check_same_change(changed, self._context)
        has_begun = self._has_begun
        if has_begun:
            self._average(model)
        momentum = {
            id(weight): value
            for group in self._groups
            for weight, value in zip(group.weights, group.momentum, strict=False)
        }
        self._groups = self._new_groups(model)
        if self._steps < self._warmup:
            self._all_reduce.lay_out(model)
        if has_begun:
            for group in self._groups:
                group.begin()
                if momentum:
                    group.momentum = [momentum.get(id(each), torch.zeros_like(each)) for each in group.weights]
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged in a warm-up; else they stay this rank's own."""
        if self._steps < self._warmup:
            return self._all_reduce.accumulate(model, synchronise=synchronise)
        if not self._has_begun and not self._is_idle:
            for group in self._groups:
                group.begin()
        return _NOTHING

    def tell_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """An average is waiting as a whole, and so is each exchange of a warm-up; between averages there is none."""
        self._waiting = waiting
        return self._all_reduce.tell_waiting(model, waiting)

    def after_update(self, model: nn.Module) -> None:
        """Count the step, and average where it is due. Every rank must call it; but for an average nothing is done."""
        self._steps += 1
        past = self._steps - self._warmup
        if past == 0:
            self._all_reduce = self._new_all_reduce()  # whose gradients' memory isn't needed any more
        elif past > 0 and past % self._every == 0:
            self._average(model)

    def take_buffers(self, model: nn.Module, *, source: int) -> bool:
        """With the next average all get rank `source`'s buffers, where they are kept equal; in a warm-up at once."""
        if self._steps < self._warmup:
            return self._all_reduce.take_buffers(model, source=source)
        self._source = source
        return self._broadcasts_buffers

    def before_evaluation(self, model: nn.Module) -> None:
        """Nothing: `evaluation_weights` makes replicas equal, for as long as they have to be."""

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        """While entered, `model` holds the mean over ranks of what it held, and one rank's buffers; then what it held.

        That may be averages of each rank's weights (over steps): their mean is the average of the mean. Takes memory
        for a copy of the trained weights and the buffers. Every rank must call it.
        """
        weights = [each for group in self._groups for each in group.weights] if self._has_begun else []
        buffers = list(model.buffers()) if self._broadcasts_buffers else []
        held = [] if self._is_alone else [*weights, *buffers]
        kept = [each.detach().clone() for each in held]
        if held:
            self._hold_mean(buffers)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, value in zip(held, kept, strict=True):
                    each.copy_(value)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What is the same on every rank: how many steps, the weights of the last average, the outer momentum.

        Tensors are the live ones. Each rank's own weights are no part of it: `replicas_differ` says that they are kept.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        state: dict[str, Any] = {"steps": self._steps} | ({"buffers_of": self._source} if self._source else {})
        for kind in ("anchor", "momentum"):
            state[kind] = {
                names[id(weight)]: value
                for group in self._groups
                for weight, value in zip(group.weights, getattr(group, kind), strict=False)
            }
        return state

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Go on from there, on any number of ranks; without a state the count of steps begins anew.

        Raises CheckpointError where it is of other weights.
        """
        self._steps = state.get("steps", 0)
        found = state.get("buffers_of", 0)
        self._source = found if found < self._context.world_size else 0
        if self._steps >= self._warmup:
            self._all_reduce = self._new_all_reduce()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = {names[id(weight)] for group in self._groups for weight in group.weights}
        anchor, momentum = state.get("anchor", {}), state.get("momentum", {})
        if anchor and anchor.keys() != own:
            raise CheckpointError(
                f"The checkpoint's state of strategy={_NAME} is of other weights: "
                f"{', '.join(sorted(anchor.keys() ^ own))} are only in one.\n"
                "Resume with requires_grad as it was, or start a new run from these weights with init_from."
            )
        for group in self._groups if anchor and not self._is_idle else ():
            keys = [names[id(weight)] for weight in group.weights]
            group.begin()
            group.take(group.anchor, [anchor[key] for key in keys])
            if momentum and not self._rule.is_plain:
                group.momentum = [torch.zeros_like(each) for each in group.anchor]
                group.take(group.momentum, [momentum[key] for key in keys])

    @property
    def _has_begun(self) -> bool:
        """Whether replicas may differ since some weights that all had."""
        return bool(self._groups[0].anchor)

    def _new_groups(self, model: nn.Module) -> list[_Group]:
        parameters = trained(model, strategy=_NAME, averages="weights")
        return [_Group(group) for group in by_kind(parameters, cap_bytes=self._cap_bytes)]

    def _new_all_reduce(self) -> AllReduce:
        made = AllReduce(context=self._context, **self._options)
        made.name = _NAME
        return made

    @torch.no_grad()
    def _average(self, model: nn.Module) -> None:
        if self._is_idle:
            return
        if self._waiting is not None:
            self._waiting.begin_waiting()
        for group, change in self._mean_changes():
            group.move(change, self._rule)
        if self._broadcasts_buffers:
            broadcast(model.buffers(), source=self._source)
        if self._waiting is not None:
            self._waiting.end_waiting()

    @torch.no_grad()
    def _hold_mean(self, buffers: Sequence[Tensor]) -> None:
        for group, change in self._mean_changes() if self._has_begun else ():
            torch._foreach_copy_(group.weights, torch._foreach_add(group.anchor, change))
        broadcast(buffers, source=self._source)

    def _mean_changes(self) -> Iterator[tuple[_Group, list[Tensor]]]:
        """Of each group the mean over ranks of its weights' changes; while one is on its way the next is laid out."""
        before: tuple[_Group, Tensor, dist.Work | None] | None = None
        for group in self._groups:
            flat = group.change()
            work = None if self._is_alone else self._all_reduce.begin_mean(flat)
            if before is not None:
                yield _arrived(*before)
            before = group, flat, work
        if before is not None:
            yield _arrived(*before)


def _arrived(group: _Group, flat: Tensor, work: dist.Work | None) -> tuple[_Group, list[Tensor]]:
    if work is not None:
        work.wait()
    return group, group.parts_of(flat)


@final
class _Outer:
    """The rule of the outer optimizer: torch's SGD. is_plain: it takes the mean as it is."""

    def __init__(self, lr: float, momentum: float, nesterov: bool) -> None:
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self.is_plain = lr == 1 and momentum == 0


@final
class _Group:
    """Weights of one type and device, which are averaged in one call; all that is kept of them is of their type.

    anchor: what all ranks had after the last average, momentum: of the outer optimizer; each like `weights`, or empty
    before there is any.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights: list[Tensor] = list(weights)
        self.anchor: list[Tensor] = []
        self.momentum: list[Tensor] = []

    def begin(self) -> None:
        """Replicas are equal now, and changes count from here."""
        self.anchor = [weight.detach().clone() for weight in self.weights]
        self.momentum = []

    def change(self) -> Tensor:
        """Of all weights since the last average, laid together."""
        return torch.cat([(now - then).reshape(-1) for now, then in zip(self.weights, self.anchor, strict=True)])

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """What `change` laid together, one by one again."""
        parts = flat.split([weight.numel() for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights, strict=True)]

    def move(self, change: list[Tensor], rule: _Outer) -> None:
        """One step of the outer optimizer: anchor and weights are the same on all ranks from here."""
        if rule.momentum:
            if not self.momentum:
                self.momentum = [torch.zeros_like(each) for each in self.anchor]
            torch._foreach_mul_(self.momentum, rule.momentum)
            torch._foreach_add_(self.momentum, change)
            change = (
                list(torch._foreach_add(change, self.momentum, alpha=rule.momentum)) if rule.nesterov else self.momentum
            )
        torch._foreach_add_(self.anchor, change, alpha=rule.lr)
        torch._foreach_copy_(self.weights, self.anchor)

    def take(self, own: list[Tensor], values: Sequence[Tensor]) -> None:
        """Put values, which may be on another device, in the place of those of `own`."""
        for each, value in zip(own, values, strict=True):
            each.copy_(value)


def _check(every_n_steps: int, warmup_steps: int, *, outer_lr: float, outer_momentum: float, nesterov: bool) -> None:
    if every_n_steps < 1:
        raise ConfigError(f"strategy.every_n_steps={every_n_steps} must be 1 or more: weights are averaged so often.")
    if warmup_steps < 0:
        raise ConfigError(f"strategy.warmup_steps={warmup_steps} must be 0, for no warm-up, or more.")
    if not outer_lr > 0:
        raise ConfigError(f"strategy.outer_lr={outer_lr} must be above 0; 1 takes the mean as it is.")
    if not 0 <= outer_momentum < 1:
        raise ConfigError(f"strategy.outer_momentum={outer_momentum} must be 0, for none, or more, and below 1.")
    if nesterov and outer_momentum == 0:
        raise ConfigError(
            "strategy.nesterov=true needs a momentum: strategy.outer_momentum=0.9 for one, or nesterov=false."
        )
