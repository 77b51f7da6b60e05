"""torch.distributed.fsdp.fully_shard: weights, gradients and optimizer state are spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.distributed.group import group_of_mine
from framework.errors import ConfigError, TopologyError
from framework.strategies.buffers import begin_alike, broadcast, buffers_of_ranks, restore_buffers
from framework.strategies.formats import Formats
from framework.strategies.trained import check_dense, check_same_change
from framework.strategies.wrapping import AUTO, by_class, by_size, check_classes
from framework.topology import check_strategy_fits
from framework.types import Sharding

_NOTHING: AbstractContextManager[Any] = nullcontext()


@final
class FSDP:
    """One copy of the model, spread over ranks: each keeps a part of every parameter and gathers it when it computes.

    A module that is sharded by itself is gathered before its forward and backward, and freed after them; the model
    itself is one, with what no other has. wrap: which others; `auto` takes, from the inside out, each that has at
    least `min_num_params` parameters no module in it has taken; else the names of classes, all of whose modules are
    taken. reshard_after_forward: free gathered weights after the forward and gather them again for the backward; false
    keeps them in between; null is true for all but the model itself, whose backward comes at once. broadcast_buffers:
    give every rank rank 0's buffers before the forward of each step, as strategy=ddp does.

    mp_policy: see `Formats`. cpu_offload: what a rank keeps lies in the CPU's memory, where the optimizer steps, and is
    copied to the GPU to be gathered. data_parallel_shard_degree: over how many ranks a copy is spread, neighbours;
    `auto`: those of a node; null: all of them. With fewer than all there are several copies, whose gradients are
    averaged as well (HSDP). One rank alone has all of it.

    With accumulation, gradients of micro-batches before the last are kept whole on each rank.
    Raises TopologyError for processes of several devices, for GPUs with gloo, and for a degree that doesn't divide
    them; ConfigError for what can't go together.
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
        mp_policy: Mapping[str, Any] | None = None,
        cpu_offload: bool = False,
        data_parallel_shard_degree: int | str | None = None,
    ) -> None:
        check_strategy_fits("FSDP", context.topology, backend=context.backend)
        check_classes(wrap, key="strategy.wrap")
        if min_num_params < 1:
            raise ConfigError(f"strategy.min_num_params={min_num_params} is below 1.")
        self._context = context
        self._classes = None if isinstance(wrap, str) else frozenset(wrap)
        self._min_num_params = min_num_params
        self._reshards = reshard_after_forward
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        self._formats = Formats.parse(mp_policy)
        self._degree = _degree(data_parallel_shard_degree, context)
        if cpu_offload:
            _check_offload(context, degree=self._degree)
        self._offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
        self.exchanges_on_cpu = cpu_offload
        self.sharding = Sharding(
            ranks=self._degree,
            param_dtype=self._formats.param_dtype,
            reduce_dtype=self._formats.reduce_dtype,
            is_on_cpu=cpu_offload,
        )
        self.part = context.rank % self._degree
        self.groups: Sequence[dist.ProcessGroup] = ()
        self._units: list[nn.Module] = []  # gathered one at a time; children before their parents
        self._synchronises = True
        self._begins_step = True  # the next forward is the first of a step

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError where `mp_policy` can't go with it."""
        self._formats.check(precision)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module, its parameters now DTensors with rank 0's values: make the optimizer after it.

        Raises ConfigError for a class name no module has, and for what torch refuses: parameters without dimensions,
        of several types gathered together, and of an embedding that says that its gradients are sparse.
        """
        scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise ConfigError(
                f"strategy=fsdp can't spread a parameter without dimensions: {', '.join(scalars)}.\n"
                "Give it the shape (1,), or use strategy=ddp."
            )
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()  # as they are gathered, whatever trainer.channels_last says
        check_dense(model, strategy="fsdp")
        self._units = self._chosen(model)
        types = _types(self._units)
        if self._context.world_size > 1:
            # As DDP does: whatever a model draws from, ranks begin with the same weights.
            begin_alike(model)
        mesh = self._mesh()
        for module, kept in types.items():
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self._reshards,
                mp_policy=self._formats.policy(module, kept=kept, is_model=module is model),
                offload_policy=self._offload,
            )
        model.register_forward_hook(_reshard_without_backward)
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module: FSDP reads `requires_grad` in every step. Raises ConfigError as `wrap` does."""
        check_same_change(changed, self._context)
        check_dense(model, strategy="fsdp")
        _types(self._units)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged and spread in the backward that synchronises; before it they add up on each rank."""
        if synchronise is not self._synchronises and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synchronise)
            model.set_is_last_backward(synchronise)
            self._synchronises = synchronise
        if self._begins_step and self._broadcasts_buffers:
            broadcast(model.buffers())
        self._begins_step = synchronise
        return _NOTHING

    def take_buffers(self, model: nn.Module, *, source: int) -> bool:
        """Give every rank rank `source`'s buffers, where they are kept equal. The first one's come with the step."""
        if self._broadcasts_buffers and source:
            broadcast(model.buffers(), source=source)
        return self._broadcasts_buffers

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

    def _chosen(self, model: nn.Module) -> list[nn.Module]:
        """The modules to gather by themselves, children before their parents, and the model itself at last."""
        if self._classes is None:
            found = list(by_size(model, self._min_num_params))
        else:
            found = by_class(model, self._classes, key="strategy.wrap")
        apart = self._formats.apart(model)
        return [*apart, *(module for module in found if module not in apart), model]

    def _mesh(self) -> DeviceMesh:
        """Of all ranks; several copies have a dimension for themselves, the first."""
        context, degree = self._context, self._degree
        world, everyone = context.world_size, dist.distributed_c10d._get_default_group()
        # Said, not guessed: torch would take a GPU that is there though the run is on the CPU.
        kind = context.device.type
        # Groups of our own making: those that init_device_mesh makes have torch's time-out, half an hour.
        if degree == world:
            mesh = DeviceMesh.from_group(everyone, kind, mesh_dim_names=("shard",))
        else:
            ranks = torch.arange(world).view(-1, degree)
            alike = everyone if degree == 1 else group_of_mine(ranks.T.tolist(), context)
            one_copy = group_of_mine(ranks.tolist(), context)
            mesh = DeviceMesh.from_group([alike, one_copy], kind, ranks, mesh_dim_names=("replicate", "shard"))
        self.groups = mesh.get_all_groups()
        return mesh


def _degree(given: int | str | None, context: Context) -> int:
    world = context.world_size
    if given is None or world == 1:
        return world
    if given == AUTO:
        return context.topology.procs_per_node
    if type(given) is not int or given < 1 or world % given:
        divisors = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
        raise TopologyError(
            f"strategy.data_parallel_shard_degree={given} doesn't divide the {world} processes into copies of the "
            f"model.\nUse one of {divisors}; auto, for those of a node; or null, for one copy over all."
        )
    return given


def _check_offload(context: Context, *, degree: int) -> None:
    if not context.topology.gpus_per_node:
        raise ConfigError(
            "strategy.cpu_offload=true keeps weights in the CPU's memory until a GPU needs them, and these processes "
            "compute on the CPU, where they are already.\nUse strategy.cpu_offload=false."
        )
    if degree < context.world_size:
        raise ConfigError(
            f"strategy.cpu_offload=true is for one copy of the model over all {context.world_size} processes, and "
            f"here each {degree} have one.\n"
            "Use strategy.data_parallel_shard_degree=null, or strategy.cpu_offload=false."
        )


def _types(chosen: Sequence[nn.Module]) -> dict[nn.Module, torch.dtype]:
    """By module the type of the weights that are gathered with it; of one that has none to itself, of those in it."""
    taken: set[int] = set()
    types = {}
    for module in chosen:
        own = {name: each for name, each in module.named_parameters() if id(each) not in taken}
        taken |= {id(each) for each in own.values()}
        found = {each.dtype: name for name, each in own.items() if each.requires_grad}
        if len(found) > 1:
            told = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
            raise ConfigError(
                f"strategy=fsdp gathers parameters of one type together, and those of {type(module).__name__} have "
                f"several: {told}.\nName the classes of modules that have one type each: strategy.wrap=[CLASS]."
            )
        inside: Iterator[Tensor] = chain(module.parameters(), module.buffers())
        floats = (each.dtype for each in inside if each.is_floating_point())
        types[module] = next(chain(found, floats), torch.float32)
    return types


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    """After a forward that no backward follows: what is kept for one would stay gathered, and pass for the model."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
