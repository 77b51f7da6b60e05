"""State that belongs to the places of samples in the global batch, such as hidden states of truncated backpropagation.

A task or a source declares it: `slot_state = {"hidden": 1}` names an attribute, and the dimension of its tensors that
is the slot. Between steps, the attribute has the slots of this rank's share of the global batch; within `training_step`
(or `batch` of a source), those of the micro-batch. Checkpoints have all slots, so a run resumes on any number of
processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from framework.checkpoint.replicas import gather_replicas
from framework.data.batching import share
from framework.data.loader import TrainLoader
from framework.data.stream import StreamLoader
from framework.distributed.context import Context
from framework.errors import CheckpointError, ConfigError, TargetError
from framework.strategies.base import Strategy
from framework.types import Window

# The keys in `training`: the attribute's name → its value for all slots; of the task, and of the source.
SLOTS = "slots"
SOURCE_SLOTS = "source_slots"


class _SlotAttribute(NamedTuple):
    """An attribute whose tensors have a dimension for the slot."""

    name: str
    dim: int
    # Its value before the first step.
    initial: Any


@final
class SlotState:
    """The attributes that the `slot_state` of a task or source names; empty if it has none.

    Raises ConfigError if the run has steps of other sizes, or ranks without samples of their own; TargetError for a
    declaration that names something else.
    """

    def __init__(self, holder: Any, *, loader: TrainLoader, strategy: Strategy, context: Context) -> None:
        self._holder = holder
        self._name = type(holder).__name__
        self._context = context
        self._num_slots = loader.global_batch_size
        self._attributes: list[_SlotAttribute] = []
        # The parts of micro-batches, by attribute, while a window of several is computed.
        self._parts: dict[str, list[Any]] = {}

        declared: Any = getattr(holder, "slot_state", {})
        if not isinstance(declared, Mapping):
            raise TargetError(f"{self._name}.slot_state must be a dict of names and dimensions, not {declared!r}.")
        for name, dim in declared.items():
            if not isinstance(dim, int) or not hasattr(holder, name):
                raise TargetError(
                    f"{self._name}.slot_state has {name!r}: {dim!r}. It names an attribute that the constructor "
                    "sets, to None or to tensors, and the dimension of these that is the slot."
                )
            if _is_saved_buffer(holder, name):
                raise TargetError(
                    f"{self._name}.slot_state has {name!r}, a buffer, which state_dict would also save, with the slots "
                    "of one process. Set it as an attribute, or use register_buffer(..., persistent=False)."
                )
            self._attributes.append(_SlotAttribute(name, dim, copy.deepcopy(getattr(holder, name))))
        if self._attributes:
            names = ", ".join(declared)
            self._check_run(f"{self._name}.slot_state ({names})", loader=loader, strategy=strategy)

    def __bool__(self) -> bool:
        return bool(self._attributes)

    def _check_run(self, what: str, *, loader: TrainLoader, strategy: Strategy) -> None:
        if strategy.data_share(self._context).world_size != self._context.world_size:
            raise ConfigError(
                f"{what} needs a strategy with which each process has samples of its own, and "
                f"{type(strategy).__name__} isn't one. Use strategy=ddp, allreduce, butterfly or fsdp."
            )
        if isinstance(loader, StreamLoader) and loader.is_sharded:
            raise ConfigError(
                f"{what} has a slot for each sample of a global batch, and with data.stream=join or stop a process may "
                "have fewer. Use data.stream=shared."
            )
        if loader.lists is not None:
            raise ConfigError(
                f"{what} has a slot for each sample of a global batch, and {loader.lists.name} may list "
                "batches of other sizes. Give the DataLoader a batch_size."
            )
        if loader.plan.drop_last:
            return
        steps = loader.steps
        size = None
        if loader.sizes is not None:
            size = loader.sizes.constant
        if size is None or steps is None or steps.of(0) * self._num_slots > size:
            raise ConfigError(
                f"{what} has a slot for each of the {self._num_slots} samples of a global batch, and the last batch of "
                f"an epoch of {size or 'unknown length'} samples may have fewer. Use data.drop_last=true, or a "
                "data.global_batch_size that divides the epoch."
            )

    # In a step

    def begin_micro_batch(self, window: Window, index: int) -> None:
        """Set the attributes to the slots of micro-batch `index`."""
        if index == 0:
            sizes = [micro.num_samples for micro in window.indices]
            for attribute in self._attributes:
                value = getattr(self._holder, attribute.name)
                self._check_slots(attribute, value, sum(sizes))
                self._parts[attribute.name] = _split(value, sizes, dim=attribute.dim)
        for attribute in self._attributes:
            setattr(self._holder, attribute.name, self._parts[attribute.name][index])

    def end_micro_batch(self, window: Window, index: int) -> None:
        """Detach what they were set to, and after the last micro-batch put the parts together."""
        for attribute in self._attributes:
            value = tree_map(_detached, getattr(self._holder, attribute.name))
            self._check_slots(attribute, value, window.indices[index].num_samples)
            parts = self._parts[attribute.name]
            parts[index] = value
            if index == len(parts) - 1:
                value = self._joined(parts, attribute)
            setattr(self._holder, attribute.name, value)

    def reset(self) -> None:
        """Set the attributes to what they were at first: for trials, whose batches have other sizes."""
        for attribute in self._attributes:
            setattr(self._holder, attribute.name, copy.deepcopy(attribute.initial))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Set the attributes to what they were at first, and back afterwards: for evaluations, which may set them."""
        values = {attribute.name: getattr(self._holder, attribute.name) for attribute in self._attributes}
        self.reset()
        try:
            yield
        finally:
            for name, value in values.items():
                setattr(self._holder, name, value)

    @contextmanager
    def restored_afterwards(self) -> Iterator[None]:
        values = {}
        for attribute in self._attributes:
            values[attribute.name] = copy.deepcopy(getattr(self._holder, attribute.name))
        try:
            yield
        finally:
            for name, value in values.items():
                setattr(self._holder, name, value)

    # In checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return all slots on rank 0, in their order. Every rank must call it.

        Raises TargetError for tensors of other sizes.
        """
        own = {}
        num_own = len(self._own_slots())
        for attribute in self._attributes:
            value = getattr(self._holder, attribute.name)
            self._check_slots(attribute, value, num_own)
            own[attribute.name] = tree_map(_copied, value)
        if not own:
            return {}
        of_ranks = [own, *gather_replicas(own, self._context)]
        whole = {}
        for attribute in self._attributes:
            whole[attribute.name] = self._joined([state[attribute.name] for state in of_ranks], attribute)
        return whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's slots of a `state_dict`. Raises CheckpointError if it has another number of slots."""
        slots = self._own_slots()
        for attribute in self._attributes:
            if attribute.name not in state:
                continue
            saved = state[attribute.name]
            for tensor in _tensors(saved):
                num_saved = tensor.shape[attribute.dim]
                if num_saved != self._num_slots:
                    raise CheckpointError(
                        f"The checkpoint has {self._name}.{attribute.name} of {num_saved} slots, one for each "
                        f"sample of a global batch, and a global batch has {self._num_slots} samples now.\nResume with "
                        f"data.global_batch_size={num_saved}, or start a new run from these weights with init_from."
                    )
            take = _slot_taker(attribute.dim, slots, device=self._context.device)
            setattr(self._holder, attribute.name, tree_map(take, saved))

    def _own_slots(self) -> range:
        return share(self._num_slots, rank=self._context.rank, world_size=self._context.world_size)

    def _check_slots(self, attribute: _SlotAttribute, value: Any, number: int) -> None:
        """Raise TargetError unless each tensor has `number` slots."""
        for tensor in _tensors(value):
            shape = tuple(tensor.shape)
            if not -tensor.ndim <= attribute.dim < tensor.ndim or shape[attribute.dim] != number:
                raise TargetError(
                    f"{self._name}.{attribute.name} has a tensor of shape {shape}. Its dimension {attribute.dim} "
                    f"must be the slot (slot_state), and there are {number}: one for each sample."
                )

    def _joined(self, parts: Sequence[Any], attribute: _SlotAttribute) -> Any:
        """Return the value of all parts together. Raises TargetError if they differ in more than their slots."""
        if len(parts) == 1:
            return parts[0]
        leaves_of_parts = []
        forms = []
        for part in parts:
            leaves, spec = tree_flatten(part)
            leaves_of_parts.append(leaves)
            forms.append((spec, [_form(leaf, dim=attribute.dim) for leaf in leaves]))
        for form in forms:
            if form != forms[0]:
                raise TargetError(
                    f"{self._name}.{attribute.name} can't be put together from its slots: for some samples it is "
                    f"{_described(forms[0])}, and for others {_described(form)}.\nIt must have tensors of the same "
                    "types and, but for the slots, of the same sizes for all samples: pad them to a fixed size."
                )
        joined: list[Tensor | None] = []
        for leaf_of_parts in zip(*leaves_of_parts, strict=True):
            if leaf_of_parts[0] is None:
                joined.append(None)
            else:
                joined.append(torch.cat(leaf_of_parts, attribute.dim))
        return tree_unflatten(joined, forms[0][0])


def _is_saved_buffer(holder: Any, name: str) -> bool:
    if not isinstance(holder, nn.Module):
        return False
    return name in holder._buffers and name not in holder._non_persistent_buffers_set


_Form = tuple[TreeSpec, list[Any]]
"""How a value is built, and of each leaf what must be the same for all slots."""


def _form(leaf: Tensor | None, *, dim: int) -> tuple[torch.dtype, list[int]] | None:
    if leaf is None:
        return None
    shape = list(leaf.shape)
    del shape[dim]
    return leaf.dtype, shape


def _described(form: _Form) -> str:
    spec, leaves = form
    names: list[str | None] = []
    for leaf in leaves:
        if leaf is None:
            names.append(None)
        else:
            dtype, sizes = leaf
            names.append(f"{dtype} {sizes}")
    return str(tree_unflatten(names, spec))


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value. Raises TargetError if it holds anything else."""
    leaves, _ = tree_flatten(value)
    tensors = [leaf for leaf in leaves if leaf is not None]
    for leaf in tensors:
        if not isinstance(leaf, Tensor):
            raise TargetError(f"slot_state is of tensors, or tuples, lists and dicts of them, and has {leaf!r}.")
    return tensors


def _split(value: Any, sizes: Sequence[int], *, dim: int) -> list[Any]:
    """Return the value of each micro-batch. What is None, or holds it, stays so."""
    leaves, spec = tree_flatten(value)
    parts_of_leaves = []
    for leaf in leaves:
        if leaf is None:
            parts_of_leaves.append([None] * len(sizes))
        else:
            # Contiguous: as they are after a resume, for sums of the same bits, and as a cuDNN kernel needs them.
            parts_of_leaves.append([part.contiguous() for part in leaf.split(list(sizes), dim)])
    if not leaves:
        return [value] * len(sizes)
    return [tree_unflatten(list(leaves_of_part), spec) for leaves_of_part in zip(*parts_of_leaves, strict=True)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Tensor | None) -> Tensor | None:
    """Return a copy on the CPU. A view, as of the last hidden state of all, would be saved with all that it views."""
    return None if leaf is None else leaf.detach().to("cpu", copy=True)


def _slot_taker(dim: int, slots: range, *, device: torch.device) -> Callable[[Any], Any]:
    def take(leaf: Any) -> Any:
        if leaf is None:
            return None
        return leaf.narrow(dim, slots.start, len(slots)).to(device, copy=True).contiguous()

    return take
