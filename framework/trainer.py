"""The training loop. Start reading at `Trainer.fit`.

    for window in windows:                      # this rank's part of one global batch
        report = train_step(window)             #   forward, backward, clip, step, schedule
        tell the observers
        log          every log_every_n_steps    #   one reduction over ranks, one wait for the device
        evaluate     when it is due             #   every validation sample once
        save         when it is due             #   all ranks wait for the writer
        stop         when the ranks agreed to: a callback's wish, or a signal's

The loop calls what it needs by name; callbacks and loggers observe. Nothing on the way of a step waits for the device,
talks to other ranks (but for the strategy; what they read of streams goes round beside it) or formats text. What this
rank is doing is marked in its pulse, 0.1 µs each time, so that who watches can tell where it is.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from framework.checkpoint import CheckpointManager
from framework.config.schema import RankLosses, TrainerConfig
from framework.data.loader import EvalLoader, TrainLoader
from framework.data.stream_loader import StreamEvalLoader, StreamLoader
from framework.device_usage import DeviceUsage
from framework.distributed.collectives import any_over_ranks, gather_to_all
from framework.distributed.context import Context
from framework.drift import check_equal, digest_of
from framework.ending import Ending
from framework.errors import DiskError
from framework.evaluator import evaluate, sanity_check
from framework.finite import bad_loss, check_finite
from framework.launch.link import Link
from framework.limits import steps_to_meeting, total_steps
from framework.meter import LOSS, Meter, check_output, rank_loss
from framework.optim import gradient_dropper, gradient_look, stepper
from framework.parts import Parts
from framework.progress import Progress, Throughput, flush, hooks
from framework.pulse import Phase
from framework.rank_log import logger, show
from framework.seed import generator_states
from framework.stopwatch import Clock
from framework.strategies.trained import described_change
from framework.timing import Timing
from framework.trainable import Trainable
from framework.types import EvalReport, FitInfo, StepReport, Stop, Window, num_stages

_NOTHING: AbstractContextManager[Any] = nullcontext()


@final
class Trainer:
    """Trains one replica on one rank. Every rank makes one and calls `fit`. clock: times the parts of a step."""

    def __init__(
        self,
        parts: Parts,
        settings: TrainerConfig,
        *,
        context: Context,
        train_loader: TrainLoader | StreamLoader,
        val_loader: EvalLoader | StreamEvalLoader | None,
        checkpoints: CheckpointManager | None,
        after_first_step: Callable[[], None],
        link: Link,
        clock: Clock | None = None,
    ) -> None:
        self.parts = parts
        self.settings = settings
        self.context = context
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.checkpoints = checkpoints
        self.progress = Progress()
        self.start_step = 0
        self.val_metrics: dict[str, float] = {}  # of the last validation, after step `val_step`
        self.val_step: int | None = None
        self.ending = Ending(link, context=context)
        self.restore_generators: Callable[[], object] | None = None  # called once all that may draw numbers is made
        self.timing = Timing(link.pulse, context=context, every=settings.log_every_n_steps, clock=clock)
        self._watch = self.timing.watch
        for tell in hooks([train_loader], "tell_waiting"):
            tell(self._watch)
        self._pulse = link.pulse
        self._after_first_step = after_first_step
        self._saved_step: int | None = None
        self._save_asked = False  # by the clock
        self._grad_norm: Tensor | None = None
        self._lr = 0.0  # of the last step: schedules move before it is logged
        self._stepped = True  # the optimizer, in this step: a scaler leaves out overflowing ones
        # CUDA graphs write the outputs of every step to the same memory.
        self._overwrites_outputs = (
            settings.compile is not None and settings.compile.uses_cuda_graphs and context.device.type == "cuda"
        )
        self._may_leave_out = parts.precision.scaler.is_enabled()
        if self._may_leave_out:
            parts.optimizer.register_step_post_hook(self._note_step)
        self._meter = Meter()
        self._throughput = Throughput()
        self._usage = DeviceUsage(context.devices)
        self._trainable = Trainable(parts.bare_model)
        self._saved_trainable: Sequence[str] | None = None  # names of those trained, in the checkpoint resumed from
        self._step: Callable[[], object] = lambda: parts.optimizer.step()
        self._drop_gradients = gradient_dropper(parts.optimizer)
        self._after_update = hooks([parts.strategy], "after_update")
        self._run_window = parts.window_runner(self._meter, mark=self._mark)
        self._look_at_gradients = gradient_look(settings, total_norm=getattr(parts.strategy, "total_norm", None))

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step done, from 0."""
        return max(self.progress.epoch - int(self.progress.samples == 0), 0)

    def sanity_check(self) -> list[str]:
        """Run the first validation batches, so that errors there show before training; return the metrics' names.

        Nothing is logged, and weights, buffers and generators stay as they are. Returns an empty list if there is
        nothing to validate, and in a resumed run. Every rank must call it.
        """
        number, settings = self.settings.num_sanity_val_steps, self.settings
        is_never_due = settings.val_check_interval is None and settings.check_val_every_n_epoch is None
        if self.val_loader is None or is_never_due or number == 0 or self.progress.step > 0:
            return []
        self._pulse.at(Phase.EVALUATE)
        with self.parts.traceless(self.context), _uncompiled():
            names = sanity_check(
                self.parts.bare_model,
                self.val_loader,
                num_batches=number,
                task=self.parts.task,
                precision=self.parts.precision,
                context=self.context,
            )
        return [f"val/{name}" for name in names]

    def fit(self) -> None:
        """Train from where `progress` stands until the limits of the settings or an agreed stop, and save that.

        Raises RunError when the loss is no longer finite; whatever a task, a model or a callback raises passes.
        """
        self.start_step = self.progress.step
        parts, settings, progress = self.parts, self.settings, self.progress
        observe_step = self._bind()
        self._restore_trainable()  # callbacks may have changed it
        if self.restore_generators is not None:
            self.restore_generators()
        if self.checkpoints is not None:
            self.checkpoints.watch(parts.changed_by_updates())
        self._throughput.read()
        self.timing.start(parts.strategy, parts.model, step=progress.step)
        self._watch.at(Phase.DATA)
        for window in self._windows():
            epoch = progress.epoch
            loss = self.train_step(window)
            self._throughput.samples += window.global_count
            progress.advance(global_count=window.global_count, epoch_end=window.epoch_end)
            self._watch.stepped(progress.step)
            report = StepReport(progress.step, epoch, loss, window.global_count, window.indices)
            for observe in observe_step:
                self.ending.heed(observe(report))
            if progress.step - self.start_step == 1:
                self._after_first_step()
                self._step = stepper(parts.optimizer)
            if progress.step % settings.log_every_n_steps == 0:
                self.log(epoch=epoch)
            if window.epoch_end:
                parts.schedule.after_epoch()
                self._watch.apart(Phase.LOGGING)
                self.ending.agree()
            if self._evaluation_due(epoch, epoch_end=window.epoch_end):
                self.evaluate(epoch=epoch)
            if self._save_due(epoch, epoch_end=window.epoch_end):
                self.save(epoch=epoch)
            if self.ending.is_asked_for:
                self._heed_request()
            self._watch.at(Phase.DATA)
        self._finish()

    def train_step(self, window: Window) -> Tensor:
        """One optimizer step over this rank's micro-batches; gives the detached loss of the last one.

        Each mean loss weighs W times its share of the global batch: strategies average gradients over the W ranks.
        """
        if self._trainable.has_changed():
            self._follow_trainable()
        parts, mark = self.parts, self._watch.at
        if self._run_window is not None:  # the strategy's own way through forward and backward
            step = self.progress.step
            loss = self._run_window(window, step=step + 1, checks_output=step == self.start_step)
            self._update()
            return loss
        scale = self.context.world_size / window.global_count
        for position, micro in enumerate(window.micro_batches, start=1):
            mark(Phase.FORWARD)
            weight = micro.num_samples * scale
            traceless = _NOTHING if micro.num_samples else parts.traceless(self.context)
            with traceless, parts.strategy.accumulate(parts.model, synchronise=position == window.num_micro_batches):
                with parts.precision.autocast():
                    output = parts.task.training_step(parts.model, parts.precision.convert_batch(micro.batch))
                if self.progress.step == self.start_step:
                    check_output(output, parts.task, "training_step")
                if self._overwrites_outputs:
                    output = output._replace(loss=output.loss.clone())
                # Times 1.0 would be the same number at the price of two kernels.
                loss = output.loss if weight == 1.0 else output.loss * weight
                self._pulse.at(Phase.BACKWARD)  # which is timed with the forward
                parts.precision.scaler.scale(loss).backward()
            if micro.num_samples:
                self._meter.add(output, step=self.progress.step + 1)
            mark(Phase.DATA)  # of the next micro-batch
        parts.take_buffers(window, begins_epoch=self.progress.samples == 0)
        self._update()
        return output.loss.detach()

    def _follow_trainable(self) -> None:
        """Rebuild what depends on which parameters are trained: a model or callback has changed `requires_grad`."""
        self._watch.apart(Phase.BUILDING)
        parts, checkpoints, before = self.parts, self.checkpoints, self.parts.model
        if checkpoints is not None:
            checkpoints.before_update()  # a strategy may change weights
        changed = self._trainable.update()
        parts.rewrap(changed)
        if self.settings.compile is not None and parts.model is not before:
            parts.model.compile(mode=self.settings.compile.value)
        if checkpoints is not None:
            checkpoints.watch(parts.changed_by_updates())
        logger.info("trained parameters after step %d: %s", self.progress.step, described_change(changed))

    def _restore_trainable(self) -> None:
        """Train the parameters that were trained when the checkpoint was saved, whatever model and callbacks set."""
        if self._saved_trainable is None:
            return
        self._trainable.restore(self._saved_trainable)
        if self._trainable.has_changed():
            self._follow_trainable()

    def _mark(self, phase: Phase) -> None:
        """For a strategy that runs windows itself. Backward is timed with the forward."""
        (self._pulse if phase is Phase.BACKWARD else self._watch).at(phase)

    def _update(self) -> None:
        """Clip, step, schedule."""
        parts, settings = self.parts, self.settings
        self._watch.at(Phase.OPTIMIZER)
        scaler = parts.precision.scaler
        if settings.gradient_clip_val is not None or (self.progress.step + 1) % settings.log_every_n_steps == 0:
            scaler.unscale_(parts.optimizer)
            self._grad_norm = self._look_at_gradients(self._trainable.parameters)
        if self.checkpoints is not None:
            self.checkpoints.before_update()
        self._lr = parts.optimizer.param_groups[0]["lr"]
        self._stepped = not self._may_leave_out
        if self._may_leave_out:
            scaler.step(parts.optimizer)
            scaler.update()
        else:
            self._step()
        self._drop_gradients()
        for after_update in self._after_update:
            after_update(parts.model)
        if self._stepped:
            parts.schedule.after_step()

    def log(self, *, epoch: int) -> None:
        """Reduce what the last steps computed over ranks and give it to the loggers; agree on wishes to stop.

        Every rank must call it; waits for the device. Raises RunError when a loss was NaN or infinite.
        """
        self._watch.apart(Phase.LOGGING)
        by_clock = self.checkpoints is not None and self.checkpoints.due_time()
        extra = [self.ending.wish is not None, by_clock, self._trainable.has_changed(), *self.timing.row()]
        with_rank_losses = self.settings.log_rank_losses is not RankLosses.OFF
        values, (wishes, saves, changes, *times) = self._meter.reduce(
            self.context, extra=extra, with_rank_losses=with_rank_losses
        )
        if changes:  # on any rank: all take part, so that ranks that differ are detected
            self._follow_trainable()
            self._watch.apart(Phase.LOGGING)
        self._save_asked = saves > 0
        if with_rank_losses and LOSS in values:
            self._log_rank_losses(values)
        if not math.isfinite(values.get(LOSS, 0.0)):
            raise bad_loss(values[LOSS], step=self._meter.first_nonfinite_step(self.context), epoch=epoch)
        self._meter.clear()
        self.ending.agree(wishes > 0)
        if not values:
            return
        values["lr"] = self._lr
        if self._grad_norm is not None:
            values["grad_norm"], self._grad_norm = float(self._grad_norm), None
        values["samples_per_s"] = self._throughput.read()
        timing = self.timing.note(times, step=self.progress.step, loggers=self.parts.loggers.values())
        usage = self._usage.read() if self.parts.loggers else {}
        self._tell_loggers({f"train/{name}": value for name, value in values.items()} | timing | usage, epoch=epoch)

    def read_means(self) -> dict[str, float]:
        """For steps made without `fit`: the means over all ranks since the last reading. Every rank must call it."""
        values, _ = self._meter.reduce(self.context)
        self._meter.clear()
        return values

    def evaluate(self, *, epoch: int) -> None:
        """Run the validation part, log it, ask the callbacks, agree on wishes to stop. Every rank must call it."""
        if self.val_loader is None:
            return
        self._watch.apart(Phase.EVALUATE)
        flush(self.parts.loggers.values())
        self.context.wait_for_devices()  # the steps they are still at are training's time
        began = time.perf_counter()
        with self.parts.evaluation_weights():
            self.val_metrics = evaluate(
                self.parts.bare_model,
                self.val_loader,
                task=self.parts.task,
                precision=self.parts.precision,
                context=self.context,
                prefix="val",
            )
        self.val_step = self.progress.step
        self._tell_loggers(self.val_metrics, epoch=epoch)
        self.parts.schedule.after_validation(self.val_metrics)
        report = EvalReport("val", self.progress.step, epoch, self.val_metrics)
        for observe in hooks(self.parts.callbacks.values(), "on_validation_end"):
            self.ending.heed(observe(report))
        self.ending.agree()
        self._throughput.leave_out(since=began)

    def save(self, *, epoch: int) -> None:
        """Have a checkpoint of this moment written, between two steps. Every rank must call it.

        Raises RunError after a loss that wasn't finite, and for weights that aren't. What has yet to be logged is saved
        with it, so that what is logged doesn't depend on when something is saved.
        """
        if self.checkpoints is None:
            return
        self._watch.apart(Phase.CHECKPOINT)
        # The checkpoint must have the state for the parameters that are trained from here on.
        if any_over_ranks(self._trainable.has_changed(), self.context):
            self._follow_trainable()
            self._watch.apart(Phase.CHECKPOINT)
        step, trained = self.progress.step, self._trainable.parameters
        check_finite(trained, self._meter, step=step, epoch=epoch, context=self.context)
        began = time.perf_counter()
        flush(self.parts.loggers.values())
        fresh = self.val_step == self.progress.step
        self.checkpoints.save(
            self.state_dict(),
            step=self.progress.step,
            epoch=epoch,
            metrics=self.val_metrics if fresh else None,
            late=self.parts.changed_by_updates(),
        )
        self._saved_step, self._save_asked = self.progress.step, False
        self._throughput.leave_out(since=began)

    def state_dict(self) -> dict[str, Any]:
        """Everything a later run needs to go on from here. Every rank must call it; the same on every rank.

        Raises RunError on every rank if ranks that should have the same weights don't.

        `model` holds the weights to evaluate; where a callback averages them, those to train on are in `training`.
        Where the model is spread over ranks there is `sharded` in its place, of which each rank has its part.
        """
        training = self.parts.state_dict(self.context)
        weights = self.parts.add_weights(training)
        training |= {"progress": self.progress.state_dict()}
        training |= {"val_metrics": dict(self.val_metrics), "val_step": self.val_step}
        strategy, model = self.parts.strategy, self.parts.bare_model
        digest = digest_of(model, strategy, self.context)
        # Rank 0 has all of them, unless each rank has its own stages.
        trained = self._trainable.names if self.context.is_main or num_stages(strategy) is not None else []
        mine = (generator_states(self.context.devices), self._meter.state_dict(), self.ending.wish)
        of_ranks = gather_to_all((*mine, self.train_loader.state_dict(), digest, trained), self.context)
        generators, training["meters"], wishes, streams, digests, names = map(list, zip(*of_ranks, strict=True))
        check_equal(digests, model, self.context, step=self.progress.step)
        training["trainable"] = sorted({name for each in names for name in each})
        training["streams"] = [each for each in streams if each is not None]
        training["global_batch_size"] = self.train_loader.global_batch_size
        training["stop"] = {"reason": self.ending.reason, "wishes": wishes}
        return {**weights, "training": training, "generators": generators}

    def load_state_dict(self, training: Mapping[str, Any]) -> None:
        """Take up the `training` part of what `state_dict` gave, once the weights are there. Every rank must call it.

        What had yet to be logged on another number of ranks goes to the first.
        """
        rank, world_size = self.context.rank, self.context.world_size
        self._saved_trainable = training.get("trainable")  # None in older checkpoints
        self._restore_trainable()
        self.parts.load_state_dict(training)
        self.progress.load_state_dict(training["progress"])
        self.train_loader.load_state_dict(training.get("streams", []), samples=self.progress.samples)
        self.val_metrics, self.val_step = dict(training.get("val_metrics", {})), training.get("val_step")
        meters = training.get("meters", [])
        if len(meters) == world_size:
            meters = [meters[rank]]
        elif rank > 0:
            meters = []
        self._meter.load_state_dicts(meters, device=self.context.device)
        self.ending.load_state_dict(training.get("stop", {"reason": None, "wishes": []}))
        self._saved_step = self.progress.step

    def _bind(self) -> list[Callable[[StepReport], Stop | None]]:
        """Tell the observers that training starts; gives those who want to hear of every step."""
        parts = self.parts
        steps_per_epoch = self.train_loader.steps_per_epoch
        info = FitInfo(
            model=parts.bare_model,
            start_step=self.progress.step,
            total_steps=total_steps(self.settings, steps_per_epoch=steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            max_epochs=self.settings.max_epochs,
            optimizer=parts.optimizer,
        )
        for start in hooks(parts.callbacks.values(), "on_fit_start") + hooks(parts.loggers.values(), "fit_start"):
            start(info)
        return hooks(parts.callbacks.values(), "on_train_step_end") + hooks(parts.loggers.values(), "step")

    def _windows(self) -> Iterator[Window]:
        """This rank's windows from where the progress stands, epoch after epoch."""
        while not self._done():
            for window in self.train_loader.epoch(self.progress.epoch, start=self.progress.samples):
                yield window
                if self._done():
                    return

    def _done(self) -> bool:
        settings, progress = self.settings, self.progress
        return (
            self.ending.has_come
            or (settings.max_steps is not None and progress.step >= settings.max_steps)
            or (settings.max_epochs is not None and progress.epoch >= settings.max_epochs)
        )

    def _evaluation_due(self, epoch: int, *, epoch_end: bool) -> bool:
        interval, every = self.settings.val_check_interval, self.settings.check_val_every_n_epoch
        if interval is not None:
            return self.progress.step % interval == 0
        return epoch_end and every is not None and (epoch + 1) % every == 0

    def _save_due(self, epoch: int, *, epoch_end: bool) -> bool:
        if self.checkpoints is None:
            return False
        ranked = self.checkpoints.monitor is not None and self.val_step == self.progress.step
        by_epoch = epoch_end and self.checkpoints.due_epoch(epoch)
        return ranked or by_epoch or self._save_asked or self.checkpoints.due_step(self.progress.step)

    def _finish(self) -> None:
        """Log and save what is left, and tell the callbacks."""
        if self._saved_step != self.progress.step:
            self.save(epoch=self.last_epoch)
        # A run that was stopped logs these steps when it goes on, together with those that follow.
        if self.progress.step > self.start_step and not self.ending.was_stopped:
            self.log(epoch=self.last_epoch)
        self._settle()
        for end in hooks(self.parts.callbacks.values(), "on_fit_end"):
            end()

    def _settle(self) -> None:
        """Wait until the last checkpoint is written; try again where it couldn't be. Raises DiskError on all ranks."""
        if self.checkpoints is None:
            return
        self._watch.apart(Phase.CHECKPOINT)
        for attempt in range(2):
            failures = gather_to_all(self.checkpoints.settle(), self.context)
            failure = next((text for text in failures if text is not None), None)
            if failure is None:
                return
            if attempt == 0:
                self.save(epoch=self.last_epoch)
        raise DiskError(f"{failure} What was trained since isn't saved. Make room, then resume the run.")

    def _log_rank_losses(self, values: dict[str, float]) -> None:
        """Remove the losses of single ranks from `values`; write them to the ranks' logs and, if set, the terminal."""
        ranks = range(self.context.world_size)
        own = [f"{values.pop(rank_loss(rank)):.6g}" if rank_loss(rank) in values else "no samples" for rank in ranks]
        step, mean, rank = self.progress.step, f"{values[LOSS]:.6g} over all ranks", self.context.rank
        logger.info("step %d: loss %s on rank %d, %s", step, own[rank], rank, mean)
        if self.settings.log_rank_losses is RankLosses.TERMINAL and self.context.is_main:
            each = ", ".join(f"{loss} on rank {rank}" for rank, loss in enumerate(own))
            show(f"step {step}: loss {each}, {mean}")

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _tell_loggers(self, values: Mapping[str, float], *, epoch: int) -> None:
        for each in self.parts.loggers.values():
            each.metrics(values, step=self.progress.step, epoch=epoch)

    def _heed_request(self) -> None:
        """Stop on request where all ranks do so after this step; a run that is at its own end simply ends."""
        self.context.wait_for_devices()
        if not self._done():
            meets_in = steps_to_meeting(self.parts.strategy, self.settings, step=self.progress.step)
            self.ending.heed_request(self.progress.step, meets_in=meets_in)


def _uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run eagerly: other batch sizes would cause dynamic recompilation."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing has been compiled, and importing it takes seconds
        return _NOTHING
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
