"""A model cut into stages, each on a rank of its own, that work on different micro-batches at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.context import Context
from framework.distributed.group import group_of_mine
from framework.distributed.stages import set_layout
from framework.errors import ConfigError, TopologyError
from framework.pulse import Phase
from framework.strategies.buckets import Bucket, by_kind, cap_in_bytes
from framework.strategies.buffers import begin_alike, broadcast
from framework.strategies.relay import Relay
from framework.strategies.schedules import Schedule, Schedules
from framework.strategies.stages import cut, keep, layout
from framework.strategies.trained import check_dense, check_same_change, trained
from framework.topology import check_strategy_fits
from framework.types import Batch, DataShare, MicroBatch, NumberFormats, Sharding, StepOutput, Task, Window

_NOTHING: AbstractContextManager[Any] = nullcontext()
_FOR_EACH_RANK = 4  # micro-batches: GPipe's rule for devices that are seldom idle


@final
class Pipeline:
    """Stages of one model on `num_stages` / `stages_per_rank` ranks, with micro-batches passing through them by
    torch.distributed.pipelining; and as many copies of that as there are ranks for, whose gradients are averaged.

    Stage s is on place s mod P of its pipeline, P = the ranks of one. With R copies, rank = place · R + copy: ranks
    that exchange the gradients of the same stages are neighbours, as those are more than what passes between stages.

    num_stages: null: all ranks make one pipeline. schedule: `gpipe` does all forwards, then all backwards; `1f1b` as
    few forwards ahead as keep every rank busy, so that less is kept for backward; `interleaved` is 1f1b with several
    stages on each rank. stages_per_rank: null: 1, interleaved 2. num_microbatches: into how many a batch of one copy
    is cut; null: 4 for each rank of a pipeline. bucket_cap_mb: gradients are averaged over copies in flat tensors of
    at most so many MiB.

    Micro-batches of a window are filled up to the same size with rows whose results are left out, as the schedules
    want equal ones. Each rank of a pipeline loads the same batches. The task runs on the last stage's ranks, and before
    the model is called on the others: it must call the model once, with tensors whose first dimension is the sample.

    Raises ConfigError and TopologyError for numbers that don't go together.
    """

    forward_communicates = True

    def __init__(
        self,
        *,
        context: Context,
        num_stages: int | None = None,
        schedule: str = Schedule.ONE_F_ONE_B.value,
        stages_per_rank: int | None = None,
        num_microbatches: int | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        check_strategy_fits("Pipeline", context.topology, backend=context.backend)
        self._schedule = _known(schedule)
        each = _per_rank(stages_per_rank, self._schedule)
        self.num_stages = each * context.world_size if num_stages is None else num_stages
        self._places = _ranks_of_one(self.num_stages, each=each, context=context)
        copies = max(context.world_size // self._places, 1)
        cuts = _FOR_EACH_RANK * self._places if num_microbatches is None else num_microbatches
        self._cuts = _enough(cuts, self._schedule, ranks=self._places)
        self._context = context
        self._place, copy = divmod(context.rank, copies)
        self.part = self._place
        self.data_share = DataShare(copy, copies, cuts if context.world_size > 1 else 1)
        self.copies_gradients = copies > 1
        self.sharding = Sharding(self._places if context.world_size > 1 else 1)
        self.groups: list[dist.ProcessGroup] = []
        self._cap_bytes = cap_in_bytes(bucket_cap_mb)
        self._buckets: list[Bucket] = []
        self._peers: dist.ProcessGroup | None = None  # with the same stages
        self._line: dist.ProcessGroup | None = None  # of the other stages
        self._relay: Relay | None = None
        self._schedules: Schedules | None = None

    def wrap(self, model: nn.Module) -> nn.Module:
        """The same module without what other ranks have, on its device: make the optimizer after it.

        Called, it passes a batch through all stages, in evaluation only. Raises ConfigError and TargetError for one
        that can't be cut, TopologyError for a single process.
        """
        context, copies = self._context, self.data_share.world_size
        if context.world_size == 1:
            raise TopologyError(
                "strategy=pipeline puts the stages of a model on several processes, and there is one.\n"
                "Use topology.procs_per_node=2 or more, or strategy=single."
            )
        if copies > 1:
            check_dense(model, strategy="pipeline")
        stages = cut(model, self.num_stages)
        own = range(self._place, self.num_stages, self._places)
        set_layout(model, layout(model, stages, own, writes=self.data_share.rank == 0))
        mine = {index: stages[index] for index in own}
        keep(model, mine.values())
        model.to(context.device)
        self._line = group_of_mine([range(copy, context.world_size, copies) for copy in range(copies)], context)
        self.groups = [self._line]
        if copies > 1:
            begins = range(0, context.world_size, copies)
            self._peers = group_of_mine([range(begin, begin + copies) for begin in begins], context)
            self.groups.append(self._peers)
            begin_alike(model, group=self._peers)
            self._lay_out(model)
        self._relay = Relay(model, mine, num_stages=self.num_stages, group=self._line, device=context.device)
        self._schedules = Schedules(self._relay, self._schedule)
        model.forward = self._relay.forward
        model.compile = self._relay.compile  # type: ignore[method-assign]
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Called only by ranks with a parameter that changed in their stages.

        Raises ConfigError for a stage without a parameter to train: backward wouldn't pass through it.
        """
        assert self._relay is not None
        for index, stage in self._relay.stages.items():
            if not any(parameter.requires_grad for parameter in stage.parameters()):
                raise ConfigError(
                    f"Stage {index} of {self.num_stages} has no parameter left to train, and strategy=pipeline needs "
                    "one in each.\nKeep one trained, or use fewer stages (strategy.num_stages) or another strategy."
                )
        if self._peers is not None:
            check_same_change(changed, self._context, group=self._peers)
            check_dense(model, strategy="pipeline")
            self._lay_out(model)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Nothing: `run_window` does it all."""
        return _NOTHING

    def before_evaluation(self, model: nn.Module) -> None:
        """Give all copies the first one's buffers."""
        self._share_buffers(model)

    def run_window(
        self,
        model: nn.Module,
        window: Window,
        *,
        task: Task,
        precision: NumberFormats,
        add: Callable[[StepOutput], None],
        mark: Callable[[Phase], None],
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients are then the mean over the global batch."""
        assert self._schedules is not None
        micro_batches = [MicroBatch(precision.convert_batch(each), count) for each, count in window.micro_batches]
        mark(Phase.FORWARD)
        mark(Phase.BACKWARD)  # in which one rank may wait for another
        self._share_buffers(model)
        number = -(-len(micro_batches) // self._cuts) * self._cuts
        scale = self.data_share.world_size / window.global_count
        loss: Tensor | None = None

        def weighed(output_of: Callable[[Batch], StepOutput], micro: MicroBatch) -> Tensor:
            nonlocal loss
            output = output_of(micro.batch)
            add(output)
            loss = output.loss.detach()
            weight = micro.num_samples * scale
            return output.loss if weight == 1.0 else output.loss * weight

        self._schedules.run(micro_batches, number=number, task=task, precision=precision, weighed=weighed)
        self._average()
        return self._told(loss)

    @torch.no_grad()
    def total_norm(self, norm: Tensor) -> Tensor:
        """Of the norm of this rank's gradients that of all stages'. Every rank must call it."""
        dtype = torch.float32 if self._context.device.type == "mps" else torch.float64
        square = norm.to(device=self._context.device, dtype=dtype).square()
        dist.all_reduce(square, group=self._line)
        return square.sqrt().to(norm.dtype)

    def _lay_out(self, model: nn.Module) -> None:
        parameters = trained(model, strategy="pipeline")
        self._buckets = [Bucket(group) for group in by_kind(parameters, cap_bytes=self._cap_bytes)]

    def _average(self) -> None:
        """The mean over copies in the place of every gradient."""
        begun = []
        for bucket in self._buckets:
            bucket.fill()
            bucket.flat.div_(self.data_share.world_size)
            begun.append(dist.all_reduce(bucket.flat, group=self._peers, async_op=True))
        for bucket, work in zip(self._buckets, begun, strict=True):
            assert work is not None
            work.wait()
            bucket.hand_out()

    def _told(self, loss: Tensor | None) -> Tensor:
        """The last stage's loss on every rank of the pipeline."""
        told = torch.zeros((), device=self._context.device)
        if loss is not None:
            told.copy_(loss)
        last = (self.num_stages - 1) % self._places
        dist.broadcast(told, group=self._line, group_src=last)
        return told if loss is None else loss

    def _share_buffers(self, model: nn.Module) -> None:
        """The first copy's to all copies."""
        if self._peers is not None:
            broadcast(model.buffers(), group=self._peers)


def _known(name: str) -> Schedule:
    try:
        return Schedule(name)
    except ValueError:
        raise ConfigError(
            f"strategy.schedule={name}: must be one of {', '.join(each.value for each in Schedule)}."
        ) from None


def _per_rank(given: int | None, schedule: Schedule) -> int:
    several = schedule is Schedule.INTERLEAVED
    each = (2 if several else 1) if given is None else given
    if several and each < 2:
        raise ConfigError(
            f"strategy.stages_per_rank={each}: schedule=interleaved wants 2 or more stages on each rank.\n"
            "Use strategy.schedule=1f1b for one."
        )
    if not several and each != 1:
        raise ConfigError(
            f"strategy.stages_per_rank={each}: schedule={schedule.value} has one stage on each rank.\n"
            "Use strategy.schedule=interleaved for several."
        )
    return each


def _ranks_of_one(num_stages: int, *, each: int, context: Context) -> int:
    """How many ranks make one pipeline. One process, which may only evaluate, is never refused."""
    ranks, rest = divmod(num_stages, each)
    if ranks < 1 or rest:
        raise ConfigError(f"strategy.num_stages={num_stages} isn't a multiple of strategy.stages_per_rank={each}.")
    if context.world_size > 1 and ranks == 1:
        raise ConfigError(
            f"strategy.num_stages={num_stages} puts the whole model on one process. Use strategy=ddp for that, or more "
            "stages."
        )
    if context.world_size > 1 and context.world_size % ranks:
        gpus = f" trainer.gpus={ranks}" if context.topology.gpus_per_node else ""
        raise TopologyError(
            f"strategy.num_stages={num_stages} takes {ranks} processes for one pipeline, and {context.world_size} "
            f"aren't a multiple of that.\nUse topology.procs_per_node={ranks}{gpus}, or other stages."
        )
    return ranks


def _enough(number: int, schedule: Schedule, *, ranks: int) -> int:
    if number < 1:
        raise ConfigError(f"strategy.num_microbatches={number} is below 1.")
    if schedule is not Schedule.GPIPE and number < ranks:
        raise ConfigError(
            f"strategy.num_microbatches={number}: schedule={schedule.value} wants one for each of the {ranks} ranks of "
            f"a pipeline, or more.\nUse strategy.num_microbatches={ranks * _FOR_EACH_RANK}, or schedule=gpipe."
        )
    if schedule is Schedule.INTERLEAVED and number % ranks:
        raise ConfigError(
            f"strategy.num_microbatches={number}: schedule=interleaved wants a multiple of the {ranks} ranks of a "
            f"pipeline.\nUse strategy.num_microbatches={-(-number // ranks) * ranks}."
        )
    return number
