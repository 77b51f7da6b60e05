"""What `strategy=pipeline` asks of a request: the sizes of a pipeline and its schedule; see `rules`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from framework.config.schema import Precision
from framework.config.topology import Topology
from framework.errors import ConfigError, TopologyError
from framework.strategies.rules import StrategyRules, check_gpus_are_connected, check_one_device, refusals
from framework.types import DataShare

# The names of `strategy.schedule`.
GPIPE = "gpipe"
ONE_F_ONE_B = "1f1b"
INTERLEAVED = "interleaved"
_SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
# GPipe's rule for little idle time.
_MICROBATCHES_PER_RANK = 4


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


def check_several_processes(topology: Topology) -> None:
    """Raise TopologyError if a pipeline has only one process to train on."""
    if topology.world_size == 1:
        raise TopologyError(
            "strategy=pipeline puts the stages of a model on several processes, and there is one.\n"
            "Use topology.procs_per_node=2 or more, or strategy=single."
        )
