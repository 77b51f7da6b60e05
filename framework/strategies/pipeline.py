"""torch.distributed.pipelining: stages of a model, on several ranks, work on different micro-batches at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.config.topology import check_strategy_fits
from framework.distributed.context import Context
from framework.distributed.process_group import new_subgroup
from framework.distributed.sharded import set_layout
from framework.errors import ConfigError, TopologyError
from framework.monitoring.rank_status import Phase
from framework.strategies.averaging import MB, average_gradients, begin_all_reduce_mean, broadcast, broadcast_model
from framework.strategies.base import Sharding, Strategy
from framework.strategies.parameters import check_dense, check_same_change
from framework.strategies.pipeline_schedule import SCHEDULES, WindowRunner
from framework.strategies.pipeline_stages import LocalStages, drop_other_stages, split_into_stages, stage_layout
from framework.types import DataShare, MicroBatch, NumberFormats, StepOutput, Task, Window

_MICROBATCHES_PER_RANK = 4  # GPipe's rule for little idle time


@final
class Pipeline(Strategy):
    """Split the model into stages on P ranks, through which micro-batches pass by torch.distributed.pipelining.

    P = `num_stages` / `stages_per_rank`; with more ranks there are several pipelines, copies of the model, whose
    gradients are averaged. Stage s is on position s mod P of its pipeline. With R copies, rank = position · R + copy:
    ranks that average the gradients of the same stages are neighbours, since those are larger than what passes between
    stages.

    Micro-batches of a window are padded to the same size, as the schedules need. Each rank of a pipeline loads the
    same batches. The task runs on the last stage's rank, and on the others until it calls the model: it must call the
    model once, with tensors whose first dimension is the sample.

    Args:
        num_stages: null: all ranks make one pipeline.
        schedule: `gpipe` does all forwards, then all backwards; `1f1b` as few forwards ahead as keep every rank busy,
            which keeps fewer activations; `interleaved` is 1f1b with several stages on each rank.
        stages_per_rank: null: 1, interleaved 2.
        num_microbatches: How many micro-batches a batch of one copy is split into; null: 4 for each rank of a pipeline.
        bucket_cap_mb: Gradients are averaged over copies in flat tensors of at most this many MiB.

    Raises ConfigError and TopologyError for numbers that don't go together.
    """

    forward_communicates = True

    def __init__(
        self,
        *,
        context: Context,
        num_stages: int | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        num_microbatches: int | None = None,
        bucket_cap_mb: float = 25,
    ) -> None:
        check_strategy_fits("Pipeline", context.topology, backend=context.backend)
        self._schedule = schedule
        self.num_stages: int
        self.num_stages, self._ranks = _size_of(schedule, num_stages, stages_per_rank, context)
        copies = max(context.world_size // self._ranks, 1)
        self._microbatches = _MICROBATCHES_PER_RANK * self._ranks if num_microbatches is None else num_microbatches
        if self._microbatches < 1:
            raise ConfigError(f"strategy.num_microbatches={self._microbatches} is below 1.")
        self._context = context
        self._position, copy = divmod(context.rank, copies)
        self.shard_index = self._position
        self._share = DataShare(copy, copies, self._microbatches if context.world_size > 1 else 1)
        self.copies_gradients = copies > 1
        self.sharding = Sharding(self._ranks if context.world_size > 1 else 1)
        self._cap_bytes = bucket_cap_mb * MB
        self._copies_group: dist.ProcessGroup | None = None  # ranks with the same stages
        self._pipeline_group: dist.ProcessGroup | None = None
        self._local: LocalStages | None = None
        self._runner: WindowRunner | None = None

    def data_share(self, context: Context) -> DataShare:
        return self._share

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the same module without other ranks' parameters, on its device: make the optimizer after it.

        Calling it passes a batch through all stages, in evaluation only. Raises ConfigError and TargetError for a model
        that can't be split, TopologyError for a single process.
        """
        context, copies = self._context, self._share.world_size
        if context.world_size == 1:
            raise TopologyError(
                "strategy=pipeline puts the stages of a model on several processes, and there is one.\n"
                "Use topology.procs_per_node=2 or more, or strategy=single."
            )
        if copies > 1:
            check_dense(model, strategy="pipeline")
        stages = split_into_stages(model, self.num_stages)
        own = range(self._position, self.num_stages, self._ranks)
        set_layout(model, stage_layout(model, stages, own, writes=self._share.rank == 0))
        local = {index: stages[index] for index in own}
        drop_other_stages(model, local.values())
        model.to(context.device)
        pipelines = [range(copy, context.world_size, copies) for copy in range(copies)]
        self._pipeline_group = new_subgroup(pipelines, context)
        self.groups = [self._pipeline_group]
        if copies > 1:
            begins = range(0, context.world_size, copies)
            self._copies_group = new_subgroup([range(begin, begin + copies) for begin in begins], context)
            self.groups = [self._pipeline_group, self._copies_group]
            broadcast_model(model, group=self._copies_group)
        self._local = LocalStages(
            model, local, num_stages=self.num_stages, group=self._pipeline_group, device=context.device
        )
        self._runner = WindowRunner(self._local, self._schedule)
        model.forward = self._local.forward
        model.compile = self._local.compile  # type: ignore[method-assign]
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Called only by ranks with a parameter that changed in their stages.

        Raises ConfigError for a stage without a parameter to train, through which no backward would pass.
        """
        assert self._local is not None
        for index, stage in self._local.stages.items():
            if not any(parameter.requires_grad for parameter in stage.parameters()):
                raise ConfigError(
                    f"Stage {index} of {self.num_stages} has no parameter left to train, and strategy=pipeline needs "
                    "one in each.\nKeep one trained, or use fewer stages (strategy.num_stages) or another strategy."
                )
        if self._copies_group is not None:
            check_same_change(changed, self._context, group=self._copies_group)
        return model

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
        """Run forward and backward of all micro-batches; gradients are then the mean over the global batch."""
        assert self._runner is not None
        micro_batches = [MicroBatch(precision.convert_batch(each), count) for each, count in window.micro_batches]
        mark(Phase.FORWARD)
        mark(Phase.BACKWARD)  # in which one rank may wait for another
        self._share_buffers(model)
        number = -(-len(micro_batches) // self._microbatches) * self._microbatches
        scale = self._share.world_size / window.global_count
        loss: Tensor | None = None

        def weighted_loss(output: StepOutput, micro: MicroBatch) -> Tensor:
            nonlocal loss
            add(output)
            loss = output.loss.detach()
            weight = micro.num_samples * scale
            return output.loss if weight == 1.0 else output.loss * weight

        self._runner.run(micro_batches, number=number, task=task, precision=precision, weighted_loss=weighted_loss)
        if self._copies_group is not None:
            trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
            begin_mean = partial(begin_all_reduce_mean, group=self._copies_group)
            average_gradients(trained, cap_bytes=self._cap_bytes, begin_mean=begin_mean)
        return self._loss_of_last_stage(loss)

    @torch.no_grad()
    def total_norm(self, norm: Tensor) -> Tensor:
        """Return the norm of all stages' gradients, given that of this rank's. Every rank must call it."""
        dtype = torch.float32 if self._context.device.type == "mps" else torch.float64
        square = norm.to(device=self._context.device, dtype=dtype).square()
        dist.all_reduce(square, group=self._pipeline_group)
        return square.sqrt().to(norm.dtype)

    def _share_buffers(self, model: nn.Module) -> None:
        if self._copies_group is not None:
            broadcast(model.buffers(), group=self._copies_group)

    def _loss_of_last_stage(self, loss: Tensor | None) -> Tensor:
        """Return the last stage's loss on every rank of the pipeline."""
        value = torch.zeros((), device=self._context.device)
        if loss is not None:
            value.copy_(loss)
        dist.broadcast(value, group=self._pipeline_group, group_src=(self.num_stages - 1) % self._ranks)
        return value if loss is None else loss


def _size_of(schedule: str, num_stages: int | None, stages_per_rank: int | None, context: Context) -> tuple[int, int]:
    """Return the numbers of stages and of ranks of a pipeline. A single process is never refused: it may evaluate."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"strategy.schedule={schedule}: must be one of {', '.join(SCHEDULES)}.")
    has_several, world = schedule == "interleaved", context.world_size
    per_rank = (2 if has_several else 1) if stages_per_rank is None else stages_per_rank
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
        gpus = f" trainer.gpus={needed}" if context.topology.gpus_per_node else ""
        raise TopologyError(
            f"strategy.num_stages={stages} makes pipelines of {ranks} processes, and {world} processes need pipelines "
            f"of 2 or more that divide them.\nUse topology.procs_per_node={needed}{gpus}, or other stages."
        )
    return stages, ranks
