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
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from inspect import signature
from typing import Any, final

from torch import Tensor

from framework.checkpoint.manager import CheckpointManager
from framework.config.schema import CUDA_GRAPH_MODES, TrainerConfig
from framework.data.loader import EvalLoader
from framework.distributed.collectives import any_over_ranks, gather_to_all
from framework.errors import DiskError
from framework.launch.plan import MonitorLink
from framework.loggers.media import log_to_loggers
from framework.media import Media, Text
from framework.monitoring.device_usage import DeviceUsage
from framework.monitoring.rank_status import RankPhase
from framework.monitoring.slow_ranks import SlowRanks
from framework.optim.schedule import clip_gradients
from framework.strategies.base import NO_CONTEXT, Strategy
from framework.system.rank_log import warn
from framework.training.batchnorm import batchnorm_statistics
from framework.training.broadcasting import refused_broadcasting
from framework.training.evaluation import check_output, copied, eager, is_number, media_of
from framework.training.flops import FlopRate, peak_of_run
from framework.training.length import Start, start_of, total_steps
from framework.training.loss_weights import LossWeights
from framework.training.meter import bad_loss, check_finite, is_loss
from framework.training.step_times import SHARES, Clock, StepTimer, Throughput, clock_of
from framework.training.stop_control import steps_to_meeting
from framework.training.train_state import TrainState
from framework.types import (
    BatchInfo,
    EpochInfo,
    EvalInfo,
    FitInfo,
    Interval,
    Log,
    Phase,
    StepInfo,
    StepOutput,
    Stop,
    Task,
    Window,
    hooks,
)

_ONE_LOSS: tuple[Phase | None, ...] = (None,)
"""What a step of a task without phases runs."""


@final
class Trainer:
    """Train one replica on one rank. Every rank makes one and calls `fit`. clock: times the phases of a step."""

    def __init__(
        self,
        state: TrainState,
        settings: TrainerConfig,
        *,
        val_loaders: Mapping[str, EvalLoader],
        checkpoints: CheckpointManager | None,
        after_first_step: Callable[[], None],
        check_metrics: Callable[[Collection[str]], None],
        link: MonitorLink,
        counts_flops: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.state = state
        self.progress = state.progress
        self.stop = state.stop
        self.settings = settings
        self.context = context = state.context
        self.train_loader = state.train_loader
        self.val_loaders = val_loaders
        self.checkpoints = checkpoints
        self.start_step = 0
        self.restore_generators: Callable[[], object] | None = None  # called once everything that draws numbers is made
        self.slow_ranks = SlowRanks(rank=context.rank, world_size=context.world_size)
        self._timer = StepTimer(
            link.rank_status, clock=clock or clock_of(context.device), every=settings.log_every_n_steps
        )
        for observe_waiting in hooks([self.train_loader], "observe_waiting"):
            observe_waiting(self._timer)
        self._after_first_step = after_first_step
        self._check_metrics = check_metrics
        self._saved_step: int | None = None
        self._save_is_due = False  # by the clock
        self._grad_norms: dict[str, Tensor] = {}  # by the names they are logged under
        self._media: dict[str, Callable[[], Mapping[str, Media]]] = {}  # of the step that is logged next, by prefix
        self._lrs: list[float] = []  # of the last step's groups; the schedule has moved on when they are logged
        # CUDA graphs write the outputs of every step to the same memory.
        self._overwrites_outputs = settings.compile in CUDA_GRAPH_MODES and context.device.type == "cuda"
        self._has_stepped = True
        self._on_epoch_start: Sequence[Any] = ()  # the callbacks' hooks, from `fit` on
        self._on_epoch_end: Sequence[Any] = ()
        self._before_optimizer_step: Sequence[Any] = ()
        self._logged_by_task = hooks([state.task], "logged")
        if state.precision.scaler.is_enabled():  # it skips steps whose gradients overflow
            state.optimizer.register_step_post_hook(lambda *_: setattr(self, "_has_stepped", True))
        self._throughput = Throughput()
        self._usage = DeviceUsage(context)
        self._flops = FlopRate(peak_of_run(context, settings.precision))
        self._runs_windows = type(state.strategy).run_window is not Strategy.run_window
        # A model that is spread over ranks isn't copied, and phases differ from step to step.
        is_spread = self._runs_windows or state.strategy.forward_communicates
        self._flops_are_wanted = counts_flops and not is_spread and state.phases is None
        # The phases whose step takes a BatchInfo; None is that of a task without phases.
        self._informed = {name for name, step in _steps_of(state).items() if "info" in signature(step).parameters}
        self._num_shares = state.strategy.data_share(context).world_size
        # A strategy that runs windows gives each output to one rank.
        self._counts = self._runs_windows or state.speaks_for_share
        self._weights = LossWeights(
            context, strategy=state.strategy, task=state.task, may_drop=self.train_loader.collates, counts=self._counts
        )
        self._counts_flops = False

    def leave_out_exchange(self) -> None:
        """Weight losses by what this rank has: for trials of single ranks, whose strategy exchanges nothing either."""
        self._weights.leave_out_exchange()

    @refused_broadcasting()
    def sanity_check(self) -> list[str]:
        """Run the first validation batches to find errors in them before training; return the metrics' names.

        Logs nothing; changes no weights, buffers or generators. Returns an empty list if there is nothing to validate,
        and in a resumed run. Every rank must call it.
        """
        settings, number = self.settings, self.settings.num_sanity_val_steps
        is_never_due = settings.val_check_interval is None and settings.check_val_every_n_epoch is None
        if not self.val_loaders or is_never_due or number == 0 or self.progress.step > 0:
            return []
        self._timer.set_phase(RankPhase.EVALUATE)
        for start in hooks([self.state.task], "on_sanity_check_start"):
            start()
        # Eagerly, since other batch sizes would cause dynamic recompilation.
        with eager(), self.state.without_side_effects():
            first = {prefix: loader.first(number) for prefix, loader in self.val_loaders.items()}
            return self.state.evaluate(first).names

    def start_of_run(self) -> Start:
        """Return where training starts: before `fit`, where the restored checkpoint is."""
        loader = self.train_loader
        return start_of(
            asdict(self.progress),
            size=loader.size,
            steps_per_epoch=loader.steps_per_epoch,
            plan=loader.plan,
        )

    @refused_broadcasting()
    def fit(self) -> None:
        """Train from `progress` to the limits of the settings or an agreed stop, and save what is left.

        Raises RunError when the loss is no longer finite; passes on what a task, model or callback raises.
        """
        state, settings, progress = self.state, self.settings, self.progress
        self.start_step = progress.step
        observe_step = self._start_observers()
        self._repeat_epoch_start()
        state.restore_trainable()  # callbacks may have changed it
        if self.restore_generators is not None:
            self.restore_generators()
        self._counts_flops = self._flops_are_wanted
        self._throughput.read()
        self._start_timer()
        self._timer.set_phase(RankPhase.DATA)
        for window in self._windows():
            epoch = progress.epoch
            loss = self.train_step(window)
            self._throughput.samples += window.global_count
            progress.advance(global_count=window.global_count, epoch_end=window.epoch_end)
            self._timer.finish_step(progress.step)
            report = StepInfo(progress.step, epoch, loss, window.global_count, window.indices, window.epoch_end)
            for observe in observe_step:
                if (answer := observe(report)) is not None:
                    self._handle(answer)
            if progress.step - self.start_step == 1:
                self._after_first_step()
            if progress.step % settings.log_every_n_steps == 0:
                self.log()
            if window.epoch_end:
                state.schedule.step_after("epoch")
                self._timer.leave_step(RankPhase.LOGGING)
                self.stop.agree()
            if self._evaluation_due(epoch_end=window.epoch_end):
                self.evaluate()
            if window.epoch_end and self._on_epoch_end:
                self._timer.leave_step(RankPhase.LOGGING)
                self._call(self._on_epoch_end, epoch=epoch)
                self.stop.agree()
            if window.epoch_end and (values := self._from_task("epoch")):
                self.log_values(values)
            if self._save_due(epoch_end=window.epoch_end):
                self.save()
            if self.stop.request.pending:
                self._handle_request()
            self._timer.set_phase(RankPhase.DATA)
        self._finish()

    def train_step(self, window: Window) -> Tensor:
        """Make one optimizer step over this rank's micro-batches; return the detached loss of the last one.

        The weight of each mean loss is its share of the global batch times the number of data shares: strategies
        average gradients over these.
        """
        state, mark = self.state, self._timer.set_phase
        if state.trainable.has_changed():
            self._update_trainable()
        if self._runs_windows:  # the strategy runs forward and backward itself
            loss = state.strategy.run_window(
                state.model,
                window,
                task=self._task_of(window),
                precision=state.precision,
                add=self._add_output,
                mark=mark,
            )
            if self._weights.are_summed(None):
                self._weights.begin_sum(None)
            self._update(window.global_count)
            state.strategy.after_update(state.model)
            return loss
        scale = self._num_shares / window.global_count
        phases = _ONE_LOSS if state.phases is None else state.phases.due(self.progress.step)
        micro_batches = window.micro_batches if len(phases) == 1 else list(window.micro_batches)
        for phase in phases:
            step: Callable[..., StepOutput] = state.task.training_step if phase is None else phase.step
            if self._counts_flops and (self.progress.step + 1) % self.settings.log_every_n_steps == 0:
                step, self._counts_flops = self._flops.recorded(step), False
            for position, micro in enumerate(micro_batches, start=1):
                mark(RankPhase.FORWARD)
                weight = micro.num_samples * scale
                is_last = position == window.num_micro_batches
                isolated = NO_CONTEXT if micro.num_samples else state.without_side_effects()
                with isolated, state.strategy.accumulate(state.model, synchronise=is_last):
                    name = None if phase is None else phase.name
                    with state.precision.autocast():
                        batch = state.precision.convert_batch(micro.batch)
                        if name in self._informed:
                            output = step(state.model, batch, info=self._info(window, micro.num_samples))
                        else:
                            output = step(state.model, batch)
                    if self.progress.step == self.start_step:
                        check_output(output, state.task, "training_step" if phase is None else f"phases: {phase.name}")
                    if output.media is not None and position == 1:
                        self._keep_media(output.media, phase=phase)
                    if self._overwrites_outputs:
                        output = copied(output)
                    if self._weights.are_used(output, micro.num_samples, name):
                        is_only = window.num_micro_batches == 1
                        loss = self._weights.weighted(
                            output, num_samples=micro.num_samples, scale=scale, is_only=is_only
                        )
                        if is_last:
                            self._weights.begin_sum(name)
                    else:  # multiplying by 1.0 would cost two kernels
                        loss = output.loss if weight == 1.0 else output.loss * weight
                    mark(RankPhase.BACKWARD)
                    state.precision.scaler.scale(loss).backward()
                if micro.num_samples and output.num_samples and self._counts:
                    state.meter.add(output, step=self.progress.step + 1, phase=name)
                mark(RankPhase.DATA)  # of the next micro-batch
            if window.first_rank is not None:
                state.strategy.broadcast_buffers(state.model, source=window.first_rank)
            self._update(window.global_count, phase)
        state.strategy.after_update(state.model)
        return output.loss.detach()

    def _info(self, window: Window, num_samples: int) -> BatchInfo:
        progress = self.progress
        return BatchInfo(progress.step, progress.epoch, window.global_count, is_stand_in=num_samples == 0)

    def _task_of(self, window: Window) -> Task:
        """Return the task for a strategy that runs windows itself: a copy with the BatchInfo bound if it takes one.

        Such a strategy runs the backward for samples only, never for a stand-in.
        """
        task: Any = self.state.task
        if self._informed:
            step = task.training_step
            task = copy.copy(task)
            task.training_step = partial(step, info=self._info(window, window.global_count))
        return task  # type: ignore[no-any-return]

    def _add_output(self, output: StepOutput, num_samples: int, scale: float) -> Tensor:
        """Return the loss to go backward from, for a strategy that runs windows itself."""
        if self.progress.step == self.start_step:
            check_output(output, self.state.task, "training_step")
        if output.num_samples:
            self.state.meter.add(output, step=self.progress.step + 1)
        if output.media is not None and "train" not in self._media:
            self._keep_media(output.media)
        if self._weights.are_used(output, num_samples, None):
            return self._weights.weighted(output, num_samples=num_samples, scale=scale)
        return output.loss if num_samples * scale == 1.0 else output.loss * (num_samples * scale)

    def _keep_media(self, media: Callable[[], Mapping[str, Media]], *, phase: Phase | None = None) -> None:
        """Keep the media of this step, if the step will be logged and this rank has loggers."""
        if self.state.loggers and (self.progress.step + 1) % self.settings.log_every_n_steps == 0:
            self._media["train" if phase is None else f"train/{phase.name}"] = media

    def _update(self, global_count: int, phase: Phase | None = None) -> None:
        """Clip gradients, step the optimizer (of a phase, its own), drop all gradients, step the schedule."""
        state, settings = self.state, self.settings
        self._timer.set_phase(RankPhase.OPTIMIZER)
        scaler, parameters = state.precision.scaler, state.trainable.parameters
        optimizer, schedule = state.optimizer, state.schedule
        if phase is not None:
            optimizer, schedule = state.of(phase)
            parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        self._weights.divide(parameters, count=global_count)
        looks_at_norm = (self.progress.step + 1) % settings.log_every_n_steps == 0
        if self._before_optimizer_step or settings.gradient_clip_val is not None or looks_at_norm:
            scaler.unscale_(optimizer)
        for observe in self._before_optimizer_step:
            observe(optimizer)
        if settings.gradient_clip_val is not None or looks_at_norm:
            norm = clip_gradients(parameters, settings, total_norm=state.strategy.total_norm)
            if norm is not None:
                self._grad_norms["grad_norm" if phase is None else f"{phase.name}/grad_norm"] = norm
        self._lrs = [group["lr"] for group in state.optimizer.param_groups]
        self._has_stepped = not scaler.is_enabled()  # with a scaler, the optimizer's hook sets it
        scaler.step(optimizer)
        scaler.update()
        for parameter in state.trainable.parameters:  # without zero_grad's mark for the profiler, 3 % of a toy step
            parameter.grad = None
        if self._has_stepped:
            schedule.step_after("step")

    def _update_trainable(self) -> None:
        """Rebuild what depends on the trained parameters: a model or callback has changed `requires_grad`."""
        self._timer.leave_step(RankPhase.BUILDING)
        self.state.update_trainable()

    def log(self) -> None:
        """Reduce what the last steps computed over ranks and give it to the loggers; stop if a callback asks for it.

        Every rank must call it; waits for the device. Raises RunError when a loss was NaN or infinite.
        """
        self._timer.leave_step(RankPhase.LOGGING)
        state, meter = self.state, self.state.meter
        if self._flops.has_calls:
            began = time.perf_counter()
            self._flops.count(state)
            self._throughput.leave_out(since=began)
        self._weights.check()
        save_is_due = self.checkpoints is not None and self.checkpoints.due_time()
        extra = [self.stop.own_reason is not None, save_is_due, state.trainable.has_changed(), bool(state.reported)]
        times, memory = self.slow_ranks.row(self._timer.read()), self._usage.row()
        own = [*extra, *self._timer.shares, *memory, *times]
        values, (stops, saves, changes, reports, *of_ranks) = meter.reduce(self.context, extra=own)
        shares, memory = of_ranks[: len(SHARES)], of_ranks[len(SHARES) : len(SHARES) + len(memory)]
        times = of_ranks[len(SHARES) + len(memory) :]
        if changes:  # on any rank: all take part, to detect ranks that differ
            self._update_trainable()
            self._timer.leave_step(RankPhase.LOGGING)
        self._save_is_due = saves > 0
        bad = [value for name, value in values.items() if is_loss(name) and not math.isfinite(value)]
        if bad:
            raise bad_loss(bad[0], step=meter.first_nonfinite_step(self.context), epoch=self.progress.last_epoch)
        meter.clear()
        self.stop.agree(stops > 0)
        if reports:
            self.log_values(state.reported.reduce(self.context, prefix="train/"))
        if not values:
            return
        labels = (group.get("name", "") for group in state.optimizer.param_groups)
        values |= {f"lr/{label}".rstrip("/"): float(lr) for label, lr in zip(labels, self._lrs, strict=True)}
        values |= {name: float(norm) for name, norm in self._grad_norms.items()}
        self._grad_norms.clear()
        values["samples_per_s"] = rate = self._throughput.read()
        values |= {f"{name}_per_s": rate * number for name, number in getattr(state.task, "per_sample", {}).items()}
        values |= self._flops.values(rate)
        usage = self._usage.values(memory) if state.loggers else {}
        compared = self._compare(times)
        if compared:
            compared |= {f"time/{name}": sum / len(memory) for name, sum in zip(SHARES, shares, strict=True)}
        named = {f"train/{name}": value for name, value in values.items()}
        self.log_values(named | self._from_task("step") | compared | usage)
        for prefix, media in self._media.items():
            self.log_values({f"{prefix}/{name}": value for name, value in media_of(media).items()})
        self._media.clear()

    def _from_task(self, interval: Interval) -> dict[str, float]:
        """Return the metrics that the task reduces itself. Every rank must call it."""
        found = [logged(interval) for logged in self._logged_by_task]
        return {f"train/{name}": value for each in found for name, value in each.items()}

    def _compare(self, times: Sequence[float]) -> dict[str, float]:
        """Return what to log of all ranks' times, on rank 0, and warn of a rank that is newly slow."""
        if not self.context.is_main:
            return {}
        values = self.slow_ranks.note(times, step=self.progress.step)
        if self.slow_ranks.news is not None:
            warn(self.slow_ranks.news)
            self.log_values({"slow_rank": Text(self.slow_ranks.news)})
        return values

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Give numbers and media of the last step done to the loggers. Raises TargetError for any other value."""
        if values:
            progress = self.progress
            log_to_loggers(self.state.loggers.values(), values, step=progress.step, epoch=progress.last_epoch)

    def read_means(self) -> dict[str, float]:
        """Return the means over all ranks since the last call, for steps outside `fit`. Every rank must call it."""
        values, _ = self.state.meter.reduce(self.context)
        self.state.meter.clear()
        return values

    def evaluate(self) -> None:
        """Validate, log, call the callbacks; stop if one asks for it. Every rank must call it."""
        if not self.val_loaders:
            return
        state = self.state
        self._timer.leave_step(RankPhase.EVALUATE)
        self._flush_loggers()
        self.context.wait_for_devices()  # so that queued steps count as training time
        began = time.perf_counter()
        for loader in self.val_loaders.values():
            loader.set_epoch(self.progress.last_epoch)
        observers = hooks(state.observers, "on_validation_start")
        self._call(observers, epoch=self.progress.last_epoch, part="val")
        with state.evaluation_weights():
            found = state.evaluate(self.val_loaders, with_media=bool(state.loggers))
        state.val_metrics = found.metrics
        self._check_metrics(state.val_metrics)
        state.val_step, state.val_texts = self.progress.step, found.texts
        self.log_values(found.metrics)
        self.log_values(found.texts)
        self.log_values(found.media)
        state.schedule.step_after("validation", state.val_metrics)
        report = EvalInfo("val", self.progress.step, self.progress.last_epoch, state.val_metrics)
        observers += (ended := hooks(state.observers, "on_validation_end"))
        for observe in ended:
            self._handle(observe(report), part="val")
        if observers and any_over_ranks(bool(state.reported), self.context):
            self.log_values(state.reported.reduce(self.context, prefix="val/"))
        self.stop.agree()
        self._throughput.leave_out(since=began)

    def save(self) -> None:
        """Start writing a checkpoint of this moment, between two steps. Every rank must call it.

        What isn't logged yet is saved too, so logs don't depend on when checkpoints are saved.
        Raises RunError if a loss or weight isn't finite, or replicas differ.
        """
        if self.checkpoints is None:
            return
        state, step, epoch = self.state, self.progress.step, self.progress.last_epoch
        self._timer.leave_step(RankPhase.CHECKPOINT)
        # The checkpoint must fit the parameters that are trained from here on.
        if any_over_ranks(state.trainable.has_changed(), self.context):
            self._update_trainable()
            self._timer.leave_step(RankPhase.CHECKPOINT)
        check_finite(state.trainable.parameters, state.meter, step=step, epoch=epoch, context=self.context)
        began = time.perf_counter()
        self._flush_loggers()
        self.checkpoints.save(
            state.state_dict(),
            step=step,
            epoch=epoch,
            metrics=state.val_metrics if state.val_step == step else None,
        )
        self._saved_step, self._save_is_due = step, False
        self._throughput.leave_out(since=began)

    def load_state_dict(self, training: Mapping[str, Any]) -> None:
        """Load the `training` part of a checkpoint, once the weights are there. Every rank must call it."""
        self.state.load_state_dict(training)
        self._saved_step = self.progress.step

    def _start_observers(self) -> list[Callable[[StepInfo], Stop | Log | None]]:
        """Call the observers' start hooks; return those to call after every step."""
        state = self.state
        steps_per_epoch = self.train_loader.steps_per_epoch
        start = self.start_of_run()
        info = FitInfo(
            model=state.bare_model,
            start_step=self.progress.step,
            total_steps=total_steps(self.settings, steps_per_epoch=steps_per_epoch, start=start),
            steps_per_epoch=steps_per_epoch,
            steps_left_in_epoch=start.steps_left,
            max_epochs=self.settings.max_epochs,
            optimizer=state.optimizer,
            batchnorm_statistics=self._batchnorm_statistics,
        )
        for begin in hooks(state.observers, "on_fit_start") + hooks(state.loggers.values(), "start"):
            begin(info)
        observers = state.observers
        self._on_epoch_start = hooks(observers, "on_train_epoch_start")
        self._on_epoch_end = hooks(observers, "on_train_epoch_end")
        self._before_optimizer_step = hooks(observers, "on_before_optimizer_step")
        return hooks(observers, "on_train_step_end") + hooks(state.loggers.values(), "on_train_step_end")

    def _batchnorm_statistics(self) -> dict[str, Tensor]:
        """Compute BatchNorm's statistics for the weights to evaluate; see `FitInfo`. Not counted as training time."""
        self._timer.leave_step(RankPhase.EVALUATE)
        began = time.perf_counter()
        statistics = batchnorm_statistics(self.state)
        self._throughput.leave_out(since=began)
        return statistics

    def _repeat_epoch_start(self) -> None:
        """Call the hooks of an epoch's start again if it began in an earlier process.

        What they set up in objects is lost with that process. What they changed of the checkpoint's content is in the
        checkpoint already, and is restored.
        """
        if self.progress.samples == 0 or not self._on_epoch_start:
            return
        report = EpochInfo(self.progress.epoch, self.progress.step, resumed=True)
        with self.state.restored_afterwards():
            for observe in self._on_epoch_start:
                observe(report)

    def _call(
        self, observers: Iterable[Callable[[EpochInfo], Stop | Log | None]], *, epoch: int, part: str = "train"
    ) -> None:
        for observe in observers:
            self._handle(observe(EpochInfo(epoch, self.progress.step)), part=part)

    def _handle(self, answer: Stop | Log | None, *, part: str = "train") -> None:
        """Log the values of a Log, note a Stop. Pairs (sum, count) wait until the ranks reduce them."""
        if isinstance(answer, Log):
            values: dict[str, Any] = {}
            answered: Mapping[str, Any] = answer.values
            for name, value in answered.items():
                whole_name = f"{part}/{name}"
                if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value)):
                    self.state.reported.add(whole_name, (value[0], value[1]))
                elif not is_number(value):
                    values[whole_name] = value
                elif self.context.is_main:
                    values[whole_name] = float(value)
            self.log_values(values)
            answer = answer.stop
        self.stop.handle(answer)

    def _start_timer(self) -> None:
        state, context = self.state, self.context
        if context.world_size > 1:
            devices = ", ".join(dict.fromkeys(map(str, context.devices)))
            places = gather_to_all(f"{socket.gethostname()}, {devices}", context)
            self.slow_ranks.start(places, step=self.progress.step)
            self._timer.knows_waiting = state.strategy.observe_waiting(state.model, self._timer)
        self._timer.start()

    def _windows(self) -> Iterator[Window]:
        """Yield this rank's windows from `progress` on, epoch after epoch."""
        while not self._done():
            if self.progress.samples == 0:
                self._call(self._on_epoch_start, epoch=self.progress.epoch)
                if self._done():  # a callback has stopped
                    return
            for window in self.train_loader.epoch(self.progress.epoch, start=self.progress.samples):
                yield window
                if self._done():
                    return

    def _done(self) -> bool:
        settings, progress = self.settings, self.progress
        return (
            self.stop.should_stop
            or (settings.max_steps is not None and progress.step >= settings.max_steps)
            or (settings.max_epochs is not None and progress.epoch >= settings.max_epochs)
        )

    def _evaluation_due(self, *, epoch_end: bool) -> bool:
        interval, every = self.settings.val_check_interval, self.settings.check_val_every_n_epoch
        if interval is not None:
            return self.progress.step % interval == 0
        return epoch_end and every is not None and (self.progress.last_epoch + 1) % every == 0

    def _save_due(self, *, epoch_end: bool) -> bool:
        if self.checkpoints is None:
            return False
        is_ranked = self.checkpoints.monitor is not None and self.state.val_step == self.progress.step
        by_epoch = epoch_end and self.checkpoints.due_epoch(self.progress.last_epoch)
        return is_ranked or by_epoch or self._save_is_due or self.checkpoints.due_step(self.progress.step)

    def _handle_request(self) -> None:
        """Stop if all ranks stop after this step, unless training ends here anyway."""
        self.context.wait_for_devices()
        if not self._done():
            steps_ahead = steps_to_meeting(self.state.strategy, self.settings, step=self.progress.step)
            self.stop.handle_request(self.progress.step, steps_ahead=steps_ahead)

    def _finish(self) -> None:
        """Save and log what is left, wait until it is written, and call the end hooks. Raises DiskError."""
        if self._saved_step != self.progress.step:
            self.save()
        # A stopped run logs these steps once it is resumed, together with those that follow.
        if self.progress.step > self.start_step and not self.stop.on_request:
            self.log()
        self._wait_for_checkpoint()
        for end in hooks(self.state.observers, "on_fit_end"):
            end()

    def _wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written; if it failed, try once more. Raises DiskError on all ranks."""
        if self.checkpoints is None:
            return
        self._timer.leave_step(RankPhase.CHECKPOINT)
        for attempt in range(2):
            failures = gather_to_all(self.checkpoints.wait(), self.context)
            failure = next((text for text in failures if text is not None), None)
            if failure is None:
                return
            if attempt == 0:
                self.save()
        raise DiskError(f"{failure} What was trained since isn't saved. Make room, then resume the run.")

    def _flush_loggers(self) -> None:
        """Make what is logged so far survive a kill."""
        for flush in hooks(self.state.loggers.values(), "flush"):
            flush()


def _steps_of(state: TrainState) -> dict[str | None, Callable[..., StepOutput]]:
    """Return the task's training step, or those of its phases by their names."""
    phases: Sequence[Phase] | None = getattr(state.task, "phases", None)
    if state.phases is None or phases is None:
        return {None: state.task.training_step}
    return {phase.name: phase.step for phase in phases}
