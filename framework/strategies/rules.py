"""What strategies ask of a request: checks that need neither torch nor ranks.

A strategy names its rules: `rules = PipelineRules` in its class. The command finds this in the source, and reports what
is wrong together with all other mistakes. Strategies call the same checks when they are built. What one strategy asks
is in a file beside it, such as `pipeline_rules`; here is what all have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framework.config import source
from framework.config.schema import Config, Precision
from framework.config.targets import import_target
from framework.config.topology import Topology
from framework.errors import RequestError, TopologyError
from framework.types import DataShare


@dataclass(frozen=True)
class StrategyRequest:
    """What a strategy is asked to do, as far as it is known before ranks start."""

    # The keywords that the configuration gives it.
    options: Mapping[str, Any]
    topology: Topology
    # As torch.distributed names it.
    backend: str
    precision: Precision
    # False: it may only evaluate.
    trains: bool = False


class StrategyRules:
    """What a strategy asks of a request. Inherit from it in a module that doesn't import torch, and name the class:

        class TensorParallel(framework.Strategy):
            rules = TensorParallelRules

    The attributes mean the same as those of `Strategy`.
    """

    forward_communicates: bool = False
    num_stages: int | None = None
    buffers_differ: bool = False
    replicas_differ: bool = False

    def __init__(self, request: StrategyRequest) -> None:
        self.request = request

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the request; all mistakes of a configuration are reported together."""
        return iter(())

    def data_share(self) -> DataShare:
        """Return rank 0's part of the samples. Called only if there are no mistakes."""
        return DataShare(0, self.request.topology.world_size)


def strategy_request(config: Config, topology: Topology, *, backend: str, trains: bool = False) -> StrategyRequest:
    """Return what a configuration asks of its strategy. trains: False, it may only evaluate."""
    options = {name: value for name, value in config.strategy.items() if name != "_target_"}
    return StrategyRequest(options, topology, backend, config.trainer.precision, trains)


def rules_of(target: str) -> type[StrategyRules] | None:
    """Return the rules of the strategy that `strategy._target_` names; None if its source shows none.

    Rules in the strategy's own module, which imports torch, are left to the ranks; so are those of a class that splits
    samples in another way than the base that it has its rules from.
    """
    found = source.look_up(target)
    name = source.declared(found, "rules")
    if name is None or not isinstance(found, (source.SourceClass, source.SourceFunction)):
        return None
    if name.rpartition(".")[0] == found.module.name:
        return None
    if isinstance(found, source.SourceClass):
        for owner in source.lineage(found) or ():
            if source.defines(owner, "rules"):
                break
            if source.defines(owner, "data_share"):
                return None
    rules: type[StrategyRules] = import_target(name)
    return rules


def refusals(*checks: Callable[[], object]) -> Iterator[str]:
    """Call each check, and yield the messages of those that raise RequestError."""
    for check in checks:
        try:
            check()
        except RequestError as error:
            yield str(error)
        except TypeError:
            # A value of another type than the option's: the strategy's own constructor says which.
            continue


# Rules that several strategies share


class SingleRules(StrategyRules):
    def mistakes(self) -> Iterator[str]:
        return refusals(lambda: check_one_process(self.request.topology))


class SyncedRules(StrategyRules):
    """Of strategies that average gradients."""

    @property
    def buffers_differ(self) -> bool:  # type: ignore[override]
        return not self.request.options.get("broadcast_buffers", True) and self.request.topology.world_size > 1


def check_one_process(topology: Topology) -> None:
    """Raise TopologyError if there are several processes."""
    if topology.world_size > 1:
        gpus = topology.span if topology.gpus_per_node else 0
        raise TopologyError(
            f"strategy=single is for one process, and there are {topology.world_size}.\n"
            f"Use strategy=ddp (or auto), or topology.nnodes=1 topology.procs_per_node=1 trainer.gpus={gpus}."
        )


def check_one_device(topology: Topology, *, option: str) -> None:
    """Raise TopologyError if the processes have several devices each."""
    if topology.span > 1:
        raise TopologyError(
            f"{option} needs processes of one device each, and these have {topology.span}.\n"
            "Use topology.gpus_per_process=1 topology.min_gpus_per_process=1."
        )


def check_gpus_are_connected(topology: Topology, backend: str, *, option: str) -> None:
    """Raise TopologyError for GPUs whose backend exchanges tensors by way of the CPU."""
    if topology.gpus_per_node and backend == "gloo":
        raise TopologyError(
            f"{option} sends from GPU to GPU, which backend=gloo can't.\n"
            "Use backend=nccl with a GPU for each process, or trainer.gpus=0."
        )
