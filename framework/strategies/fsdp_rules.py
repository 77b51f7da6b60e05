"""What `strategy=fsdp` asks of a request: its degree of sharding, offloading, `strategy.mp_policy`; see `rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from framework.config.schema import Precision
from framework.config.topology import Topology
from framework.errors import ConfigError, TopologyError
from framework.strategies.rules import SyncedRules, check_gpus_are_connected, check_one_device, refusals

# The names of types in `strategy.mp_policy`.
FP32 = "fp32"
BF16 = "bf16"
FP16 = "fp16"
_DTYPES = (FP32, BF16, FP16)


class FSDPRules(SyncedRules):
    forward_communicates = True

    def mistakes(self) -> Iterator[str]:
        request = self.request
        options = request.options
        degree = options.get("data_parallel_shard_degree")
        policy = options.get("mp_policy")
        return refusals(
            lambda: check_one_device(request.topology, option="strategy=fsdp"),
            lambda: check_gpus_are_connected(request.topology, request.backend, option="strategy=fsdp"),
            lambda: check_offload(bool(options.get("cpu_offload")), degree, request.topology),
            lambda: check_policy(policy, request.precision),
        )


def shard_degree(given: int | str | None, topology: Topology) -> int:
    """Return over how many ranks a copy is sharded. Raises TopologyError for a degree that doesn't divide them."""
    world = topology.world_size
    if given is None or world == 1:
        return world
    if given == "auto":
        return topology.procs_per_node
    if type(given) is not int or given < 1 or world % given:
        divisors = ", ".join(str(number) for number in range(1, world + 1) if world % number == 0)
        raise TopologyError(
            f"strategy.data_parallel_shard_degree={given} doesn't divide the {world} processes into copies of the "
            f"model.\nUse one of {divisors}; auto, for those of a node; or null, for one copy over all."
        )
    return given


def check_offload(cpu_offload: bool, degree: int | str | None, topology: Topology) -> None:
    """Raise TopologyError for a degree that doesn't divide the ranks, ConfigError if shards can't be offloaded."""
    num_shards = shard_degree(degree, topology)
    if cpu_offload and (not topology.gpus_per_node or num_shards < topology.world_size):
        raise ConfigError(
            "strategy.cpu_offload=true is for GPUs, and for one copy of the model over all processes.\n"
            "Use strategy.cpu_offload=false, or strategy.data_parallel_shard_degree=null on GPUs."
        )


def parse_policy(given: Any) -> dict[str, str | None]:
    """Return the names of `param_dtype` and `reduce_dtype`. Raises ConfigError for another key or name."""
    keys = ("param_dtype", "reduce_dtype")
    policy = {} if given is None else given
    is_known = isinstance(policy, Mapping) and all(
        key in keys and name in (None, *_DTYPES) for key, name in policy.items()
    )
    if not is_known:
        raise ConfigError(
            f"strategy.mp_policy={given}: it has param_dtype and reduce_dtype, each one of {', '.join(_DTYPES)}, or "
            "null."
        )
    return {key: policy.get(key) for key in keys}


def check_policy(given: Any, precision: Precision) -> None:
    """Raise ConfigError for what is no policy, and for fp16 without a loss scaler."""
    if FP16 in parse_policy(given).values() and precision != "16-mixed":
        raise ConfigError(
            f"strategy.mp_policy: fp16 can't go with trainer.precision={precision}. Without a loss scaler, "
            "small gradients become 0.\nUse bf16, or trainer.precision=16-mixed."
        )
