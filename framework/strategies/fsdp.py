"""torch.distributed.fsdp.fully_shard: weights, gradients and optimizer state are spread over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from framework.distributed.context import Context
from framework.errors import ConfigError, TopologyError
from framework.strategies.buffers import broadcast, buffers_of_ranks, restore_buffers

AUTO = "auto"

_NOTHING: AbstractContextManager[Any] = nullcontext()
_READ_FROM_OUTSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that read weights of their children without calling them: they stay whole."""


@final
class FSDP:
    """One copy of the model, spread over all ranks: each keeps 1/W of every parameter and gathers it when it computes.

    A module that is sharded by itself is gathered before its forward and backward, and freed after them; the model
    itself is one, with what no other has. wrap: which others; `auto` takes, from the inside out, each that has at
    least `min_num_params` parameters no module in it has taken; else the names of classes, all of whose modules are
    taken. reshard_after_forward: free gathered weights after the forward and gather them again for the backward; false
    keeps them in between; null is true for all but the model itself, whose backward comes at once. broadcast_buffers:
    give every rank rank 0's buffers before the forward of each step, as strategy=ddp does.

    With accumulation, gradients of micro-batches before the last are kept whole on each rank.
    Raises TopologyError for processes of several devices, and for GPUs with gloo.
    """

    forward_communicates = True

    def __init__(
        self,
        *,
        context: Context,
        wrap: str | Sequence[str] = AUTO,
        min_num_params: int = 1_000_000,
        reshard_after_forward: bool | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        if len(context.devices) > 1:
            raise TopologyError(
                f"strategy=fsdp spreads the model over processes of one device each, and these have "
                f"{len(context.devices)}.\nUse topology.gpus_per_process=1 topology.min_gpus_per_process=1."
            )
        if context.topology.gpus_per_node and context.backend == "gloo":
            raise TopologyError(
                "strategy=fsdp gathers weights from GPU to GPU, which backend=gloo can't.\n"
                "Use backend=nccl with a GPU for each process (topology.share_gpus=false), or trainer.gpus=0."
            )
        if isinstance(wrap, str) and wrap != AUTO:
            raise ConfigError(f"strategy.wrap={wrap}: must be {AUTO}, or a list of class names: strategy.wrap=[{wrap}]")
        if min_num_params < 1:
            raise ConfigError(f"strategy.min_num_params={min_num_params} is below 1.")
        self._context = context
        self._classes = None if isinstance(wrap, str) else frozenset(wrap)
        self._min_num_params = min_num_params
        self._reshards = reshard_after_forward
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        self._synchronises = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module, its parameters now DTensors with rank 0's values: make the optimizer after it.

        Raises ConfigError for a class name no module has, and for what torch refuses: parameters without dimensions,
        and of several types gathered together.
        """
        scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise ConfigError(
                f"strategy=fsdp can't spread a parameter without dimensions: {', '.join(scalars)}.\n"
                "Give it the shape (1,), or use strategy=ddp."
            )
        found = _by_size(model, self._min_num_params) if self._classes is None else self._by_class(model)
        chosen = [*found, model]
        _check_types(chosen)
        if self._context.world_size > 1:
            # As DDP does: whatever a model draws from, ranks begin with the same weights.
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        # Said, not guessed: torch would take a GPU that is there though the run is on the CPU.
        mesh = init_device_mesh(self._context.device.type, (self._context.world_size,), mesh_dim_names=("shard",))
        for module in chosen:
            fully_shard(module, mesh=mesh, reshard_after_forward=self._reshards)
        model.register_forward_hook(_reshard_without_backward)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged and spread in the backward that synchronises; before it they add up on each rank."""
        if synchronise is not self._synchronises and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synchronise)
            model.set_is_last_backward(synchronise)
            self._synchronises = synchronise
        if synchronise and self._broadcasts_buffers:
            broadcast(model.buffers())
        return _NOTHING

    def before_evaluation(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers, which its last forward left different. Weights are equal: there is one."""
        if self._broadcasts_buffers:
            broadcast(model.buffers())

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Each rank's buffers, where they aren't the same."""
        return {} if self._broadcasts_buffers else {"buffers": buffers_of_ranks(model, self._context)}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Give this rank its own buffers back; those of another number of ranks are left as they are."""
        if not self._broadcasts_buffers:
            restore_buffers(model, state.get("buffers", []), self._context)

    def _by_class(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules of the classes that were named, children before their parents."""
        assert self._classes is not None
        found = [(type(module).__name__, module) for module in _inside_out(model) if module is not model]
        missing = self._classes - {name for name, _ in found}
        if missing:
            there = ", ".join(sorted({name for name, _ in found}))
            raise ConfigError(
                f"strategy.wrap: {type(model).__name__} has no module of the class {', '.join(sorted(missing))}.\n"
                f"It has {there or 'no modules in it'}."
            )
        for name, module in found:
            if name in self._classes:
                if not _has_forward(module):  # nothing would gather it
                    raise ConfigError(f"strategy.wrap: {name} only holds other modules. Name the class of those.")
                yield module


def _check_types(chosen: Sequence[nn.Module]) -> None:
    taken: set[int] = set()
    for module in chosen:
        own = {name: each for name, each in module.named_parameters() if each.requires_grad and id(each) not in taken}
        taken |= {id(each) for each in own.values()}
        types = {each.dtype: name for name, each in own.items()}
        if len(types) > 1:
            told = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
            raise ConfigError(
                f"strategy=fsdp gathers parameters of one type together, and those of {type(module).__name__} have "
                f"several: {told}.\nName the classes of modules that have one type each: strategy.wrap=[CLASS]."
            )


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    """After a forward that no backward follows: what is kept for one would stay gathered, and pass for the model."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inside_out(child)
    yield module


def _by_size(model: nn.Module, at_least: int) -> Iterator[nn.Module]:
    """Modules in `model` with so many parameters that none yielded before has, children before their parents."""
    uses = _uses(model)
    taken: set[int] = set()

    def within(module: nn.Module) -> Iterator[nn.Module]:
        if not isinstance(module, _READ_FROM_OUTSIDE):
            for child in module.children():
                yield from within(child)
        # The output of attention is a view, and torch warns of what may be done to one that a gathered module gave.
        if module is model or not _has_forward(module) or isinstance(module, nn.MultiheadAttention):
            return
        rest = {id(each): each.numel() for each in module.parameters() if id(each) not in taken}
        here = _uses(module)
        # What others use as well has to be gathered for them too: it is left to a module that has all of them in it.
        if sum(rest.values()) >= at_least and all(uses[each] == here[each] for each in rest):
            taken.update(rest)
            yield module

    yield from within(model)


def _uses(model: nn.Module) -> Counter[int]:
    """In how many places each parameter is, by its id."""
    return Counter(id(each) for module in model.modules() for each in module._parameters.values() if each is not None)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
