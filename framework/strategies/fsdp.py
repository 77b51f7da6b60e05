"""torch.distributed.fsdp.fully_shard (FSDP2): weights, gradients and optimizer state are sharded over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.distributed.process_group import new_subgroup
from framework.strategies.averaging import SyncedBuffers, broadcast
from framework.strategies.base import NO_CONTEXT, StrategyCosts
from framework.strategies.fsdp_rules import (
    BF16,
    FP16,
    FP32,
    FSDPRules,
    check_offload,
    check_policy,
    parse_policy,
    shard_degree,
)
from framework.strategies.parameters import check_dense, check_same_change
from framework.strategies.rules import check_gpus_are_connected, check_one_device
from framework.strategies.wrapping import AUTO, READ_FROM_OUTSIDE, by_class, has_forward


@final
class FSDP(SyncedBuffers):
    """Shard a copy of the model over ranks: each keeps a part of every parameter and gathers the rest to compute.

    A wrapped module's weights are gathered before its forward and backward, and freed afterwards; the model itself is
    wrapped too, with the weights that no other wrapped module has. While gradients accumulate, each rank keeps whole
    ones.

    Args:
        wrap: Names of classes whose modules are wrapped; or `auto`: from the inside out, each module with at least
            `min_num_params` parameters, not counting those of modules wrapped inside it.
        reshard_after_forward: Free gathered weights after the forward and gather them again for the backward; null:
            true, except for the model itself, whose backward follows at once.
        broadcast_buffers: Give all ranks rank 0's buffers before the first forward of a step, as strategy=ddp does.
        mp_policy: `param_dtype` to gather weights and compute in, `reduce_dtype` to reduce gradients in: fp32, bf16 or
            fp16; null: the type in which the weights are stored.
        cpu_offload: Keep shards in the CPU's memory, where the optimizer steps.
        data_parallel_shard_degree: Over how many neighbouring ranks a copy is sharded; `auto`: those of a node; null:
            all. With fewer than all there are several copies, whose gradients are averaged (HSDP).

    Raises TopologyError for processes of several devices, for GPUs with gloo, and for a degree that doesn't divide the
    ranks; ConfigError for options that can't go together.
    """

    rules = FSDPRules
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
        check_one_device(context.topology, option="strategy=fsdp")
        check_gpus_are_connected(context.topology, context.backend, option="strategy=fsdp")
        super().__init__(context, broadcast_buffers=broadcast_buffers)
        # The names of the classes to wrap; None for `auto`.
        self._classes: frozenset[str] | None = None
        if isinstance(wrap, str):
            if wrap != AUTO:
                self._classes = frozenset([wrap])
        else:
            self._classes = frozenset(wrap)
        self._min_num_params = min_num_params
        self._reshard_after_forward = reshard_after_forward
        self._requested_policy = mp_policy
        self._policy = _torch_policy(mp_policy)
        check_offload(cpu_offload, data_parallel_shard_degree, context.topology)
        self._num_shards = shard_degree(data_parallel_shard_degree, context.topology)
        self._offload_policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
        self.exchanges_on_cpu = cpu_offload
        self.shard_index = context.rank % self._num_shards
        # True if FSDP reduces gradients in the next backward.
        self._synchronises = True

    def costs(self) -> StrategyCosts:
        return StrategyCosts(
            num_shards=self._num_shards,
            param_dtype=self._policy.param_dtype,
            reduce_dtype=self._policy.reduce_dtype,
        )

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for fp16 without a loss scaler."""
        check_policy(self._requested_policy, precision)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the same module. Its parameters are DTensors from here on, with rank 0's values.

        The optimizer must be made after it.

        Raises ConfigError for a class name no module has, and for an embedding with sparse gradients; ValueError for a
        parameter without dimensions.
        """
        for parameter in model.parameters():
            # FSDP needs contiguous parameters, and trainer.channels_last makes others.
            parameter.data = parameter.data.contiguous()
        check_dense(model, strategy="fsdp")
        modules = self._modules_to_wrap(model)
        if self._context.world_size > 1:
            # As with DDP, ranks begin with the same weights, even if each one's model has drawn its own.
            broadcast([*model.parameters(), *model.buffers()])

        mesh = self._make_mesh()
        # The type in which the weights are stored.
        dtype = next((parameter.dtype for parameter in model.parameters()), None)
        for module in modules:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=self._reshard_after_forward,
                mp_policy=_policy_of(module, self._policy, dtype=dtype, is_model=module is model),
                offload_policy=self._offload_policy,
            )
        model.register_forward_hook(_reshard_without_backward)
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module: FSDP reads `requires_grad` in every step."""
        check_same_change(changed, self._context)
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Reduce gradients in the backward that synchronises; before it they add up on each rank."""
        if synchronise is not self._synchronises and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(synchronise)
            model.set_is_last_backward(synchronise)
            self._synchronises = synchronise
        self._begin_forward(model, synchronise=synchronise)
        return NO_CONTEXT

    def _modules_to_wrap(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules to wrap, children before their parents, the model itself last."""
        if self._classes is None:
            to_wrap = set(_by_size(model, self._min_num_params))
        else:
            to_wrap = set(by_class(model, self._classes, key="strategy.wrap"))
        if self._policy.param_dtype is not None:
            # Modules with statistics have a policy of their own, so each is wrapped by itself.
            to_wrap.update(module for module in model.modules() if _has_statistics(module))
        to_wrap.add(model)
        children_first = reversed(list(model.modules()))
        return [module for module in children_first if module in to_wrap]

    def _make_mesh(self) -> DeviceMesh:
        """Return the mesh of all ranks; with several copies its first dimension is that of the copies."""
        context = self._context
        # Named explicitly: torch would take a GPU if there is one, even for a run on the CPU.
        device_type = context.device.type
        # The groups are made here, because those that init_device_mesh makes have torch's time-out, half an hour.
        if self._num_shards == context.world_size:
            default_group = dist.distributed_c10d._get_default_group()
            mesh = DeviceMesh.from_group(default_group, device_type, mesh_dim_names=("shard",))
        else:
            # Neighbours have a copy of the model; ranks at the same place of their copies have the same shard.
            # Lists rather than tensors, whose values job=plan can't read.
            num_shards = self._num_shards
            copies = [list(range(first, first + num_shards)) for first in range(0, context.world_size, num_shards)]
            same_shards = [list(range(shard, context.world_size, num_shards)) for shard in range(num_shards)]
            replicate_group = new_subgroup(same_shards, context)
            shard_group = new_subgroup(copies, context)
            mesh = DeviceMesh.from_group(
                [replicate_group, shard_group], device_type, copies, mesh_dim_names=("replicate", "shard")
            )
        self.groups = mesh.get_all_groups()
        return mesh


def gathered_bytes(model: nn.Module) -> int:
    """Return the bytes of the most weights that are gathered at once; 0 if `model` isn't sharded by FSDP."""
    sizes = [0]
    # Parameters of the modules that are wrapped inside of others.
    taken: set[nn.Parameter] = set()
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule):
            own = set(module.parameters()) - taken
            taken |= own
            sizes.append(sum(parameter.numel() * parameter.itemsize for parameter in own))
    return max(sizes)


def _by_size(model: nn.Module, min_num_params: int) -> Iterator[nn.Module]:
    """Yield the modules to wrap, children before their parents.

    Each has at least `min_num_params` parameters, not counting those of modules yielded before.
    """
    uses = _count_uses(model)
    excluded = _never_wrapped(model)
    # Ids of the parameters in the modules yielded before.
    taken: set[int] = set()
    for module in reversed(list(model.modules())):
        if module in excluded or not has_forward(module):
            continue
        # The sizes of its parameters that aren't taken, by id.
        sizes = {id(parameter): parameter.numel() for parameter in module.parameters() if id(parameter) not in taken}
        # Modules outside may use a parameter too, as with tied weights. It must be gathered for them as well, so it is
        # left to a parent that has all of its users in it.
        uses_inside = _count_uses(module)
        is_used_outside = any(uses[parameter_id] != uses_inside[parameter_id] for parameter_id in sizes)
        if sum(sizes.values()) >= min_num_params and not is_used_outside:
            taken.update(sizes)
            yield module


def _never_wrapped(model: nn.Module) -> set[nn.Module]:
    """Return the modules that `_by_size` leaves out.

    These are the model (it is wrapped in any case), attention, and modules whose weights others read without calling
    them.
    """
    modules = {model}
    for module in model.modules():
        if isinstance(module, READ_FROM_OUTSIDE):
            modules.update(inner for inner in module.modules() if inner is not module)
        # Attention returns a view, and torch warns of changing a view that a wrapped module returned.
        if isinstance(module, nn.MultiheadAttention):
            modules.add(module)
    return modules


def _count_uses(model: nn.Module) -> Counter[int]:
    """Return in how many places each parameter is, by its id."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    return uses


def _reshard_without_backward(model: nn.Module, *_: Any) -> None:
    """Free gathered weights after a forward without a backward, as in evaluation.

    The weights that the model itself has would stay in place of its shards, since only a backward would free them.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


# Mixed precision

_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}


def _torch_policy(mp_policy: Any) -> MixedPrecisionPolicy:
    """Return torch's policy for `{param_dtype: NAME, reduce_dtype: NAME}`. Raises ConfigError for any other mapping."""
    names = parse_policy(mp_policy)
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(str(names["param_dtype"])),
        reduce_dtype=_DTYPES.get(str(names["reduce_dtype"])),
    )


def _policy_of(
    module: nn.Module, policy: MixedPrecisionPolicy, *, dtype: torch.dtype | None, is_model: bool
) -> MixedPrecisionPolicy:
    """Return the policy of a module, given the type in which the model's weights are stored.

    The model itself returns that type, since a loss is computed in it. Modules with statistics keep their weights in
    it, the type of the statistics, but take inputs of the lower precision.
    """
    if policy.param_dtype in (None, dtype):
        return policy
    # Named explicitly, since versions of torch differ in their default.
    reduce_dtype = policy.reduce_dtype or dtype
    if _has_statistics(module):
        return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    output_dtype = dtype if is_model else None
    return replace(policy, reduce_dtype=reduce_dtype, output_dtype=output_dtype)


def _has_statistics(module: nn.Module) -> bool:
    """Return True for BatchNorm and its relatives with running statistics, in whose type they compute."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
