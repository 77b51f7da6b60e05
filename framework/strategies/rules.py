"""What strategies ask of a request: checks that need neither torch nor ranks.

A strategy names its rules: `rules = PipelineRules` in its class. The command finds this in the source, and reports what
is wrong together with all other mistakes. Strategies call the same checks when they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from framework.config import source
from framework.config.schema import Config, Node, Precision
from framework.config.targets import import_target
from framework.config.topology import Topology
from framework.errors import ConfigError, RequestError, TopologyError
from framework.types import DataShare

# The names of `strategy.schedule`.
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
_SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
# GPipe's rule for little idle time.
_MICROBATCHES_PER_RANK = 4

# The names of `strategy.comm_hook`.
FP16_HOOK = "fp16"
BF16_HOOK = "bf16"
POWERSGD = "powersgd"
_HOOKS = (FP16_HOOK, BF16_HOOK, POWERSGD)

# The names of types in `strategy.mp_policy`.
FP32 = "fp32"
BF16 = "bf16"
FP16 = "fp16"
_DTYPES = (FP32, BF16, FP16)


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


# Callbacks


class CallbackTraits(NamedTuple):
    """What decides with which strategies a callback can go: attributes of its class."""

    # What it compares after every step with what one process has, for messages; None: nothing.
    compares_replicas: str | None
    # Its keyword that has it average buffers, which is true by default; None: it averages none.
    averages_buffers_by: str | None
    # It keeps weights of its own to evaluate: it has the hook `evaluation_weights`.
    keeps_weights: bool


class Replicas(Protocol):
    """How a strategy keeps replicas: what `Strategy` and `StrategyRules` both say."""

    @property
    def forward_communicates(self) -> bool: ...
    @property
    def num_stages(self) -> int | None: ...
    @property
    def buffers_differ(self) -> bool: ...
    @property
    def replicas_differ(self) -> bool: ...


def callback_mistakes(nodes: Mapping[str, Node], rules: StrategyRules, *, target: str) -> Iterator[str]:
    """Yield which callbacks can't go with the strategy `target`, as far as their sources show it."""
    kind = target.rpartition(".")[2]
    for name, node in nodes.items():
        found = source.look_up(node["_target_"])
        classes = source.lineage(found) if isinstance(found, source.SourceClass) else None
        if classes is None:
            continue
        traits = CallbackTraits(
            compares_replicas=source.constant(classes, "compares_replicas"),
            averages_buffers_by=source.constant(classes, "averages_buffers_by"),
            keeps_weights=any(
                source.defines(owner, "evaluation_weights") and owner.name != "framework.types.Callback"
                for owner in classes
            ),
        )
        yield from misfits(name, node, traits, rules, kind=kind)


def misfits(name: str, node: Node, traits: CallbackTraits, strategy: Replicas, *, kind: str) -> Iterator[str]:
    """Yield why the callback `name` can't go with the strategy. kind: the name of the strategy's class."""
    comparing = traits.compares_replicas
    if strategy.replicas_differ and comparing is not None:
        yield (
            f"{comparing} compares what each process has after every step with what one process has, and under "
            f"{kind} each has gradients and weights of its own between two averages.\n"
            "Compare with strategy=allreduce: everything else that depends on the number of processes is the same."
        )
    if strategy.num_stages is not None and comparing is not None:
        yield (
            f"strategy={kind.lower()} can't go with {comparing}: it compares what whole models compute, and no "
            "process has one.\nUse strategy=ddp, which gives the same weights as a pipeline."
        )
    keyword = traits.averages_buffers_by
    has_own_buffers = strategy.buffers_differ and not strategy.replicas_differ
    if has_own_buffers and keyword is not None and node.get(keyword, True):
        yield (
            f"callbacks.{name} averages buffers (BatchNorm's statistics) too, and strategy.broadcast_buffers=false "
            "leaves each process its own: a checkpoint has the first one's average, and a resumed run would "
            f"evaluate with that on all.\nUse callbacks.{name}.{keyword}=false, with which each process evaluates "
            "with the buffers it has, or strategy.broadcast_buffers=true."
        )
    if strategy.forward_communicates and traits.keeps_weights:
        yield (
            f"callbacks.{name} keeps a whole copy of the model to evaluate, and strategy={kind.lower()} leaves no "
            f"rank with a whole one.\nLeave the callback out (~callbacks.{name}), or use strategy=ddp."
        )


# Processes and their devices


def check_one_process(topology: Topology) -> None:
    """Raise TopologyError if there are several processes."""
    if topology.world_size > 1:
        gpus = topology.span if topology.gpus_per_node else 0
        raise TopologyError(
            f"strategy=single is for one process, and there are {topology.world_size}.\n"
            f"Use strategy=ddp (or auto), or topology.nnodes=1 topology.procs_per_node=1 trainer.gpus={gpus}."
        )


def check_several_processes(topology: Topology) -> None:
    """Raise TopologyError if a pipeline has only one process to train on."""
    if topology.world_size == 1:
        raise TopologyError(
            "strategy=pipeline puts the stages of a model on several processes, and there is one.\n"
            "Use topology.procs_per_node=2 or more, or strategy=single."
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


class SingleRules(StrategyRules):
    def mistakes(self) -> Iterator[str]:
        return refusals(lambda: check_one_process(self.request.topology))


# Strategies with `broadcast_buffers`


class SyncedRules(StrategyRules):
    """Of strategies that average gradients."""

    @property
    def buffers_differ(self) -> bool:  # type: ignore[override]
        return not self.request.options.get("broadcast_buffers", True) and self.request.topology.world_size > 1


class DDPRules(SyncedRules):
    def mistakes(self) -> Iterator[str]:
        request = self.request
        hook = request.options.get("comm_hook")
        return refusals(
            lambda: check_sync_batchnorm(bool(request.options.get("sync_batchnorm")), request.topology),
            lambda: check_comm_hook(hook, request.topology),
            lambda: check_powersgd_precision(hook, request.precision),
        )


class AutoRules(DDPRules):
    """With one process, the keywords of `ddp` have no effect."""

    def mistakes(self) -> Iterator[str]:
        return super().mistakes() if self.request.topology.world_size > 1 else iter(())


def check_sync_batchnorm(sync_batchnorm: bool, topology: Topology) -> None:
    """Raise ConfigError on a CPU, TopologyError for processes of several devices."""
    if not sync_batchnorm:
        return
    if topology.gpus_per_node == 0:
        raise ConfigError(
            "strategy.sync_batchnorm=true needs GPUs: PyTorch's SyncBatchNorm doesn't run on the CPU.\n"
            "Use strategy.sync_batchnorm=false, or normalise each sample by itself, as torch.nn.GroupNorm does."
        )
    check_one_device(topology, option="strategy.sync_batchnorm=true")


def parse_comm_hook(given: str | Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """Return the name of `strategy.comm_hook` and its options, which only `{powersgd: {option: value}}` may have.

    Raises ConfigError for an unknown name, and for options of another hook.
    """
    if given is None:
        return None, {}
    if isinstance(given, str) and given in _HOOKS:
        return given, {}
    if isinstance(given, str) or list(given) != [POWERSGD]:
        raise ConfigError(
            f"strategy.comm_hook={given}: use one of {', '.join(_HOOKS)}, or null; only {POWERSGD} has "
            "options, as in 'strategy.comm_hook={powersgd:{matrix_approximation_rank:2}}'."
        )
    return POWERSGD, dict(given[POWERSGD] or {})


def check_comm_hook(given: str | Mapping[str, Any] | None, topology: Topology) -> None:
    """Raise ConfigError for what isn't a hook, TopologyError for PowerSGD on processes of several devices."""
    name, _ = parse_comm_hook(given)
    if name == POWERSGD:
        check_one_device(topology, option="strategy.comm_hook=powersgd")


def check_powersgd_precision(comm_hook: str | Mapping[str, Any] | None, precision: Precision) -> None:
    """Raise ConfigError for a scaled loss with a hook that keeps errors of earlier gradients."""
    is_powersgd = comm_hook == POWERSGD or (isinstance(comm_hook, Mapping) and POWERSGD in comm_hook)
    if is_powersgd and precision == "16-mixed":
        raise ConfigError(
            f"trainer.precision={precision} scales the loss and skips a step whose gradients overflow. "
            "strategy.comm_hook=powersgd adds the errors of earlier steps to the gradients: after an overflow they "
            "would never be finite again.\n"
            "Use trainer.precision=bf16-mixed, or another strategy.comm_hook."
        )


# local_sgd


class LocalSGDRules(SyncedRules):
    @property
    def replicas_differ(self) -> bool:  # type: ignore[override]
        return self.request.topology.world_size > 1

    def mistakes(self) -> Iterator[str]:
        request = self.request
        every_n_steps = request.options.get("every_n_steps", 1)
        return refusals(
            lambda: check_exchanges(every_n_steps),
            lambda: check_own_steps(request.precision, replicas_differ=self.replicas_differ),
        )


def check_exchanges(every_n_steps: int) -> None:
    """Raise ConfigError for weights that are never averaged."""
    if every_n_steps < 1:
        raise ConfigError(f"strategy.every_n_steps={every_n_steps} must be 1 or more: steps between two averages.")


def check_own_steps(precision: Precision, *, replicas_differ: bool) -> None:
    """Raise ConfigError for a scaled loss: each rank would skip other steps."""
    if precision == "16-mixed" and replicas_differ:
        raise ConfigError(
            f"trainer.precision={precision} scales the loss and skips a step whose gradients overflow. "
            "Under strategy=local_sgd each process would skip steps of its own, and their learning rates would "
            "drift apart.\nUse trainer.precision=bf16-mixed, or another strategy."
        )


# fsdp


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


# pipeline


class PipelineRules(StrategyRules):
    forward_communicates = True

    def mistakes(self) -> Iterator[str]:
        request = self.request
        topology = request.topology
        checks: list[Callable[[], object]] = [
            lambda: check_one_device(topology, option="strategy=pipeline"),
            lambda: check_gpus_are_connected(topology, request.backend, option="strategy=pipeline"),
            # It computes the size first.
            self._microbatches,
            lambda: check_pipeline_precision(request.precision),
        ]
        # A single process may evaluate.
        if request.trains:
            checks.append(lambda: check_several_processes(topology))
        return refusals(*checks)

    @property
    def num_stages(self) -> int:  # type: ignore[override]
        return self._size().stages

    def data_share(self) -> DataShare:
        return self._size().data_share(0, self._microbatches())

    def _size(self) -> PipelineSize:
        options = self.request.options
        return pipeline_size(
            schedule=options.get("schedule", ONE_F_ONE_B),
            num_stages=options.get("num_stages"),
            stages_per_rank=options.get("stages_per_rank"),
            topology=self.request.topology,
        )

    def _microbatches(self) -> int:
        return resolve_microbatches(self.request.options.get("num_microbatches"), ranks=self._size().ranks)


@dataclass(frozen=True)
class PipelineSize:
    """The stages and ranks of a pipeline, and its copies."""

    stages: int
    ranks: int
    world_size: int

    @property
    def copies(self) -> int:
        return max(self.world_size // self.ranks, 1)

    def data_share(self, copy: int, microbatches: int) -> DataShare:
        """Return the samples of a copy of the model; one process alone doesn't cut its batches."""
        return DataShare(copy, self.copies, microbatches if self.world_size > 1 else 1)


def pipeline_size(
    *, schedule: str, num_stages: int | None, stages_per_rank: int | None, topology: Topology
) -> PipelineSize:
    """Return the size of a pipeline. A single process is never refused: it may evaluate.

    Raises ConfigError and TopologyError for numbers that don't go together.
    """
    if schedule not in _SCHEDULES:
        raise ConfigError(f"strategy.schedule={schedule}: must be one of {', '.join(_SCHEDULES)}.")
    world = topology.world_size
    has_several = schedule == INTERLEAVED
    per_rank = stages_per_rank
    if per_rank is None:
        per_rank = 2 if has_several else 1
    if per_rank < 1 or (per_rank > 1) is not has_several:
        raise ConfigError(
            f"strategy.stages_per_rank={per_rank}: schedule=interleaved has 2 or more stages on each rank, the others "
            "1."
        )
    stages = per_rank * world if num_stages is None else num_stages
    ranks, rest = divmod(stages, per_rank)
    if ranks < 1 or rest:
        raise ConfigError(f"strategy.num_stages={stages} isn't a multiple of strategy.stages_per_rank={per_rank}.")
    if world > 1 and (ranks == 1 or world % ranks):
        needed = max(ranks, 2)
        gpus = f" trainer.gpus={needed}" if topology.gpus_per_node else ""
        raise TopologyError(
            f"strategy.num_stages={stages} makes pipelines of {ranks} processes, and {world} processes need pipelines "
            f"of 2 or more that divide them.\nUse topology.procs_per_node={needed}{gpus}, or other stages."
        )
    return PipelineSize(stages, ranks, world)


def resolve_microbatches(given: int | None, *, ranks: int) -> int:
    """Return into how many micro-batches a batch is split. Raises ConfigError for less than 1."""
    if given is None:
        return _MICROBATCHES_PER_RANK * ranks
    if given < 1:
        raise ConfigError(f"strategy.num_microbatches={given} is below 1.")
    return given


def check_pipeline_precision(precision: Precision) -> None:
    """Raise ConfigError for a scaled loss."""
    if precision == "16-mixed":
        raise ConfigError(
            "strategy=pipeline can't go with trainer.precision=16-mixed: each stage would decide by itself to skip "
            "a step that overflows. Use trainer.precision=bf16-mixed."
        )
