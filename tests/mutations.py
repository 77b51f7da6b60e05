"""Small, realistic bugs for `framework/`, to measure how many of them the tests find.

    python -m tests.mutations               apply each to a copy of the project and run the test that finds it
    python -m tests.mutations NAME...       only these
    python -m tests.mutations --check       only see whether each still applies and compiles

They were written without looking at the tests. The exit status is 1 if one isn't caught, or doesn't apply.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One bug in one file.

    `old` occurs exactly once in the file, which is relative to the root. `what` is what a user would see go wrong.
    `caught_by` is a test that fails then (file::function); empty if none does.
    """

    name: str
    caught_by: str
    file: str
    old: str
    new: str
    what: str

    def applied_to(self, source: str) -> str:
        """Return the source with the bug. Raises ValueError unless `old` occurs exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the old text occurs {count} times in {self.file}, not once")
        return source.replace(self.old, self.new)


LAUNCH = [
    Mutation(
        name="report-orders-by-rank",
        caught_by="tests/unit/launch/test_report.py::test_the_first_is_who_failed_first_of_itself",
        file="framework/monitoring/report.py",
        old="        return follows, failure.time, failure.rank\n",
        new="        return follows, failure.rank, failure.time\n",
        what="When several ranks fail by themselves, the report calls the lowest rank the first, not the earliest one.",
    ),
    Mutation(
        name="local-rank-variable-is-node-rank",
        caught_by="tests/multiproc/test_local_launch.py::test_ranks_have_torchruns_variables_and_the_commands_present_world",
        file="framework/launch/plan.py",
        old='"LOCAL_RANK": str(rank % local_world),',
        new='"LOCAL_RANK": str(rank // local_world),',
        what="LOCAL_RANK is the number of the node, so on one node libraries in every process see local rank 0.",
    ),
    Mutation(
        name="waiting-ranks-are-blamed",
        caught_by="tests/unit/launch/test_late_ranks.py::test_who_is_waited_for_and_how_long",
        file="framework/monitoring/node_monitor.py",
        old="        return [each for each in states if each.collectives < top]\n",
        new="        return [each for each in states if each.collectives == top]\n",
        what="When a rank hangs, those that wait for it in a collective are called late and reported as hung.",
    ),
    Mutation(
        name="late-ranks-are-told-at-the-timeout-only",
        caught_by="tests/unit/launch/test_late_ranks.py::test_a_late_rank_is_announced_once_and_again_when_it_has_caught_up",
        file="framework/monitoring/node_monitor.py",
        old="        counts = seconds >= min(self._limits.late_after_s, limit_s)",
        new="        counts = seconds >= max(self._limits.late_after_s, limit_s)",
        what="A late rank is not announced after launcher.late_after, but only once the time-out has passed.",
    ),
    Mutation(
        name="early-exit-counts-as-finished",
        caught_by="tests/multiproc/test_failures.py::test_the_first_cause_is_reported_once",
        file="framework/launch/local.py",
        old='        left_early = event["status"] in _SUCCESSES and not self._monitor.read(rank).is_done\n',
        new="        left_early = False\n",
        what="A rank that leaves with status 0 in the midst of training (os._exit(0)) makes the run look finished.",
    ),
    Mutation(
        name="signals-are-not-handled-in-place",
        caught_by="tests/multiproc/test_stopping.py::test_a_rank_in_the_commands_own_process_handles_signals_itself",
        file="framework/launch/stopping.py",
        old="if is_watched or number != signal.SIGINT]",
        new="if is_watched and number != signal.SIGINT]",
        what="With launcher=in_process SIGTERM ends training at once instead of saving and stopping with status 75.",
    ),
    Mutation(
        name="second-sigterm-ends-at-once",
        caught_by="tests/multiproc/test_stopping.py::test_a_second_ctrl_c_ends_the_run",
        file="framework/launch/local.py",
        old="                if number == signal.SIGINT:\n                    raise KeyboardInterrupt\n",
        new="                if number != signal.SIGINT:\n                    raise KeyboardInterrupt\n",
        what="A scheduler's second SIGTERM kills a run that is saving, and a second Ctrl-C does not end it.",
    ),
    Mutation(
        name="wrong-requests-are-restarted",
        caught_by="tests/multiproc/test_elastic.py::test_a_wrong_request_is_not_tried_again",
        file="framework/launch/local.py",
        old="        if (failure is not None and failure.first.is_final) or self._monitor.stop_signal:\n",
        new="        if self._monitor.stop_signal:\n",
        what="With launcher.max_restarts a configuration error, which fails the same each time, uses up all restarts.",
    ),
    Mutation(
        name="last-failure-has-the-attempt-in-its-name",
        caught_by="tests/features/test_callbacks.py::test_a_failing_close_hides_neither_the_failure_nor_itself",
        file="framework/system/run_dir.py",
        old='*([] if is_last else [f"attempt_{attempt}"])]',
        new='*([f"attempt_{attempt}"] if is_last else [])]',
        what="The final failure is in failure_attempt_0.json, and there is no failure.json.",
    ),
    Mutation(
        name="children-get-sigterm-when-the-parent-dies",
        caught_by="tests/multiproc/test_endings.py::test_whichever_process_is_killed_none_is_left",
        file="framework/system/parent_death.py",
        old="libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        new="libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)",
        what="When the fork server is killed, ranks take the signal for a wish to stop and train on as orphans.",
    ),
]

TRAINER = [
    Mutation(
        name="gradients-forget-the-world-size",
        caught_by="tests/parity/test_plain_loop.py::test_the_number_of_processes_and_the_strategy_change_nothing",
        file="framework/training/trainer.py",
        old="        scale = self._num_shares / window.global_count\n",
        new="        scale = 1 / window.global_count\n",
        what="On W processes gradients are a W-th of what they should be: results depend on the number of processes.",
    ),
    Mutation(
        name="gradients-are-never-dropped",
        caught_by="tests/unit/test_ending.py::test_a_request_stops_after_the_step_and_resuming_from_its_checkpoint_is_exact",
        file="framework/training/trainer.py",
        old="            parameter.grad = None\n",
        new="            pass\n",
        what="Gradients add up from step to step, and training diverges from a plain PyTorch loop at the second step.",
    ),
    Mutation(
        name="evaluation-leaves-eval-mode-on",
        caught_by="tests/unit/test_evaluator.py::test_a_step_builds_no_graph_and_every_module_is_in_eval_mode_and_then_in_its_own",
        file="framework/training/evaluation.py",
        old=(
            "    for module in training:\n"
            "        module.training = True  # one by one: a frozen part stays in evaluation mode\n"
        ),
        new="",
        what="After the first evaluation the model stays in eval mode: no dropout, and BatchNorm stops learning.",
    ),
    Mutation(
        name="validation-epochs-off-by-one",
        caught_by="tests/features/test_limits.py::test_validation_happens_when_it_should",
        file="framework/training/trainer.py",
        old="        return epoch_end and every is not None and (self.progress.last_epoch + 1) % every == 0\n",
        new="        return epoch_end and every is not None and self.progress.last_epoch % every == 0\n",
        what="trainer.check_val_every_n_epoch=2 validates after epochs 1, 3, 5 instead of 2, 4, 6.",
    ),
    Mutation(
        name="last-steps-are-not-logged",
        caught_by="tests/unit/test_trainer.py::test_it_logs_every_n_steps_and_what_is_left_at_the_end",
        file="framework/training/trainer.py",
        old="        if self.progress.step > self.start_step and not self.stop.on_request:\n",
        new="        if self.progress.step > self.start_step and self.stop.on_request:\n",
        what="The loss of the last steps is missing where log_every_n_steps doesn't divide the steps of the run.",
    ),
    Mutation(
        name="early-stopping-waits-once-more",
        caught_by="tests/unit/callbacks/test_early_stopping.py::test_the_evaluation_it_stops_at",
        file="framework/callbacks/early_stopping.py",
        old="        if self._wait_count < self.patience:\n",
        new="        if self._wait_count <= self.patience:\n",
        what="EarlyStopping ends training one evaluation later than its patience says.",
    ),
    Mutation(
        name="ema-overwrites-the-training-weights",
        caught_by="tests/unit/callbacks/test_ema.py::test_after_an_evaluation_the_training_weights_are_the_same_bits_in_the_same_memory",
        file="framework/callbacks/weight_average.py",
        old="        kept = own.detach().clone()\n",
        new="        kept = own.detach()\n",
        what="With the ema callback, training continues from the averaged weights after each evaluation or checkpoint.",
    ),
    Mutation(
        name="last-bad-step-is-named",
        caught_by="tests/unit/test_ending.py::test_a_bad_loss_of_one_rank_ends_all_and_names_the_step",
        file="framework/training/meter.py",
        old="        return self._steps[bad[0]] if bad else None\n",
        new="        return self._steps[bad[-1]] if bad else None\n",
        what="The error for a NaN loss names the last bad step instead of the one where it began.",
    ),
    Mutation(
        name="loss-is-a-mean-over-batches",
        caught_by="tests/unit/test_meter.py::test_a_loss_weighs_its_samples_and_metrics_are_sums_over_their_own_counts",
        file="framework/training/meter.py",
        old="        weight = weight_of(output)\n",
        new="        weight = 1\n",
        what="The reported loss is a mean over batches, so a short last batch counts as much as a full one.",
    ),
    Mutation(
        name="weights-of-losses-of-one-process",
        caught_by="tests/features/test_loss_weights.py::test_weighted_losses_train_as_in_a_plain_loop",
        file="framework/training/loss_weights.py",
        old="self._exchange = dist.all_reduce(total, async_op=True)",
        new="self._exchange = None",
        what="Each process divides by its own tokens: padded text trains differently on several processes.",
    ),
    Mutation(
        name="a-phase-steps-all-optimizers",
        caught_by="tests/features/test_optimizers.py::test_phases_train_as_in_a_plain_loop_and_resume_exactly",
        file="framework/training/trainer.py",
        old="            optimizer, schedule = state.of(phase)\n",
        new="            _, schedule = state.of(phase)\n",
        what="The discriminator is also moved by the generator's loss.",
    ),
    Mutation(
        name="the-last-matching-group-wins",
        caught_by="tests/features/test_optimizers.py::test_groups_train_as_in_a_plain_loop",
        file="framework/optim/param_groups.py",
        old="places[name] = (number, next(own, _REST))",
        new="places[name] = (number, max(own, default=_REST))",
        what="A parameter that matches several groups gets the settings of the wrong one.",
    ),
    Mutation(
        name="metrics-of-one-process",
        caught_by="tests/features/test_metrics.py::test_metrics_do_not_depend_on_the_number_of_processes_and_are_resumed",
        file="framework/training/stateful_metrics.py",
        old="        if own and context.world_size > 1:\n",
        new="        if own and context.world_size > 9:\n",
        what="A metric is computed from the samples of each process alone.",
    ),
    Mutation(
        name="unfrozen-one-epoch-late",
        caught_by="tests/features/test_optimizers.py::test_frozen_parameters_are_trained_from_an_epoch_or_step_on",
        file="framework/callbacks/unfreeze.py",
        old="report.epoch == self._at_epoch",
        new="report.epoch - 1 == self._at_epoch",
        what="Unfrozen parameters are trained an epoch too late.",
    ),
    Mutation(
        name="clipping-in-logged-steps-only",
        caught_by="tests/unit/test_trainer.py::test_training_equals_a_plain_loop_bit_for_bit",
        file="framework/training/trainer.py",
        old="        if settings.gradient_clip_val is not None or looks_at_norm:\n            norm",
        new="        if settings.gradient_clip_val is not None and looks_at_norm:\n            norm",
        what="Gradients are clipped in every 50th step only, and grad_norm is not logged without clipping.",
    ),
]

DATA = [
    Mutation(
        name="uneven-shares-lose-samples",
        caught_by="tests/unit/data/test_sampler.py::test_every_sample_is_taken_once_from_any_cursor",
        file="framework/data/batching.py",
        old="    return range(begin, begin + size + int(rank < extra))\n",
        new="    return range(begin, begin + size)\n",
        what="Samples that can't be split evenly over processes are neither trained on nor evaluated.",
    ),
    Mutation(
        name="every-epoch-in-the-same-order",
        caught_by="tests/unit/data/test_sampler.py::test_an_order_is_a_permutation_that_seed_and_epoch_decide",
        file="framework/data/order.py",
        old='mix(self.seed, "order", epoch)',
        new='mix(self.seed, "order")',
        what="Shuffling gives the same order in every epoch.",
    ),
    Mutation(
        name="every-epoch-with-the-same-augmentation",
        caught_by="tests/unit/data/test_loaders.py::test_random_transforms_depend_on_seed_epoch_and_position_alone",
        file="framework/data/workers.py",
        old='mix(self._seed, "sample", key.epoch, position)',
        new='mix(self._seed, "sample", position)',
        what="Random transforms of a dataset do the same to a sample in every epoch.",
    ),
    Mutation(
        name="resumed-epoch-begins-again",
        caught_by="tests/unit/data/test_sampler.py::test_every_sample_is_taken_once_from_any_cursor",
        file="framework/data/order.py",
        old="    return slice(start, end)\n",
        new="    return slice(0, end)\n",
        what="A run resumed in the middle of an epoch trains on the first samples of that epoch again.",
    ),
    Mutation(
        name="subset-of-a-subset-takes-other-samples",
        caught_by="tests/unit/data/test_loaders.py::test_batches_are_those_of_a_plain_loop",
        file="framework/data/tensor_samples.py",
        old="inner.rows = chosen if inner.rows is None else inner.rows[chosen]",
        new="inner.rows = chosen",
        what="A Subset of a Subset (also overfit_batches of a split data set) trains on the wrong samples.",
    ),
    Mutation(
        name="horizontal-flip-is-vertical",
        caught_by="tests/unit/data/test_transforms.py::test_each_image_is_changed_as_in_a_loop_over_them",
        file="framework/data/transforms.py",
        old="torch.where(is_flipped_B1[:, :, None, None], image_BCHW.flip(-1), image_BCHW)",
        new="torch.where(is_flipped_B1[:, :, None, None], image_BCHW.flip(-2), image_BCHW)",
        what="RandomHorizontalFlip turns images upside down.",
    ),
    Mutation(
        name="transforms-draw-the-same-numbers",
        caught_by="tests/unit/data/test_transforms.py::test_numbers_are_those_of_splitmix64",
        file="framework/data/sample_random.py",
        old="        self._used += n\n",
        new="",
        what="Each transform of a batch draws the numbers of the one before, so flips and shifts always come together.",
    ),
    Mutation(
        name="stream-stop-waits-for-the-longest",
        caught_by="tests/unit/data/test_streams.py::test_an_epoch_ends_with_the_last_stream_or_with_the_first",
        file="framework/data/stream.py",
        old="(self._stops_first and min(counts.values()) == 0)",
        new="(self._stops_first and max(counts.values()) == 0)",
        what="data.stream=stop does not end the epoch with the first process whose stream ends, as join does.",
    ),
    Mutation(
        name="loading-moves-the-training-generator",
        caught_by="tests/unit/data/test_loaders.py::test_random_transforms_depend_on_seed_epoch_and_position_alone",
        file="framework/distributed/seed.py",
        old="        torch.set_rng_state(pytorch)\n",
        new="",
        what="Loading samples in the training process reseeds torch, so dropout depends on data.num_workers.",
    ),
]

STRATEGIES = [
    Mutation(
        name="allreduce-sums-gradients",
        caught_by="tests/unit/strategies/test_averaging.py::test_every_gradient_is_the_mean_over_ranks",
        file="framework/strategies/averaging.py",
        old="    values.div_(dist.get_world_size(group))\n",
        new="",
        what="strategy=allreduce and local_sgd take sums over processes where they should take means.",
    ),
    Mutation(
        name="unused-parameters-get-zero-gradients",
        caught_by="tests/unit/strategies/test_averaging.py::test_every_gradient_is_the_mean_over_ranks",
        file="framework/strategies/averaging.py",
        old="            flags[number] = 0\n",
        new="",
        what="Parameters that no process uses get gradients of 0, so weight decay and momentum still change them.",
    ),
    Mutation(
        name="ranks-evaluate-with-their-own-statistics",
        caught_by="tests/parity/test_exact_resume.py::test_a_killed_run_resumes_exactly",
        file="framework/training/train_state.py",
        old="        self.strategy.before_evaluation(self.model)\n        return stack\n",
        new="        return stack\n",
        what="Ranks evaluate with BatchNorm statistics of their own, so val metrics aren't those of the saved model.",
    ),
    Mutation(
        name="outer-learning-rate-is-ignored",
        caught_by="tests/parity/test_local_sgd.py::test_it_ends_where_its_rule_does",
        file="framework/strategies/local_sgd.py",
        old='{"lr": outer_lr, ',
        new='{"lr": 1.0, ',
        what="strategy=local_sgd ignores strategy.outer_lr.",
    ),
    Mutation(
        name="butterfly-divides-by-a-power-of-two",
        caught_by="tests/unit/distributed/test_butterfly.py::test_it_is_an_all_reduce_for_any_size_type_and_layout",
        file="framework/distributed/butterfly.py",
        old="        parts((rank, rank + 1)).div_(world_size)\n",
        new="        parts((rank, rank + 1)).div_(inner)\n",
        what="strategy=butterfly with three processes divides gradients by two.",
    ),
    Mutation(
        name="timeout-in-minutes",
        caught_by="tests/unit/distributed/test_collectives.py::test_a_collective_waits_no_longer_than_the_time_out_set_last",
        file="framework/distributed/process_group.py",
        old="    timeout = timedelta(seconds=timeout_s)\n    for group in groups:\n",
        new="    timeout = timedelta(minutes=timeout_s)\n    for group in groups:\n",
        what="A collective waits sixty times as long as backend.timeout before it fails.",
    ),
    Mutation(
        name="drift-of-two-replicas-is-not-seen",
        caught_by="tests/parity/test_unfreezing.py::test_replicas_that_drift_apart_are_noticed_with_the_next_checkpoint",
        file="framework/training/train_state.py",
        old="if len({each[name] for each in hashes.values()}) > 1]",
        new="if len({each[name] for each in hashes.values()}) > 2]",
        what="Two replicas whose weights have drifted apart are saved without an error.",
    ),
    Mutation(
        name="pipeline-scales-by-all-ranks",
        caught_by="tests/parity/test_strategies.py::test_it_ends_as_a_plain_loop",
        file="framework/strategies/pipeline.py",
        old="        scale = self._share.world_size / window.global_count\n",
        new="        scale = self._context.world_size / window.global_count\n",
        what="With strategy=pipeline gradients are as many times too large as a pipeline has ranks.",
    ),
    Mutation(
        name="ranks-draw-the-same-numbers",
        caught_by="tests/features/test_repeatability.py::test_every_rank_has_the_switches_and_draws_numbers_of_its_own",
        file="framework/engine/train.py",
        old="    seed_everything(config.seed, rank=rank.seeded_as)\n",
        new="    seed_everything(config.seed, rank=0)\n",
        what="All ranks draw the same dropout masks.",
    ),
]

CHECKPOINT = [
    Mutation(
        name="oldest-checkpoints-are-kept",
        caught_by="tests/unit/checkpoint/test_manager.py::test_retention_is_as_a_simple_model_says",
        file="framework/checkpoint/manager.py",
        old="if step <= last)[-self._settings.save_last_k :]",
        new="if step <= last)[: self._settings.save_last_k]",
        what="checkpoint.save_last_k keeps the oldest checkpoints and deletes the one before the last.",
    ),
    Mutation(
        name="best-is-the-worst",
        caught_by="tests/unit/checkpoint/test_manager.py::test_retention_is_as_a_simple_model_says",
        file="framework/checkpoint/manager.py",
        old='        sign = 1 if self._settings.mode == "min" else -1\n',
        new='        sign = 1 if self._settings.mode == "max" else -1\n',
        what="`best` names the checkpoint with the worst metric.",
    ),
    Mutation(
        name="files-are-not-flushed-to-the-disk",
        caught_by="tests/unit/checkpoint/test_store.py::test_everything_is_flushed_before_it_gets_its_name",
        file="framework/checkpoint/direct_io.py",
        old="        os.fsync(self._descriptor)\n",
        new="",
        what="After a power cut a checkpoint bears its name while its files are empty or incomplete.",
    ),
    Mutation(
        name="resume-does-not-read-the-files",
        caught_by="tests/unit/checkpoint/test_finding.py::test_a_changed_file_is_found_and_an_earlier_checkpoint_used",
        file="framework/checkpoint/layout.py",
        old="        name: file_damage(directory / name, manifest.files[name], thorough=thorough)\n",
        new="        name: file_damage(directory / name, manifest.files[name], thorough=False)\n",
        what="Where the last checkpoint has a flipped byte, a resume fails instead of taking the one before it.",
    ),
    Mutation(
        name="checksum-of-the-last-mebibyte",
        caught_by="tests/unit/checkpoint/test_manager.py::test_each_checkpoint_holds_the_weights_of_its_own_step",
        file="framework/system/files.py",
        old="            crc32 = zlib.crc32(chunk, crc32)\n",
        new="            crc32 = zlib.crc32(chunk)\n",
        what="Every checkpoint with a file of more than 1 MiB is refused as damaged.",
    ),
    Mutation(
        name="newer-checkpoints-replace-a-damaged-last",
        caught_by="tests/unit/checkpoint/test_finding.py::test_a_changed_file_is_found_and_an_earlier_checkpoint_used",
        file="framework/checkpoint/lookup.py",
        old="if newest is None or step < newest:",
        new="if newest is None or step > newest:",
        what="Where the last checkpoint is damaged, earlier ones are not found and given-up newer ones are taken.",
    ),
    Mutation(
        name="all-ranks-resume-the-first-ones-generators",
        caught_by="tests/parity/test_exact_resume.py::test_a_killed_run_resumes_exactly",
        file="framework/engine/restore.py",
        old="restore_generator_states(saved[context.rank], devices=context.devices)",
        new="restore_generator_states(saved[0], devices=context.devices)",
        what="After a resume rank 1 and later draw other numbers than without the interruption, so it isn't exact.",
    ),
    Mutation(
        name="stale-metrics-are-saved",
        caught_by="tests/unit/test_trainer_checkpoints.py::test_a_checkpoint_is_saved_when_it_is_due_and_has_only_metrics_of_its_own_weights",
        file="framework/training/trainer.py",
        old="            metrics=state.val_metrics if state.val_step == step else None,\n",
        new="            metrics=state.val_metrics or None,\n",
        what="A checkpoint between two validations is ranked by metrics of weights that it doesn't hold.",
    ),
    Mutation(
        name="minutes-are-seconds",
        caught_by="tests/unit/checkpoint/test_manager.py::test_when_a_checkpoint_is_due",
        file="framework/checkpoint/manager.py",
        old="        return time.monotonic() - self._saved_s >= every * 60.0\n",
        new="        return time.monotonic() - self._saved_s >= every\n",
        what="checkpoint.every_n_minutes=30 saves every 30 seconds.",
    ),
    Mutation(
        name="resume-trains-on-from-the-average",
        caught_by="tests/features/test_callbacks.py::test_a_resumed_average_is_exact",
        file="framework/engine/restore.py",
        old='load_weights(model, training.get("model", checkpoint["model"]), source=source)',
        new='load_weights(model, checkpoint["model"], source=source)',
        what="A resumed run with the ema callback trains on from the averaged weights instead of the trained ones.",
    ),
]

CONFIG = [
    Mutation(
        name="hours-are-tenths",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_taken",
        file="framework/config/parse.py",
        old='"h": 3600,',
        new='"h": 360,',
        what="A time-out of 2h is one of 12 minutes.",
    ),
    Mutation(
        name="bound-above-is-inclusive",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        file="framework/config/parse.py",
        old='value > bounds.get("above", -math.inf)',
        new='value >= bounds.get("above", -math.inf)',
        what="trainer.gradient_clip_val=0 is accepted, and nothing is learned.",
    ),
    Mutation(
        name="gpus-are-left-over",
        caught_by="tests/unit/test_topology.py::test_the_topology_keeps_what_was_given_and_uses_every_gpu_once",
        file="framework/config/topology.py",
        old="span < least or procs * span != gpus:\n",
        new="span < least or procs * span > gpus:\n",
        what="Processes that use fewer GPUs than trainer.gpus says are accepted, and GPUs stay idle without a word.",
    ),
    Mutation(
        name="model-parallel-replicas-overlap",
        caught_by="tests/unit/test_topology.py::test_the_topology_keeps_what_was_given_and_uses_every_gpu_once",
        file="framework/config/topology.py",
        old="        begin = 0 if self.own_view else local_rank * self.span\n",
        new="        begin = 0 if self.own_view else local_rank\n",
        what="With two GPUs for each process, local ranks 0 and 1 share GPU 1, and the last GPU stays idle.",
    ),
    Mutation(
        name="validation-at-the-last-step-is-refused",
        caught_by="tests/unit/config/test_checks.py::test_combinations_that_are_accepted",
        file="framework/config/checks.py",
        old="last is not None and every > last:",
        new="last is not None and every >= last:",
        what="trainer.val_check_interval equal to trainer.max_steps is refused, though it validates at the end.",
    ),
    Mutation(
        name="no-suggestion-for-a-mistyped-key",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        file="framework/config/suggest.py",
        old="    best = max(scored, default=None)\n",
        new="    best = min(scored, default=None)\n",
        what="A mistyped key such as trainer.gpsu gets no `Did you mean trainer.gpus?`.",
    ),
    Mutation(
        name="missing-keywords-are-found-late",
        caught_by="tests/unit/test_targets.py::test_each_mistake_names_its_key_and_what_is_right",
        file="framework/config/targets.py",
        old='if not node.get("_partial_") else ()',
        new='if node.get("_partial_") else ()',
        what="A model without a required keyword isn't refused with what it takes, but raises a TypeError while built.",
    ),
    Mutation(
        name="one-mistake-at-a-time",
        caught_by="tests/unit/config/test_parse.py::test_all_mistakes_are_listed",
        file="framework/config/parse.py",
        old="    if len(mistakes) == 1:\n",
        new="    if len(mistakes) >= 1:\n",
        what="Of several mistakes in a configuration only the first is shown.",
    ),
    Mutation(
        name="true-is-a-number",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        file="framework/config/parse.py",
        old="    return value if type(value) is kind else _WRONG\n",
        new="    return value if isinstance(value, kind) else _WRONG\n",
        what="trainer.max_epochs=true is accepted as one epoch.",
    ),
]

JOBS = [
    Mutation(
        name="plan-halves-the-traffic",
        caught_by="tests/unit/test_planning.py::test_memory_traffic_and_checkpoint",
        file="framework/jobs/plan/estimate.py",
        old="    between = 2 * (copies - 1) * (reduced // ranks) // copies\n",
        new="    between = (copies - 1) * (reduced // ranks) // copies\n",
        what="job=plan tells half of what each rank sends and receives in a ring.",
    ),
    Mutation(
        name="predictions-of-the-last-rank-come-first",
        caught_by="tests/unit/test_predictions.py::test_csv_has_an_index_and_one_row_a_sample",
        file="framework/jobs/inference.py",
        old="torch.cat([part[name] for part in parts])",
        new="torch.cat([part[name] for part in reversed(parts)])",
        what="The predictions of several processes are joined in the wrong order.",
    ),
    Mutation(
        name="export-in-training-mode",
        caught_by="tests/features/test_export.py::test_a_graph_computes_what_the_evaluated_model_does",
        file="framework/jobs/export/model_file.py",
        old="    return Source(config, context, model.eval(), task, step, metadata)\n",
        new="    return Source(config, context, model, task, step, metadata)\n",
        what="An exported graph is that of training: BatchNorm takes the batch's statistics, and dropout is refused.",
    ),
    Mutation(
        name="rate-where-the-loss-rises",
        caught_by="tests/unit/tune/test_arithmetic.py::test_the_suggestion_moves_with_the_curve",
        file="framework/jobs/tune/lr_range.py",
        old="[begins : lowest + 1].argmin())",
        new="[begins : lowest + 1].argmax())",
        what="job=tune suggests the learning rate at which the loss falls slowest.",
    ),
    Mutation(
        name="link-limit-in-bytes",
        caught_by="tests/unit/preflight/test_assessing.py::test_what_fails_is_named_with_its_place_value_and_limit",
        file="framework/jobs/preflight/report.py",
        old='"min_link_bandwidth", _link(link, ranks), link["bytes_per_s"] / 1e6',
        new='"min_link_bandwidth", _link(link, ranks), link["bytes_per_s"]',
        what="preflight.min_link_bandwidth=1000 (MB/s) passes on a link that carries a thousand bytes a second.",
    ),
    Mutation(
        name="parity-always-succeeds",
        caught_by="tests/features/test_parity.py::test_the_first_difference_is_found_with_its_place_and_reason",
        file="framework/jobs/parity/job.py",
        old='    return JobResult(0 if answer["same"] else 1)\n',
        new="    return JobResult(0)\n",
        what="job=parity exits with status 0 though the weights are not the same.",
    ),
    Mutation(
        name="sweep-fails-only-if-all-jobs-do",
        caught_by="tests/unit/jobs/test_sweep.py::test_what_a_job_raises_is_shown_and_the_others_run",
        file="framework/command/sweep.py",
        old="        return EXIT_RUN_FAILED if self._failed else 0\n",
        new="        return EXIT_RUN_FAILED if len(self._failed) == len(ended) else 0\n",
        what="A sweep exits with status 0 though one of its jobs has failed.",
    ),
    Mutation(
        name="last-weights-are-tested",
        caught_by="tests/features/test_checkpoints.py::test_last_and_best_are_relative_links_and_the_best_is_what_is_tested",
        file="framework/engine/train.py",
        old="    if is_ranked and broadcast_object(",
        new="    if not is_ranked and broadcast_object(",
        what="The test at the end, and its column in the summary, are of the last weights instead of the best.",
    ),
    Mutation(
        name="oldest-unfinished-run-is-resumed",
        caught_by="tests/unit/jobs/test_saved_run.py::test_auto_is_the_newest_unfinished_training",
        file="framework/config/saved.py",
        old="sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []",
        new="sorted(folder.iterdir()) if folder.is_dir() else []",
        what="resume=auto resumes the oldest unfinished run instead of the newest.",
    ),
]

MUTATIONS = [*LAUNCH, *TRAINER, *DATA, *STRATEGIES, *CHECKPOINT, *CONFIG, *JOBS]


def outcome(mutation: Mutation) -> str:
    """Return "make test" or "make test-all", whichever catches it first, or "missed"."""
    if not mutation.caught_by:
        return "missed"
    file, _, function = mutation.caught_by.partition("::")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__", "dist", "build"))
        path = copy / mutation.file
        path.write_text(mutation.applied_to(path.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-k", function]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        for how, options in (("make test", []), ("make test-all", ["--exhaustive"])):
            ended = subprocess.run([*command, *options], cwd=copy, env=environment, capture_output=True, text=True)
            if ended.returncode == 1:
                return how
    return "missed"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if not asked.names or mutation.name in asked.names]
    for mutation in chosen:
        compile(mutation.applied_to((ROOT / mutation.file).read_text(encoding="utf-8")), mutation.file, "exec")
    if asked.check:
        return 0
    outcomes = []
    for mutation in chosen:
        outcomes.append(outcome(mutation))
        print(f"{mutation.name:50}{outcomes[-1]:16}{mutation.caught_by}", flush=True)
    print(", ".join(f"{how}: {outcomes.count(how)}" for how in ("make test", "make test-all", "missed")))
    return int("missed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
