"""The training loop. Start reading at `Trainer.fit`.

    for window in windows:                      # this rank's part of one global batch
        loss = train_step(window)               #   forward, backward, clip, step, schedule
        call the observers
        log          every log_every_n_steps    #   one reduction over ranks, one wait for the device
        evaluate     when due                   #   every validation sample once
        save         when due                   #   a copy of the state; a thread writes it
        stop         once the ranks agree to    #   asked for by a callback or a signal

The loop calls what it needs by name; callbacks and loggers observe. A step doesn't wait for the device, talk to other
ranks (except through the strategy) or format text. It marks its phases for the monitor, at 0.1 µs each.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, final

from torch import Tensor
from torch.optim import Optimizer

from framework.checkpoint.manager import CheckpointManager
from framework.config.schema import CUDA_GRAPH_MODES, TrainerConfig
from framework.data.loader import EvalLoader
from framework.data.skipping import NO_STEPS, SkippedSamples, SkippedSteps, ignore_skipped
from framework.data.source import SourceLoader
from framework.distributed.collectives import any_over_ranks, gather_to_all
from framework.errors import ConfigError, DiskError, NotFiniteError
from framework.launch.plan import MonitorLink
from framework.monitoring.rank_status import RankPhase
from framework.optim.clipping import clip_gradients
from framework.optim.optimizer import Closure
from framework.strategies.base import NO_CONTEXT, Strategy
from framework.training.batch_info import BatchInfos
from framework.training.batchnorm import batchnorm_statistics
from framework.training.broadcasting import refused_broadcasting
from framework.training.closure_steps import ClosureSteps
from framework.training.evaluation import eager
from framework.training.flops import FlopRate, peak_of_run
from framework.training.length import Start, start_of, total_steps
from framework.training.logbook import Actions, Logbook
from framework.training.loss_weights import OneRankWeights, loss_weights
from framework.training.meter import check_finite
from framework.training.source_batches import SourceBatches
from framework.training.step_output import check_output, copied
from framework.training.step_times import Clock, StepTimer, clock_of
from framework.training.stop_control import steps_to_meeting
from framework.training.task_steps import TaskSteps
from framework.training.train_state import TrainState
from framework.types import (
    Batch,
    BatchInfo,
    EpochInfo,
    EvalInfo,
    FitInfo,
    Log,
    MicroBatch,
    MicroBatchInfo,
    Objective,
    Passed,
    Span,
    StepInfo,
    StepOutput,
    Stop,
    Task,
    Window,
    hooks,
)

MakeStep = Callable[[Window], Tensor]
"""As `Trainer.train_step`."""


class _Hooks(NamedTuple):
    """The hooks that callbacks, the task and loggers define, of those that are called in every step or epoch."""

    epoch_start: Sequence[Callable[[EpochInfo], Stop | Log | None]] = ()
    micro_batch_start: Sequence[Callable[[MicroBatchInfo], None]] = ()
    micro_batch_output: Sequence[Callable[[StepOutput], None]] = ()
    before_optimizer_step: Sequence[Callable[[Any], None]] = ()
    gradient_norm: Sequence[Callable[[Tensor, str], bool]] = ()
    step_end: Sequence[Callable[[StepInfo], Stop | Log | None]] = ()
    epoch_end: Sequence[Callable[[EpochInfo], Stop | Log | None]] = ()


def _takers_of_info(objectives: Iterable[Objective]) -> set[str]:
    """Return the names of the objectives whose step has a parameter `info`."""
    return {objective.name for objective in objectives if "info" in signature(objective.step).parameters}


@final
class Trainer:
    """Train one replica on one rank. Every rank makes one and calls `fit`.

    Args:
        skipped_steps: the steps whose samples the loader passes over.
        on_skipped: called with the samples of each of them.
        after_first_step: called once, when the slow first step is done.
        after_validation: called with the metrics of each validation; raises if a monitored one is missing.
        check_run_dir: called before anything is logged or saved; raises if the run directory is gone.
        link: the connection to the monitor, which sees the phases of this rank.
        counts_flops: log the model's FLOP/s, if they can be counted.
        clock: times the phases of a step; None for the device's own.
    """

    def __init__(
        self,
        state: TrainState,
        settings: TrainerConfig,
        *,
        val_loaders: Mapping[str, EvalLoader],
        checkpoints: CheckpointManager | None,
        skipped_steps: SkippedSteps = NO_STEPS,
        on_skipped: Callable[[Sequence[SkippedSamples]], None] = ignore_skipped,
        after_first_step: Callable[[], None],
        after_validation: Callable[[EvalInfo], None],
        check_run_dir: Callable[[], None],
        link: MonitorLink,
        counts_flops: bool = False,
        clock: Clock | None = None,
    ) -> None:
        # What a trainer is made of: the state of the run, what validates it, what saves it, and whom it tells.
        self.state = state
        self.settings = settings
        self.val_loaders = val_loaders
        self.checkpoints = checkpoints
        self.check_run_dir = check_run_dir
        self.skipped_steps = skipped_steps
        self.on_skipped = on_skipped
        self._after_first_step = after_first_step
        self._after_validation = after_validation

        # Parts of the state that are used often.
        self.context = state.context
        self.progress = state.progress
        self.stop = state.stop
        self.train_loader = state.train_loader

        # What is known later, or changes while training.
        # Optimizer steps that were done when `fit` was called: more than 0 in a resumed run.
        self.start_step = 0
        # Set by `engine.restore` when it resumes a run; `fit` calls it after the start hooks, which may draw numbers.
        self.restore_generators: Callable[[], object] | None = None
        # Filled by `fit`.
        self._hooks = _Hooks()
        # The step of the checkpoint that was saved or loaded last.
        self._saved_step: int | None = None
        # True if a checkpoint is due by the clock. Those due by steps or epochs aren't noted here.
        self._timed_save_is_due = False
        # False after an update that the scaler has skipped because gradients overflowed.
        self._has_stepped = True

        # What the task computes in a step.
        # A task with a single loss is treated as one objective without a name.
        self._only_objective: tuple[Objective, ...] = ()
        if state.objectives is None:
            self._only_objective = (Objective(name="", step=state.task.training_step, optimizer=""),)
        objectives = self._only_objective if state.objectives is None else state.objectives.all
        self._objectives_with_info = _takers_of_info(objectives)
        self._has_slots = bool(state.slots)
        # CUDA graphs write the outputs of every step to the same memory.
        self._overwrites_outputs = settings.compile in CUDA_GRAPH_MODES and state.context.device.type == "cuda"
        if state.precision.scaler.is_enabled():
            # The scaler skips steps whose gradients overflow. This notes those that it makes.
            state.optimizer.register_step_post_hook(self._note_optimizer_step)

        # How the strategy splits a step over ranks.
        strategy = state.strategy
        # A strategy that overrides `run_window`, as pipelines do, makes the forward and backward passes itself.
        self._runs_windows = type(strategy).run_window is not Strategy.run_window
        # Parts that a global batch is split into, one for each copy of the model.
        self._num_shares = strategy.data_share(state.context).world_size
        # Of ranks that train on the same samples, only one counts them in means and weights. A strategy that runs
        # windows gives each output to one rank anyway.
        self._counts_outputs = self._runs_windows or state.speaks_for_share
        self._loss_weights = loss_weights(
            state.context,
            strategy=strategy,
            task=state.task,
            may_drop=self.train_loader.collates,
            counts=self._counts_outputs,
        )

        # What is measured and logged.
        if clock is None:
            clock = clock_of(state.context.device)
        self._timer = StepTimer(link.rank_status, clock=clock, every=settings.log_every_n_steps)
        self.train_loader.observe_waiting(self._timer)
        self._batch_infos = BatchInfos(
            state.context, strategy=strategy, plan=self.train_loader.plan, waiting=self._timer
        )
        if isinstance(self.train_loader, SourceLoader):
            self.train_loader.connect(SourceBatches(state, self.train_loader, self._batch_infos))
        # FLOPs are counted once, for one step on a copy of the model. That doesn't work for a model spread over ranks,
        # which can't be copied, nor with several objectives, whose steps differ.
        is_spread = self._runs_windows or strategy.forward_communicates
        is_counted = counts_flops and not is_spread and state.objectives is None
        self._flops = FlopRate(peak_of_run(state.context, settings.precision), is_wanted=is_counted)
        self.logbook = Logbook(state, settings, timer=self._timer, flops=self._flops)

        # What `fit` calls to make a step; see `wrap_steps`.
        self._make_step: MakeStep = self.train_step
        # What makes the whole step, if the trainer doesn't: the strategy, a task with a `run_step`, or the optimizer.
        self._run_whole_step: Callable[[Window], Tensor] | None = None
        self._task_steps: TaskSteps | None = None
        if self._runs_windows:
            self._run_whole_step = self._run_window
        for run_step in hooks([state.task], "run_step"):
            self._task_steps = self._make_task_steps()
            self._run_whole_step = partial(run_step, tools=self._task_steps)

        if state.closure is not Closure.NONE:
            self._task_steps = self._make_task_steps()
            begins_with_gradients = state.closure is Closure.AFTER_GRADIENTS
            steps = ClosureSteps(state, settings, tools=self._task_steps, begins_with_gradients=begins_with_gradients)
            self._run_whole_step = steps.run

    def _make_task_steps(self) -> TaskSteps:
        """Return what a task needs that runs its steps itself. Raises ConfigError if the strategy does that, too."""
        if self._runs_windows:
            raise ConfigError(
                f"{type(self.state.task).__name__} runs its steps itself, and so does the strategy "
                f"{type(self.state.strategy).__name__}. Use strategy=ddp, allreduce or fsdp."
            )
        return TaskSteps(
            self.state,
            self.settings,
            timer=self._timer,
            logbook=self.logbook,
            weights=self._loss_weights,
            compute=partial(self._forward, objective=self._only_objective[0]),
            before_optimizer_step=self._call_before_optimizer_step,
            before_micro_batch=partial(self._call_before_micro_batch, objective=self._only_objective[0]),
            after_output=self._call_after_output,
            isolate=self._isolate_stand_in,
            num_shares=self._num_shares,
            counts=self._counts_outputs,
        )

    # The loop

    @refused_broadcasting()
    def fit(self) -> None:
        """Train from `progress` to the limits of the settings or an agreed stop, and save what is left.

        Raises RunError when the loss is no longer finite; passes on what a task, model or callback raises.
        """
        state = self.state
        progress = self.progress
        self._prepare()
        self._timer.set_phase(RankPhase.DATA)
        for window in self._windows():
            # Of this step: `progress` goes on to the next epoch after the last step of one.
            epoch = progress.epoch
            if window.passed is not None:
                self._note_passed(window.passed)
            if window.global_count == 0:
                self._end_epoch_without_step(window)
                continue
            number = progress.number_of(window)
            loss = self._make_step(window)

            self.logbook.throughput.samples += window.global_count
            progress.advance(window, global_batch_size=self.train_loader.global_batch_size)
            self._timer.finish_step(progress.step)
            info = StepInfo(
                progress.step, epoch, loss, window.global_count, window.indices, window.epoch_end, number=number
            )
            for hook in self._hooks.step_end:
                answer = hook(info)
                if answer is not None:
                    self._handle_answer(answer, hook)
            is_first_step = progress.step == self.start_step + 1
            if is_first_step:
                state.trainable.check_all_known(state.bare_model)
                self._after_first_step()

            if self.logbook.is_due(progress.step):
                self.log()
            if window.epoch_end:
                state.schedule.step_after("epoch")
                self._timer.leave_step(RankPhase.LOGGING)
                # A callback may have asked to stop since the last log.
                self.stop.agree()
            if self._evaluation_is_due(window):
                self.evaluate()
            if window.epoch_end:
                self._end_epoch(epoch)
            if self._save_is_due(epoch_end=window.epoch_end):
                self.save()
            if self.stop.request.pending:
                self._stop_on_request()
            self._timer.set_phase(RankPhase.DATA)
        self._finish()

    def _windows(self) -> Iterator[Window]:
        """Yield this rank's windows from `progress` on, epoch after epoch. `fit` advances `progress` between them."""
        while not self._is_done():
            # In the middle of an epoch, a run has been resumed: `_repeat_epoch_start` has called these hooks.
            is_new_epoch = self.progress.samples == 0
            if is_new_epoch:
                self._timer.leave_step(RankPhase.LOGGING)
                self._call_epoch_hooks(self._hooks.epoch_start, epoch=self.progress.epoch)
                self._timer.set_phase(RankPhase.DATA)
                # A hook may have asked to stop.
                if self._is_done():
                    return
            progress = self.progress
            skips = self.skipped_steps.from_number(progress.next_number, late=progress.deferred)
            for window in self.train_loader.epoch(progress.epoch, start=progress.samples, skips=skips):
                yield window
                if self._is_done():
                    return

    def _note_passed(self, passed: Passed) -> None:
        """Report the samples that the loader has passed over before a window, and after the epoch's last."""
        number = self.progress.next_number
        skipped = []
        for span in sorted((*passed.dropped, *passed.deferred)):
            skipped.append(self._skipped_samples(span, number=number, is_deferred=span in passed.deferred))
            number += 1
        for span in passed.after:
            # The window itself comes before.
            number += 1
            skipped.append(self._skipped_samples(span, number=number, is_deferred=False))
        if skipped:
            self.on_skipped(skipped)

    def _skipped_samples(self, span: Span, *, number: int, is_deferred: bool) -> SkippedSamples:
        indices = self.train_loader.indices_at(span)
        return SkippedSamples(
            number,
            epoch=self.progress.epoch,
            positions=span,
            indices=None if indices is None else tuple(indices.tolist()),
            is_deferred=is_deferred,
        )

    def _end_epoch_without_step(self, window: Window) -> None:
        """End an epoch of which all that was left is passed over."""
        epoch = self.progress.epoch
        self.progress.advance(window, global_batch_size=self.train_loader.global_batch_size)
        self.state.schedule.step_after("epoch")
        self._timer.leave_step(RankPhase.LOGGING)
        self.stop.agree()
        if self._evaluation_is_due(window):
            self.evaluate()
        self._end_epoch(epoch)
        self._timer.set_phase(RankPhase.DATA)

    def _is_done(self) -> bool:
        settings = self.settings
        progress = self.progress
        return (
            self.stop.should_stop
            or (settings.max_steps is not None and progress.step >= settings.max_steps)
            or (settings.max_epochs is not None and progress.epoch >= settings.max_epochs)
        )

    def _evaluation_is_due(self, window: Window) -> bool:
        """Return True if a validation is due after this window."""
        epoch_end = window.epoch_end
        interval = self.settings.val_check_interval
        if isinstance(interval, int):
            return self.progress.step % interval == 0
        every_epochs = self.settings.check_val_every_n_epoch
        if interval is None:
            return epoch_end and every_epochs is not None and (self.progress.last_epoch + 1) % every_epochs == 0
        dropped = 0
        if window.passed is not None:
            dropped = len(window.passed.dropped)
        return self._share_is_due(interval, epoch_end=epoch_end, dropped=dropped)

    def _share_is_due(self, share: float, *, epoch_end: bool, dropped: int) -> bool:
        """Return True if a validation is due that is repeated whenever this share of the epoch is trained.

        dropped: steps that were left out right before the last one.
        """
        steps = self.train_loader.steps
        every_epochs = self.settings.check_val_every_n_epoch
        epoch = self.progress.last_epoch
        assert steps is not None, "check_streams refuses a share of a stream"
        assert every_epochs is not None, "the configuration was checked"
        if (epoch + 1) % every_epochs != 0:
            return False
        done = steps.of(epoch) if epoch_end else steps.done(self.progress.nominal_samples)
        # It may have become due with one of the steps that were left out.
        return done % steps.share(epoch, share) <= dropped

    def _save_is_due(self, *, epoch_end: bool) -> bool:
        checkpoints = self.checkpoints
        if checkpoints is None:
            return False
        # Checkpoints that are ranked by a metric are saved after each validation.
        is_ranked = checkpoints.monitor is not None and self.state.val_step == self.progress.step
        by_epoch = epoch_end and checkpoints.due_epoch(self.progress.last_epoch)
        return is_ranked or by_epoch or self._timed_save_is_due or checkpoints.due_step(self.progress.step)

    # One step

    def train_step(self, window: Window) -> Tensor:
        """Train on this rank's part of one global batch; return the detached loss of the last micro-batch.

        This is one optimizer step, or one for each objective of a task that has several. Each mean loss is multiplied
        by the micro-batch's part of the global batch. It is also multiplied by the number of data shares, because
        strategies average gradients over these.
        """
        state = self.state
        if state.trainable.has_changed():
            self._update_trainable()
        if self._run_whole_step is not None:
            return self._run_whole_step(window)

        mark = self._timer.set_phase
        scale = self._num_shares / window.global_count
        objectives = self._only_objective
        if state.objectives is not None:
            objectives = state.objectives.due(self.progress.step)
        micro_batches: Iterable[MicroBatch] = window.micro_batches
        if len(objectives) > 1:
            # An iterator, and each objective is computed on all of it.
            micro_batches = list(micro_batches)
        for objective in objectives:
            for position, micro in enumerate(micro_batches, start=1):
                is_last = position == window.num_micro_batches
                mark(RankPhase.FORWARD)
                with self._isolate_stand_in(micro), state.strategy.accumulate(state.model, synchronise=is_last):
                    output = self._forward(micro, objective=objective, window=window, index=position - 1)
                    loss = self._loss_weights.weighted(
                        output,
                        num_samples=micro.num_samples,
                        scale=scale,
                        objective=objective.name,
                        is_only=window.num_micro_batches == 1,
                    )
                    if is_last:
                        # Ranks sum their weights while the backward runs.
                        self._loss_weights.begin_sum(objective.name)
                    mark(RankPhase.BACKWARD)
                    state.precision.scaler.scale(loss).backward()
                has_samples = micro.num_samples > 0 and output.num_samples
                if has_samples and self._counts_outputs:
                    state.meter.add(output, step=self.progress.step + 1, objective=objective.name)
                # The next micro-batch is loaded.
                mark(RankPhase.DATA)

            if window.first_rank is not None:
                # Rank 0 may have had no sample, so its buffers may lack this step.
                state.strategy.broadcast_buffers(state.model, source=window.first_rank)
            self._update(objective, global_count=window.global_count)
        state.strategy.after_update(state.model)
        return output.loss.detach()

    def _isolate_stand_in(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        """Return the context in which the forward and backward of a micro-batch run.

        A rank that has no sample left computes with a stand-in, whose loss has weight 0, to take part in the exchange
        of gradients. The context then undoes all other changes, as to BatchNorm's statistics.
        """
        if micro.num_samples:
            return NO_CONTEXT
        return self.state.without_side_effects()

    def _forward(self, micro: MicroBatch, *, objective: Objective, window: Window, index: int) -> StepOutput:
        """Return what the task computes from a micro-batch. index: in its window, from 0."""
        state = self.state
        keywords = {}
        if objective.name in self._objectives_with_info:
            progress = self.progress
            keywords["info"] = self._batch_infos.of(window, index=index, step=progress.step, epoch=progress.epoch)
        if self._has_slots:
            state.slots.begin_micro_batch(window, index)
        with state.precision.autocast():
            batch = state.precision.convert_batch(micro.batch)
            if self._hooks.micro_batch_start:
                self._call_before_micro_batch(batch, micro, objective=objective, window=window, index=index)
            if self._flops.is_pending and self.logbook.is_due(self.progress.step + 1):
                output = self._flops.record(objective.step, state.model, batch, **keywords)
            else:
                output = objective.step(state.model, batch, **keywords)
        if self._has_slots:
            state.slots.end_micro_batch(window, index)

        if self._must_check(output):
            source = f"objectives: {objective.name}" if objective.name else "training_step"
            check_output(output, state.task, source)
        if index == 0 and output.media is not None:
            self.logbook.keep_media(output.media, objective=objective.name)
        if self._overwrites_outputs:
            output = copied(output)
        self._call_after_output(output)
        return output

    def _call_before_micro_batch(
        self, batch: Batch, micro: MicroBatch, *, objective: Objective, window: Window, index: int
    ) -> None:
        indices = None
        if window.indices:
            indices = window.indices[index].indices
        info = MicroBatchInfo(batch, index, micro.num_samples, indices, objective.name)
        for hook in self._hooks.micro_batch_start:
            hook(info)

    def _call_after_output(self, output: StepOutput) -> None:
        for hook in self._hooks.micro_batch_output:
            hook(output)

    def _repeat_window(self, window: Window, *, begin: Callable[[MicroBatch], bool]) -> None:
        """Compute a window of the last epoch again, as a training step does, with the bare model.

        begin: called with each micro-batch; returns False if it is to be left out.
        """
        state = self.state
        progress = self.progress
        objectives = self._only_objective
        if state.objectives is not None:
            objectives = state.objectives.all
        micro_batches = list(window.micro_batches)
        for objective in objectives:
            for index, micro in enumerate(micro_batches):
                if not begin(micro):
                    continue
                keywords = {}
                if objective.name in self._objectives_with_info:
                    keywords["info"] = self._batch_infos.of(
                        window, index=index, step=progress.step, epoch=progress.last_epoch
                    )
                if self._has_slots:
                    state.slots.begin_micro_batch(window, index)
                with state.precision.autocast():
                    objective.step(state.bare_model, state.precision.convert_batch(micro.batch), **keywords)
                if self._has_slots:
                    state.slots.end_micro_batch(window, index)

    def _must_check(self, output: object) -> bool:
        """Return True in the first step, where outputs are checked in full, and for any that is no StepOutput."""
        return self.progress.step == self.start_step or not isinstance(output, StepOutput)

    def _update(self, objective: Objective, *, global_count: int) -> None:
        """Clip the gradients, step the objective's optimizer and its schedule, drop all gradients."""
        state = self.state
        settings = self.settings
        self._timer.set_phase(RankPhase.OPTIMIZER)
        scaler = state.precision.scaler
        optimizer, schedule = state.of(objective)
        parameters = state.trained_in(objective)
        self._loss_weights.divide(parameters, count=global_count)

        clips = settings.gradient_clip_val is not None
        norm_hooks = self._hooks.gradient_norm
        needs_norm = clips or bool(norm_hooks) or self.logbook.is_due(self.progress.step + 1)
        if needs_norm or self._hooks.before_optimizer_step:
            scaler.unscale_(optimizer)
        self._call_before_optimizer_step(optimizer)
        leaves_out = False
        if needs_norm:
            clip = partial(clip_gradients, parameters, norm_over_ranks=state.strategy.total_norm)
            if norm_hooks and clips and settings.gradient_clip_algorithm == "value":
                # Clipping elements computes no norm.
                norm = clip(replace(settings, gradient_clip_val=None))
                clip(settings)
            else:
                norm = clip(settings)
            if norm is not None:
                self.logbook.grad_norms[f"{objective.name}/grad_norm".lstrip("/")] = norm
                for hook in norm_hooks:
                    if hook(norm, objective.name):
                        leaves_out = True

        self.logbook.lrs = [group["lr"] for group in state.optimizer.param_groups]
        # A scaler skips the step if gradients overflow; if it doesn't, `_note_optimizer_step` sets this to True.
        self._has_stepped = not scaler.is_enabled() and not leaves_out
        if not leaves_out:
            scaler.step(optimizer)
        scaler.update()
        # `zero_grad` would do the same, but its mark for the profiler takes 3 % of a toy step.
        for parameter in state.trainable.parameters:
            parameter.grad = None
        if self._has_stepped:
            schedule.step_after("step")

    def _call_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for hook in self._hooks.before_optimizer_step:
            hook(optimizer)

    def _note_optimizer_step(self, *_: Any) -> None:
        self._has_stepped = True

    def _update_trainable(self) -> None:
        """Rebuild what depends on the trained parameters: a model or callback has changed `requires_grad`."""
        self._timer.leave_step(RankPhase.BUILDING)
        self.state.update_trainable()

    # A step of a strategy that runs the forward and backward passes itself, as pipelines do

    def _run_window(self, window: Window) -> Tensor:
        """Make the step as `train_step` does, with one objective."""
        state = self.state
        loss = state.strategy.run_window(
            state.model,
            window,
            task=self._task_of(window),
            precision=state.precision,
            add=self._add_output,
            mark=self._timer.set_phase,
        )
        self._loss_weights.begin_sum()
        self._update(self._only_objective[0], global_count=window.global_count)
        state.strategy.after_update(state.model)
        return loss

    def _task_of(self, window: Window) -> Task:
        """Return the task for the strategy: if its step takes a BatchInfo, a copy of it that has this bound.

        Such a strategy runs the backward for samples only, never for a stand-in.
        """
        task: Any = self.state.task
        if self._objectives_with_info:
            step = task.training_step
            task = copy.copy(task)
            info = self._batch_infos.of_window(window, step=self.progress.step, epoch=self.progress.epoch)
            task.training_step = partial(step, info=info)
        return task  # type: ignore[no-any-return]

    def _add_output(self, output: StepOutput, num_samples: int, scale: float) -> Tensor:
        """Note what the task computed from a micro-batch; return the loss for the strategy to go backward from."""
        if self._must_check(output):
            check_output(output, self.state.task, "training_step")
        if output.num_samples:
            self.state.meter.add(output, step=self.progress.step + 1)
        if output.media is not None and not self.logbook.has_media(objective=""):
            self.logbook.keep_media(output.media, objective="")
        return self._loss_weights.weighted(output, num_samples=num_samples, scale=scale)

    # Between steps

    def log(self) -> None:
        """Reduce over ranks what the last steps computed, and log it; stop if a callback asks for it.

        Every rank must call it; waits for the device. Raises NotFiniteError when a loss was NaN or infinite.
        """
        state = self.state
        self._timer.leave_step(RankPhase.LOGGING)
        self.check_run_dir()
        self._count_flops()
        self._loss_weights.check()
        wanted = Actions(
            stop=self.stop.own_reason is not None,
            save=self.checkpoints is not None and self.checkpoints.due_time(),
            rebuild=state.trainable.has_changed(),
        )
        reduction = self.logbook.reduce(wanted)

        if reduction.actions.rebuild:
            # On all ranks, so that it is detected if some differ.
            self._update_trainable()
            self._timer.leave_step(RankPhase.LOGGING)
        self._timed_save_is_due = reduction.actions.save
        with self._explained():
            self.logbook.check_losses(reduction.means)
        state.meter.clear()
        self.stop.agree(reduction.actions.stop)
        self.logbook.write(reduction)

    def _count_flops(self) -> None:
        """Count the FLOPs of the step that was recorded, if there is one. Not counted as training time."""
        if self._flops.has_calls:
            began = time.perf_counter()
            self._flops.count(self.state)
            self.logbook.throughput.leave_out(since=began)

    def evaluate(self) -> None:
        """Validate, log, call the callbacks; stop if one asks for it. Every rank must call it."""
        if not self.val_loaders:
            return
        state = self.state
        step = self.progress.step
        epoch = self.progress.last_epoch
        self._timer.leave_step(RankPhase.EVALUATE)
        # Steps that are still queued on the device count as training time.
        self.context.wait_for_devices()
        began = time.perf_counter()

        self._timer.leave_step(RankPhase.LOGGING)
        start_hooks = hooks(state.observers, "on_validation_start")
        self._call_epoch_hooks(start_hooks, epoch=epoch, part="val")

        self._timer.leave_step(RankPhase.EVALUATE)
        for loader in self.val_loaders.values():
            loader.set_epoch(epoch)
        with state.evaluation_weights():
            evaluation = state.evaluate(self.val_loaders, with_media=bool(state.loggers))
        state.val_metrics = evaluation.metrics
        state.val_texts = evaluation.texts
        state.val_step = step

        self._timer.leave_step(RankPhase.LOGGING)
        info = EvalInfo("val", step, epoch, evaluation.metrics)
        self._after_validation(info)
        self.check_run_dir()
        self.logbook.log_evaluation(evaluation)
        state.schedule.step_after("validation", evaluation.metrics)

        end_hooks = hooks(state.observers, "on_validation_end")
        for hook in end_hooks:
            self._handle_answer(hook(info), hook, part="val")
        has_hooks = bool(start_hooks or end_hooks)
        if has_hooks and self.logbook.any_pairs():
            self.logbook.log_pairs("val")
        self.stop.agree()
        self.logbook.throughput.leave_out(since=began)

    def _end_epoch(self, epoch: int) -> None:
        """Call the hooks of an epoch's end, and log what the task reduces once per epoch."""
        if self._hooks.epoch_end:
            self._timer.leave_step(RankPhase.LOGGING)
            self._call_epoch_hooks(self._hooks.epoch_end, epoch=epoch)
            self.stop.agree()
        self.logbook.log_values(self.logbook.task_values("epoch"))

    def _call_epoch_hooks(
        self, epoch_hooks: Iterable[Callable[[EpochInfo], Stop | Log | None]], *, epoch: int, part: str = "train"
    ) -> None:
        """Call hooks that get an EpochInfo. part: as in `_handle_answer`."""
        for hook in epoch_hooks:
            self._handle_answer(hook(EpochInfo(epoch, self.progress.step)), hook, part=part)

    def _handle_answer(self, answer: Stop | Log | None, hook: Callable[..., Any], *, part: str = "train") -> None:
        """Log the values of a Log that a hook has returned, note a Stop. part: `val` in validation hooks."""
        if isinstance(answer, Log):
            self.logbook.add(answer, part=part)
            answer = answer.stop
        self.stop.handle(answer, hook)

    def save(self) -> None:
        """Copy the state between two steps and start to write it as a checkpoint. Every rank must call it.

        Figures that aren't logged yet are saved too, so logs don't depend on when checkpoints are saved.
        Raises RunError if a loss or weight isn't finite, replicas differ, or the run directory is gone.
        """
        if self.checkpoints is None:
            return
        state = self.state
        step = self.progress.step
        epoch = self.progress.last_epoch
        self._timer.leave_step(RankPhase.CHECKPOINT)
        self.check_run_dir()
        # The checkpoint must fit the parameters that are trained from here on.
        if any_over_ranks(state.trainable.has_changed(), self.context):
            self._update_trainable()
            self._timer.leave_step(RankPhase.CHECKPOINT)
        with self._explained():
            check_finite(state.trainable.parameters, state.meter, step=step, epoch=epoch, context=self.context)

        began = time.perf_counter()
        self.logbook.flush()
        metrics = state.val_metrics if state.val_step == step else None
        self.checkpoints.save(state.state_dict(), step=step, epoch=epoch, metrics=metrics)
        self._saved_step = step
        self._timed_save_is_due = False
        self.logbook.throughput.leave_out(since=began)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add what callbacks know of the cause to the error of a loss or weight that isn't finite."""
        try:
            yield
        except NotFiniteError as error:
            causes = [hook() for hook in hooks(self.state.observers, "on_nonfinite")]
            raise NotFiniteError("\n".join([str(error), *filter(None, causes)])) from None

    def _stop_on_request(self) -> None:
        """Stop for a signal, if this is the step after which all ranks stop. Does nothing if training ends here anyway.

        Ranks learn of the signal after different steps; see `StopRequest.due`.
        """
        self.context.wait_for_devices()
        if not self._is_done():
            steps_ahead = steps_to_meeting(self.state.strategy, self.settings, step=self.progress.step)
            self.stop.stop_if_due(self.progress.step, steps_ahead=steps_ahead)

    # The start and the end of `fit`

    def _prepare(self) -> None:
        """Call the start hooks, restore what they may have changed, and start measuring."""
        self.start_step = self.progress.step
        # Time in hooks counts as logging.
        self._timer.set_phase(RankPhase.LOGGING)
        self._call_start_hooks()
        # Looked up after the start hooks, which may have set some of them.
        observers = self.state.observers
        self._hooks = _Hooks(
            epoch_start=hooks(observers, "on_train_epoch_start"),
            micro_batch_start=hooks(observers, "on_micro_batch_start"),
            micro_batch_output=hooks(observers, "on_micro_batch_output"),
            before_optimizer_step=hooks(observers, "on_before_optimizer_step"),
            gradient_norm=hooks(observers, "on_gradient_norm"),
            step_end=hooks(observers, "on_train_step_end") + hooks(self.state.loggers.values(), "on_train_step_end"),
            epoch_end=hooks(observers, "on_train_epoch_end"),
        )
        if self._hooks.gradient_norm:
            self._check_gradient_norm_hooks()
        if self.progress.samples > 0 and self._hooks.epoch_start:
            self._repeat_epoch_start()

        self._timer.set_phase(RankPhase.BUILDING)
        # A resumed run trains the parameters that it trained before, even if callbacks have frozen others just now.
        self.state.restore_trainable()
        if self.restore_generators is not None:
            self.restore_generators()
        self._start_measuring()

    def _check_gradient_norm_hooks(self) -> None:
        """Raise ConfigError if updates can't be left out in agreement."""
        names = [type(callback).__name__ for callback in self.state.observers if hooks([callback], "on_gradient_norm")]
        refused = None
        if self._task_steps is not None:
            refused = f"{type(self.state.task).__name__} or its optimizer makes the steps itself"
        elif self.state.strategy.replicas_differ:
            refused = f"with {type(self.state.strategy).__name__} each process has gradients of its own"
        if refused is not None:
            raise ConfigError(
                f"{', '.join(names)} decides about each update by the norm of the gradients, and {refused}. Leave it "
                "out."
            )

    def _call_start_hooks(self) -> None:
        state = self.state
        steps = self.train_loader.steps
        start = self.start_of_run()
        info = FitInfo(
            model=state.bare_model,
            start_step=self.progress.step,
            total_steps=total_steps(self.settings, steps=steps, start=start),
            steps_per_epoch=None if steps is None else steps.constant,
            steps_left_in_epoch=start.steps_left,
            max_epochs=self.settings.max_epochs,
            optimizer=state.optimizer,
            scales_losses=state.precision.scaler.is_enabled(),
            batchnorm_statistics=self._batchnorm_statistics,
            steps_of_epoch=self._steps_of_epoch,
            observe_phases=self._timer.observe,
        )
        for hook in hooks(state.observers, "on_fit_start") + hooks(state.loggers.values(), "start"):
            hook(info)

    def _steps_of_epoch(self, epoch: int) -> int | None:
        steps = self.train_loader.steps
        return None if steps is None else steps.of(epoch)

    def _batchnorm_statistics(self) -> dict[str, Tensor]:
        """Compute BatchNorm's statistics for the weights to evaluate; see `FitInfo`. Not counted as training time."""
        self._timer.leave_step(RankPhase.EVALUATE)
        began = time.perf_counter()
        statistics = batchnorm_statistics(self.state, self._repeat_window, takes_info=bool(self._objectives_with_info))
        # A callback has asked for them.
        self._timer.leave_step(RankPhase.LOGGING)
        self.logbook.throughput.leave_out(since=began)
        return statistics

    def _repeat_epoch_start(self) -> None:
        """Call the hooks of an epoch's start again in a run that is resumed in the middle of the epoch.

        What they set up in objects was lost with the earlier process. What they changed of the checkpoint's content is
        in the checkpoint already, so it is restored afterwards.
        """
        info = EpochInfo(self.progress.epoch, self.progress.step, resumed=True)
        with self.state.restored_afterwards():
            for hook in self._hooks.epoch_start:
                hook(info)

    def _start_measuring(self) -> None:
        """Start to count FLOPs, samples and times. Every rank must call it."""
        state = self.state
        context = self.context
        self._flops.start()
        self.logbook.throughput.read(step=self.progress.step)
        if context.world_size > 1:
            # Slow ranks are reported with their places.
            devices = ", ".join(dict.fromkeys(str(device) for device in context.devices))
            places = gather_to_all(f"{socket.gethostname()}, {devices}", context)
            self.logbook.slow_ranks.start(places, step=self.progress.step)
            self._timer.knows_waiting = state.strategy.observe_waiting(state.model, self._timer)
        self._timer.start()

    def _finish(self) -> None:
        """Save and log what is left, wait until it is written, and call the end hooks. Raises DiskError."""
        if self._saved_step != self.progress.step:
            self.save()
        # A stopped run logs these steps once it is resumed, together with those that follow.
        if self.progress.step > self.start_step and not self.stop.on_request:
            self.log()
        if self.checkpoints is not None:
            self._wait_for_checkpoint(self.checkpoints)
        self._timer.leave_step(RankPhase.LOGGING)
        for hook in hooks(self.state.observers, "on_fit_end"):
            hook()

    def _wait_for_checkpoint(self, checkpoints: CheckpointManager) -> None:
        """Wait until the last checkpoint is written; if it failed, try once more. Raises DiskError on all ranks."""
        self._timer.leave_step(RankPhase.CHECKPOINT)
        failures = gather_to_all(checkpoints.wait(), self.context)
        if any(failures):
            self.save()
            failures = gather_to_all(checkpoints.wait(), self.context)
        for failure in failures:
            if failure is not None:
                raise DiskError(f"{failure} What was trained since isn't saved. Make room, then resume the run.")

    # Before `fit`

    def load_state_dict(self, training: Mapping[str, Any]) -> None:
        """Load the `training` part of a checkpoint, once the weights are there. Every rank must call it."""
        self.state.load_state_dict(training)
        self._saved_step = self.progress.step

    @refused_broadcasting()
    def sanity_check(self) -> list[str]:
        """Run the first validation batches to find errors in them before training; return the metrics' names.

        Logs nothing; changes no weights, buffers or generators. Returns an empty list if there is nothing to validate,
        and in a resumed run. Every rank must call it.
        """
        settings = self.settings
        num_batches = settings.num_sanity_val_steps
        is_never_due = settings.val_check_interval is None and settings.check_val_every_n_epoch is None
        if not self.val_loaders or is_never_due or num_batches == 0 or self.progress.step > 0:
            return []
        self._timer.set_phase(RankPhase.EVALUATE)
        for start in hooks([self.state.task], "on_sanity_check_start"):
            start()
        # Eagerly, since other batch sizes would cause dynamic recompilation.
        with eager(), self.state.without_side_effects():
            batches = {prefix: loader.first(num_batches) for prefix, loader in self.val_loaders.items()}
            return self.state.evaluate(batches).names

    def start_of_run(self) -> Start:
        """Return the position to train from: that of the restored checkpoint, or the beginning.

        To be called before the first step.
        """
        loader = self.train_loader
        return start_of(asdict(self.progress), steps=loader.steps, plan=loader.plan)

    # For jobs that look inside of steps, as job=replay

    def wrap_steps(self, wrap: Callable[[MakeStep], MakeStep]) -> None:
        """Have `fit` call what `wrap` returns for each step: a function that calls the one it got with the window."""
        self._make_step = wrap(self._make_step)

    def batch_info(self, window: Window, *, index: int) -> BatchInfo:
        """Return what a task learns of a micro-batch of the next step. index: in the window, from 0."""
        return self._batch_infos.of(window, index=index, step=self.progress.step, epoch=self.progress.epoch)

    def step_of_part(self, objective: str) -> Callable[..., StepOutput] | None:
        """Return what computes an objective from any samples: a function of the bare model and a batch.

        None if the task asks for more than the batch, makes the steps itself, or takes other ranks.
        """
        makes_steps = self._run_whole_step is not None
        if makes_steps or self._has_slots or self.state.strategy.forward_communicates:
            return None
        objectives = self._only_objective if self.state.objectives is None else self.state.objectives.all
        steps = {one.name: one.step for one in objectives if one.name not in self._objectives_with_info}
        return steps.get(objective)

    def repeat_alone(self, *, first_position: int) -> None:
        """Make a rank's part of a step without the other ranks.

        first_position: of its samples, in the global batch.
        """
        self.weight_own_samples()
        self._batch_infos.alone_from = first_position

    # For steps outside of `fit`, as job=tune makes them

    def weight_own_samples(self) -> None:
        """Weight losses by this rank's samples only: for trials, in which ranks exchange nothing."""
        self._batch_infos.exchanges = False
        self._loss_weights = OneRankWeights(self.context, task_name=type(self.state.task).__name__)
        if self._task_steps is not None:
            self._task_steps.weights = self._loss_weights

    def read_means(self) -> dict[str, float]:
        """Return the means over all ranks since the last call. Every rank must call it."""
        means = self.state.meter.reduce(self.context).means
        self.state.meter.clear()
        return means
