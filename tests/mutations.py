"""Small, realistic bugs for `framework/`, to measure how many of them the tests find.

    python -m tests.mutations               apply each to a copy of the project and run the test that finds it
    python -m tests.mutations NAME...       only these
    python -m tests.mutations --check       only see if each still applies and compiles

They were written without looking at the tests. The exit status is 1 if one isn't caught, or doesn't apply.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutation:
    """One bug in one function.

    The function is found by its name in whichever module it is, and the code in it by its syntax tree: a mutation
    survives reformatting and the move of a function to another module.
    """

    name: str
    # The test that fails because of the bug, as file::function.
    caught_by: str
    # A function, method (`Trainer.train_step`), class or variable of a module of `framework/`.
    within: str
    # An expression or a statement that occurs once in there, and what takes its place.
    old: str
    new: str
    # What a user would see go wrong.
    what: str


class MutationError(Exception):
    """The place of a mutation isn't there, or isn't the only one."""


@dataclass(frozen=True)
class Place:
    """The place of the code that a mutation replaces."""

    path: Path
    tree: ast.Module
    node: ast.AST


class _Replace(ast.NodeTransformer):
    """Replaces one node of a tree by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old = old
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions, classes and variables of a module with their qualified names (`Trainer.train_step`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield prefix + ast.unparse(target), node
        else:
            yield from definitions(node, prefix)


@cache
def defined_names(source: str) -> frozenset[str]:
    """Return the qualified names that a module defines. Parsing all modules takes a second, so it is done once."""
    return frozenset(name for name, _ in definitions(ast.parse(source)))


def parsed(mutation: Mutation) -> tuple[ast.AST, ast.AST]:
    """Return `old` and `new` as expressions, or as statements unless both are expressions."""
    (old,) = ast.parse(mutation.old).body
    (new,) = ast.parse(mutation.new).body
    if isinstance(old, ast.Expr) and isinstance(new, ast.Expr):
        return old.value, new.value
    return old, new


def place_of(mutation: Mutation, sources: dict[Path, str]) -> Place:
    """Return the only place for a mutation in the modules. Raises MutationError if there is none, or another one."""
    old, _ = parsed(mutation)
    kind = ast.expr if isinstance(old, ast.expr) else ast.stmt
    text = ast.unparse(old)
    num_definitions = 0
    places: list[Place] = []
    for path, source in sources.items():
        if mutation.within not in defined_names(source):
            continue
        tree = ast.parse(source)
        for name, definition in definitions(tree):
            if name != mutation.within:
                continue
            num_definitions += 1
            nodes = [node for node in ast.walk(definition) if isinstance(node, kind) and ast.unparse(node) == text]
            places.extend(Place(path, tree, node) for node in nodes)
    if not num_definitions:
        raise MutationError(f"{mutation.name}: framework/ has no {mutation.within}")
    if len(places) != 1:
        raise MutationError(f"{mutation.name}: `{mutation.old}` is {len(places)} times in {mutation.within}, not once")
    return places[0]


def mutated(mutation: Mutation, sources: dict[Path, str]) -> tuple[Path, str]:
    """Return the module that a mutation changes, and its source with the bug. Raises MutationError, SyntaxError."""
    place = place_of(mutation, sources)
    _, new = parsed(mutation)
    tree = _Replace(place.node, new).visit(place.tree)
    source = ast.unparse(tree)
    compile(source, str(place.path), "exec")
    return place.path, source


def framework_sources() -> dict[Path, str]:
    """Return the text of each module of `framework/`, by its path relative to the root."""
    paths = sorted((ROOT / "framework").rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


LAUNCH = [
    Mutation(
        name="report-orders-by-rank",
        caught_by="tests/unit/launch/test_report.py::test_the_first_is_who_failed_first_of_itself",
        within="_causes_first.order",
        old="(is_consequence, failure.time, failure.rank)",
        new="(is_consequence, failure.rank, failure.time)",
        what="When several ranks fail by themselves, the report calls the lowest rank the first, not the earliest one.",
    ),
    Mutation(
        name="local-rank-variable-is-node-rank",
        caught_by="tests/multiproc/test_local_launch.py::test_ranks_get_torchruns_variables_and_the_world",
        within="rank_environment",
        old="rank % local_world",
        new="rank // local_world",
        what="LOCAL_RANK is the number of the node, so on one node libraries in every process see local rank 0.",
    ),
    Mutation(
        name="waiting-ranks-are-blamed",
        caught_by="tests/unit/launch/test_late_ranks.py::test_who_is_waited_for_and_how_long",
        within="_behind",
        old="state.collectives < most",
        new="state.collectives == most",
        what="When a rank hangs, those that wait for it in a collective are called late and reported as hung.",
    ),
    Mutation(
        name="late-ranks-are-reported-at-the-timeout-only",
        caught_by="tests/unit/launch/test_late_ranks.py::test_late_ranks_are_announced_and_catch_up",
        within="NodeMonitor.check",
        old="min(self._limits.late_after_s, limit_s)",
        new="max(self._limits.late_after_s, limit_s)",
        what="A late rank is not announced after launcher.late_after, but only once the time-out has passed.",
    ),
    Mutation(
        name="early-exit-counts-as-finished",
        caught_by="tests/multiproc/test_failures.py::test_the_first_cause_is_reported_once",
        within="NodeRun._on_event",
        old='event["status"] in _SUCCESSES and not self._monitor.read(rank).is_done',
        new="False",
        what="A rank that leaves with status 0 in the midst of training (os._exit(0)) makes the run look finished.",
    ),
    Mutation(
        name="signals-are-not-handled-in-place",
        caught_by="tests/multiproc/test_stopping.py::test_a_rank_in_process_handles_signals_itself",
        within="stoppable",
        old="handling_signals(SCHEDULER_SIGNALS, partial(_note_request, rank_status))",
        new="handling_signals((), partial(_note_request, rank_status))",
        what="With launcher=in_process SIGTERM ends training at once instead of saving and stopping with status 75.",
    ),
    Mutation(
        name="second-sigterm-ends-at-once",
        caught_by="tests/multiproc/test_stopping.py::test_a_second_ctrl_c_ends_the_run",
        within="NodeRun._on_signal",
        old="signal_number == signal.SIGINT",
        new="signal_number != signal.SIGINT",
        what="A scheduler's second SIGTERM kills a run that is saving, and a second Ctrl-C does not end it.",
    ),
    Mutation(
        name="wrong-requests-are-restarted",
        caught_by="tests/multiproc/test_elastic.py::test_a_wrong_request_is_not_tried_again",
        within="NodeRun._may_restart",
        old="failure is not None and failure.first.is_final",
        new="False",
        what="With launcher.max_restarts a configuration error, which fails the same each time, uses up all restarts.",
    ),
    Mutation(
        name="last-failure-has-the-attempt-in-its-name",
        caught_by="tests/features/test_callbacks.py::test_a_failing_close_hides_no_failure",
        within="RunDir.failure_of",
        old="not is_last",
        new="is_last",
        what="The final failure is in failure_attempt_0.json, and there is no failure.json.",
    ),
    Mutation(
        name="children-get-sigterm-when-the-parent-dies",
        caught_by="tests/multiproc/test_endings.py::test_whichever_process_is_killed_none_is_left",
        within="die_with_parent",
        old="signal.SIGKILL",
        new="signal.SIGTERM",
        what="When the fork server is killed, ranks treat the signal as a request to stop and train on as orphans.",
    ),
]

TRAINER = [
    Mutation(
        name="gradients-forget-the-world-size",
        caught_by="tests/parity/test_plain_loop.py::test_world_size_and_strategy_change_nothing",
        within="Trainer.train_step",
        old="self._num_shares / window.global_count",
        new="1 / window.global_count",
        what="On W processes gradients are a W-th of what they should be: results depend on the number of processes.",
    ),
    Mutation(
        name="gradients-are-never-dropped",
        caught_by="tests/unit/test_ending.py::test_a_requested_stop_resumes_exactly",
        within="Trainer._update",
        old="parameter.grad = None",
        new="pass",
        what="Gradients add up from step to step, and training diverges from a plain PyTorch loop at the second step.",
    ),
    Mutation(
        name="evaluation-leaves-eval-mode-on",
        caught_by="tests/unit/test_evaluator.py::test_evaluation_restores_the_mode_of_every_module",
        within="evaluation_mode",
        old="module.training = True",
        new="pass",
        what="After the first evaluation the model stays in eval mode: no dropout, and BatchNorm stops learning.",
    ),
    Mutation(
        name="validation-epochs-off-by-one",
        caught_by="tests/features/test_limits.py::test_validation_happens_when_it_should",
        within="Trainer._evaluation_is_due",
        old="(self.progress.last_epoch + 1) % every_epochs",
        new="self.progress.last_epoch % every_epochs",
        what="trainer.check_val_every_n_epoch=2 validates after epochs 1, 3, 5 instead of 2, 4, 6.",
    ),
    Mutation(
        name="last-steps-are-not-logged",
        caught_by="tests/unit/test_trainer.py::test_it_logs_regularly_and_at_the_end",
        within="Trainer._finish",
        old="not self.stop.on_request",
        new="self.stop.on_request",
        what="The loss of the last steps is missing where log_every_n_steps doesn't divide the steps of the run.",
    ),
    Mutation(
        name="early-stopping-waits-once-more",
        caught_by="tests/unit/callbacks/test_early_stopping.py::test_the_evaluation_it_stops_at",
        within="EarlyStopping._reason_to_stop",
        old="self._wait_count < self.patience",
        new="self._wait_count <= self.patience",
        what="EarlyStopping ends training one evaluation later than its patience says.",
    ),
    Mutation(
        name="ema-overwrites-the-training-weights",
        caught_by="tests/unit/callbacks/test_ema.py::test_evaluation_restores_the_same_training_weights_in_place",
        within="_swap",
        old="one.detach().clone()",
        new="one.detach()",
        what="With the ema callback, training continues from the averaged weights after each evaluation or checkpoint.",
    ),
    Mutation(
        name="the-last-bad-step-is-named",
        caught_by="tests/unit/test_ending.py::test_one_bad_loss_ends_all_ranks",
        within="Series.first_nonfinite",
        old="is_finite.index(False)",
        new="len(is_finite) - 1 - is_finite[::-1].index(False)",
        what="The error for a NaN loss names the last bad step instead of the one where it began.",
    ),
    Mutation(
        name="loss-is-a-mean-over-batches",
        caught_by="tests/unit/test_meter.py::test_losses_and_metrics_are_weighted_means",
        within="Meter.add",
        old="weight_of(output)",
        new="1",
        what="The reported loss is a mean over batches, so a short last batch counts as much as a full one.",
    ),
    Mutation(
        name="loss-weights-of-one-process-only",
        caught_by="tests/features/test_loss_weights.py::test_weighted_losses_train_as_in_a_plain_loop",
        within="SummedWeights.begin_sum",
        old="self._exchange = dist.all_reduce(self._total, async_op=True)",
        new="self._exchange = None",
        what="Each process divides by its own tokens: padded text trains differently on several processes.",
    ),
    Mutation(
        name="an-objective-steps-every-optimizer",
        caught_by="tests/features/test_optimizers.py::test_objectives_equal_a_plain_loop_and_resume_exactly",
        within="Trainer._update",
        old="optimizer, schedule = state.of(objective)",
        new="_, schedule = state.of(objective)",
        what="The discriminator is also moved by the generator's loss.",
    ),
    Mutation(
        name="the-last-matching-group-wins",
        caught_by="tests/features/test_optimizers.py::test_groups_train_as_in_a_plain_loop",
        within="_place_of",
        old="next(iter(matching), _REST)",
        new="max(matching, default=_REST)",
        what="A parameter that matches several groups gets the settings of the wrong one.",
    ),
    Mutation(
        name="metrics-of-one-process-only",
        caught_by="tests/features/test_metrics.py::test_metrics_are_the_same_on_any_topology",
        within="StatefulMetrics._merge",
        old="context.world_size > 1",
        new="context.world_size > 9",
        what="A metric is computed from the samples of each process alone.",
    ),
    Mutation(
        name="unfrozen-one-epoch-late",
        caught_by="tests/features/test_optimizers.py::test_frozen_parameters_train_from_a_given_step",
        within="Unfreeze.on_train_epoch_start",
        old="info.epoch == self._at_epoch",
        new="info.epoch - 1 == self._at_epoch",
        what="Unfrozen parameters are trained an epoch too late.",
    ),
    Mutation(
        name="clipping-in-logged-steps-only",
        caught_by="tests/unit/test_trainer.py::test_training_equals_a_plain_loop_bit_for_bit",
        within="Trainer._update",
        old="clips or bool(norm_hooks) or self.logbook.is_due(self.progress.step + 1)",
        new="bool(norm_hooks) or (clips and self.logbook.is_due(self.progress.step + 1))",
        what="Gradients are clipped in every 50th step only, and grad_norm is not logged without clipping.",
    ),
]

DATA = [
    Mutation(
        name="uneven-shares-lose-samples",
        caught_by="tests/unit/data/test_sampler.py::test_every_sample_is_taken_once_from_any_cursor",
        within="share",
        old="begin + size + int(rank < extra)",
        new="begin + size",
        what="Samples that can't be split evenly over processes are neither trained on nor evaluated.",
    ),
    Mutation(
        name="every-epoch-in-the-same-order",
        caught_by="tests/unit/data/test_sampler.py::test_seed_and_epoch_decide_the_permutation",
        within="GlobalOrder.indices",
        old='mix(self._seed, "order", epoch)',
        new='mix(self._seed, "order")',
        what="Shuffling gives the same order in every epoch.",
    ),
    Mutation(
        name="every-epoch-with-the-same-augmentation",
        caught_by="tests/unit/data/test_loaders.py::test_transforms_depend_on_seed_epoch_and_position",
        within="BatchDataset._load",
        old='mix(self._seed, "sample", key.epoch, position)',
        new='mix(self._seed, "sample", position)',
        what="Random transforms of a dataset do the same to a sample in every epoch.",
    ),
    Mutation(
        name="a-resumed-epoch-restarts",
        caught_by="tests/unit/data/test_sampler.py::test_every_sample_is_taken_once_from_any_cursor",
        within="epoch_positions",
        old="slice(start, end)",
        new="slice(0, end)",
        what="A run resumed in the middle of an epoch trains on the first samples of that epoch again.",
    ),
    Mutation(
        name="subset-of-a-subset-takes-other-samples",
        caught_by="tests/unit/data/test_loaders.py::test_batches_are_those_of_a_plain_loop",
        within="as_tensor_samples",
        old="chosen if inner.rows is None else inner.rows[chosen]",
        new="chosen",
        what="A Subset of a Subset (also overfit_batches of a split data set) trains on the wrong samples.",
    ),
    Mutation(
        name="horizontal-flip-is-vertical",
        caught_by="tests/unit/data/test_transforms.py::test_batched_transforms_equal_a_loop",
        within="RandomHorizontalFlip.__call__",
        old="image_BCHW.flip(-1)",
        new="image_BCHW.flip(-2)",
        what="RandomHorizontalFlip turns images upside down.",
    ),
    Mutation(
        name="transforms-draw-the-same-numbers",
        caught_by="tests/unit/data/test_transforms.py::test_numbers_are_those_of_splitmix64",
        within="Draws._bits",
        old="self._used += n",
        new="pass",
        what="Each transform of a batch draws the numbers of the one before, so flips and shifts always come together.",
    ),
    Mutation(
        name="stream-stop-waits-for-the-longest",
        caught_by="tests/unit/data/test_streams.py::test_an_epoch_ends_as_stop_or_join_says",
        within="StreamLoader._agree",
        old="min(counts.values())",
        new="max(counts.values())",
        what="data.stream=stop does not end the epoch with the first process whose stream ends, as join does.",
    ),
    Mutation(
        name="loading-advances-the-training-generator",
        caught_by="tests/unit/data/test_loaders.py::test_transforms_depend_on_seed_epoch_and_position",
        within="preserved_generators",
        old="torch.set_rng_state(pytorch)",
        new="pass",
        what="Loading samples in the training process reseeds torch, so dropout depends on data.num_workers.",
    ),
]

STRATEGIES = [
    Mutation(
        name="allreduce-sums-gradients",
        caught_by="tests/unit/strategies/test_averaging.py::test_every_gradient_is_the_mean_over_ranks",
        within="begin_all_reduce_mean",
        old="values.div_(dist.get_world_size(group))",
        new="pass",
        what="strategy=allreduce and local_sgd take sums over processes where they should take means.",
    ),
    Mutation(
        name="unused-parameters-get-zero-gradients",
        caught_by="tests/unit/strategies/test_averaging.py::test_every_gradient_is_the_mean_over_ranks",
        within="average_gradients",
        old="flags[number] = 0",
        new="pass",
        what="Parameters that no process uses get gradients of 0, so weight decay and momentum still change them.",
    ),
    Mutation(
        name="ranks-evaluate-with-their-own-statistics",
        caught_by="tests/parity/test_exact_resume.py::test_a_killed_run_resumes_exactly",
        within="TrainState.evaluation_weights",
        old="self.strategy.before_evaluation(self.model)",
        new="pass",
        what="Ranks evaluate with BatchNorm statistics of their own, so val metrics aren't those of the saved model.",
    ),
    Mutation(
        name="outer-learning-rate-is-ignored",
        caught_by="tests/parity/test_local_sgd.py::test_it_ends_where_its_rule_does",
        within="LocalSGD.__init__",
        old='{"lr": outer_lr, "momentum": outer_momentum, "nesterov": nesterov}',
        new='{"lr": 1.0, "momentum": outer_momentum, "nesterov": nesterov}',
        what="strategy=local_sgd ignores strategy.outer_lr.",
    ),
    Mutation(
        name="butterfly-divides-by-a-power-of-two",
        caught_by="tests/unit/distributed/test_butterfly.py::test_butterfly_equals_an_all_reduce",
        within="butterfly_all_reduce_mean",
        old="parts((rank, rank + 1)).div_(world_size)",
        new="parts((rank, rank + 1)).div_(inner)",
        what="strategy=butterfly with three processes divides gradients by two.",
    ),
    Mutation(
        name="timeout-is-in-minutes",
        caught_by="tests/unit/distributed/test_collectives.py::test_a_collective_uses_the_latest_timeout",
        within="set_group_timeouts",
        old="timedelta(seconds=timeout_s)",
        new="timedelta(minutes=timeout_s)",
        what="A collective waits sixty times as long as backend.timeout before it fails.",
    ),
    Mutation(
        name="drift-of-two-replicas-is-not-seen",
        caught_by="tests/parity/test_unfreezing.py::test_drifting_replicas_are_noticed_when_saving",
        within="_unequal",
        old="len(values) > 1",
        new="len(values) > 2",
        what="Two replicas whose weights have drifted apart are saved without an error.",
    ),
    Mutation(
        name="pipeline-scales-by-all-ranks",
        caught_by="tests/parity/test_strategies.py::test_it_ends_as_a_plain_loop",
        within="Pipeline.run_window",
        old="self._share.world_size / window.global_count",
        new="self._context.world_size / window.global_count",
        what="With strategy=pipeline gradients are as many times too large as a pipeline has ranks.",
    ),
    Mutation(
        name="ranks-draw-the-same-numbers",
        caught_by="tests/features/test_repeatability.py::test_ranks_share_switches_and_draw_different_numbers",
        within="build_trainer",
        old="seed_everything(config.seed, rank=setup.seed_rank)",
        new="seed_everything(config.seed, rank=0)",
        what="All ranks draw the same dropout masks.",
    ),
]

CHECKPOINT = [
    Mutation(
        name="oldest-checkpoints-are-kept",
        caught_by="tests/unit/checkpoint/test_manager.py::test_retention_is_as_a_simple_model_says",
        within="Retention.to_delete",
        old="sorted(step for step in self._scores if step <= last)[-self._settings.save_last_k :]",
        new="sorted(step for step in self._scores if step <= last)[: self._settings.save_last_k]",
        what="checkpoint.save_last_k keeps the oldest checkpoints and deletes the one before the last.",
    ),
    Mutation(
        name="best-is-the-worst-checkpoint",
        caught_by="tests/unit/checkpoint/test_manager.py::test_retention_is_as_a_simple_model_says",
        within="Retention.ranking",
        old='self._settings.mode == "min"',
        new='self._settings.mode == "max"',
        what="`best` names the checkpoint with the worst metric.",
    ),
    Mutation(
        name="files-are-not-flushed-to-the-disk",
        caught_by="tests/unit/checkpoint/test_store.py::test_everything_is_flushed_before_it_gets_its_name",
        within="DirectFile.finish",
        old="os.fsync(self._descriptor)",
        new="pass",
        what="After a power cut a checkpoint bears its name while its files are empty or incomplete.",
    ),
    Mutation(
        name="resume-does-not-read-the-files",
        caught_by="tests/unit/checkpoint/test_finding.py::test_a_changed_file_means_an_earlier_checkpoint",
        within="CheckpointStorage.find_damage",
        old="content_damage(partial(self.read, checkpoint, file), manifest.files[file], thorough=thorough)",
        new="content_damage(partial(self.read, checkpoint, file), manifest.files[file], thorough=False)",
        what="Where the last checkpoint has a flipped byte, a resume fails instead of taking the one before it.",
    ),
    Mutation(
        name="checksum-of-the-last-mebibyte",
        caught_by="tests/unit/checkpoint/test_manager.py::test_each_checkpoint_holds_its_own_weights",
        within="_crc32_of",
        old="crc32(chunk, checksum)",
        new="crc32(chunk)",
        what="Every checkpoint with a file of more than 1 MiB is refused as damaged.",
    ),
    Mutation(
        name="newer-checkpoints-replace-a-damaged-last",
        caught_by="tests/unit/checkpoint/test_finding.py::test_a_changed_file_means_an_earlier_checkpoint",
        within="_from_last",
        old="step < newest",
        new="step > newest",
        what="Where the last checkpoint is damaged, earlier ones are not found and given-up newer ones are taken.",
    ),
    Mutation(
        name="every-rank-resumes-the-generators-of-rank-0",
        caught_by="tests/parity/test_exact_resume.py::test_a_killed_run_resumes_exactly",
        within="_restore_generators",
        old="saved[context.rank]",
        new="saved[0]",
        what="After a resume rank 1 and later draw other numbers than without the interruption, so it isn't exact.",
    ),
    Mutation(
        name="stale-metrics-are-saved",
        caught_by="tests/unit/test_trainer_checkpoints.py::test_a_due_checkpoint_has_only_its_metrics",
        within="Trainer.save",
        old="state.val_metrics if state.val_step == step else None",
        new="state.val_metrics or None",
        what="A checkpoint between two validations is ranked by metrics of weights that it doesn't hold.",
    ),
    Mutation(
        name="checkpoint-minutes-are-seconds",
        caught_by="tests/unit/checkpoint/test_manager.py::test_when_a_checkpoint_is_due",
        within="CheckpointManager.due_time",
        old="every * 60.0",
        new="every",
        what="checkpoint.every_n_minutes=30 saves every 30 seconds.",
    ),
    Mutation(
        name="resume-trains-from-the-average",
        caught_by="tests/features/test_callbacks.py::test_a_resumed_average_is_exact",
        within="_resume",
        old='training.get("model", checkpoint["model"])',
        new='checkpoint["model"]',
        what="A resumed run with the ema callback trains on from the averaged weights instead of the trained ones.",
    ),
]

CONFIG = [
    Mutation(
        name="an-hour-is-six-minutes",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_taken",
        within="_UNIT_S",
        old="3600",
        new="360",
        what="A time-out of 2h is one of 12 minutes.",
    ),
    Mutation(
        name="exclusive-bound-is-inclusive",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        within="is_within",
        old="value > above",
        new="value >= above",
        what="trainer.gradient_clip_val=0 is accepted, and nothing is learned.",
    ),
    Mutation(
        name="unused-gpus-are-accepted",
        caught_by="tests/unit/test_topology.py::test_every_gpu_is_used_once",
        within="resolve_topology",
        old="procs * span != gpus",
        new="procs * span > gpus",
        what="Processes that use fewer GPUs than trainer.gpus says are accepted, and GPUs stay idle without a word.",
    ),
    Mutation(
        name="model-parallel-replicas-overlap",
        caught_by="tests/unit/test_topology.py::test_every_gpu_is_used_once",
        within="Topology.device_indices",
        old="local_rank * self.span",
        new="local_rank",
        what="With two GPUs for each process, local ranks 0 and 1 share GPU 1, and the last GPU stays idle.",
    ),
    Mutation(
        name="validation-at-the-last-step-is-refused",
        caught_by="tests/unit/config/test_checks.py::test_combinations_that_are_accepted",
        within="validation_mistakes",
        old="every > last",
        new="every >= last",
        what="trainer.val_check_interval equal to trainer.max_steps is refused, though it validates at the end.",
    ),
    Mutation(
        name="no-suggestion-for-a-mistyped-key",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        within="nearest_key",
        old="max(scores)",
        new="min(scores)",
        what="A mistyped key such as trainer.gpsu gets no `Did you mean trainer.gpus?`.",
    ),
    Mutation(
        name="missing-keywords-are-found-late",
        caught_by="tests/unit/test_targets.py::test_each_mistake_names_its_key",
        within="_check_keywords",
        old='node.get("_partial_")',
        new='not node.get("_partial_")',
        what="A model without a required keyword isn't refused with what it takes, but raises a TypeError while built.",
    ),
    Mutation(
        name="one-mistake-at-a-time",
        caught_by="tests/unit/config/test_parse.py::test_all_mistakes_are_listed",
        within="as_text",
        old="len(mistakes) == 1",
        new="len(mistakes) >= 1",
        what="Of several mistakes in a configuration only the first is shown.",
    ),
    Mutation(
        name="true-is-accepted-as-a-number",
        caught_by="tests/unit/config/test_parse.py::test_values_that_are_refused",
        within="convert",
        old="type(value) is kind",
        new="isinstance(value, kind)",
        what="trainer.max_epochs=true is accepted as one epoch.",
    ),
]

JOBS = [
    Mutation(
        name="plan-halves-the-traffic",
        caught_by="tests/unit/test_planning.py::test_memory_traffic_and_checkpoint",
        within="_traffic",
        old="2 * (copies - 1) * (reduced // ranks) // copies",
        new="(copies - 1) * (reduced // ranks) // copies",
        what="job=plan reports half of what each rank sends and receives in a ring.",
    ),
    Mutation(
        name="predictions-of-the-last-rank-come-first",
        caught_by="tests/unit/test_predictions.py::test_csv_has_an_indexed_row_a_sample",
        within="concatenated",
        old="[part[name] for part in parts]",
        new="[part[name] for part in reversed(parts)]",
        what="The predictions of several processes are joined in the wrong order.",
    ),
    Mutation(
        name="export-in-training-mode",
        caught_by="tests/features/test_export.py::test_a_graph_computes_what_the_evaluated_model_does",
        within="load_source",
        old="model.eval()",
        new="model",
        what="An exported graph is that of training: BatchNorm takes the batch's statistics, and dropout is refused.",
    ),
    Mutation(
        name="suggests-the-rate-where-the-loss-falls-slowest",
        caught_by="tests/unit/tune/test_arithmetic.py::test_the_suggestion_moves_with_the_curve",
        within="suggest",
        old="torch.gradient(smoothed)[0][begins : lowest + 1].argmin()",
        new="torch.gradient(smoothed)[0][begins : lowest + 1].argmax()",
        what="job=tune suggests the learning rate at which the loss falls slowest.",
    ),
    Mutation(
        name="link-limit-is-in-bytes",
        caught_by="tests/unit/preflight/test_assessing.py::test_failures_name_place_value_and_limit",
        within="_measured",
        old='link["bytes_per_s"] / 1e6',
        new='link["bytes_per_s"]',
        what="preflight.min_link_bandwidth=1000 (MB/s) passes on a link that carries a thousand bytes a second.",
    ),
    Mutation(
        name="parity-always-succeeds",
        caught_by="tests/features/test_parity.py::test_the_first_difference_is_found_and_explained",
        within="Parity.run",
        old='0 if answer["same"] else 1',
        new="0",
        what="job=parity exits with status 0 though the weights are not the same.",
    ),
    Mutation(
        name="sweep-fails-only-if-all-jobs-do",
        caught_by="tests/features/test_sweeps.py::test_a_failing_trial_does_not_end_the_sweep",
        within="Worker.run",
        old="EXIT_RUN_FAILED if self._has_failed else 0",
        new="EXIT_RUN_FAILED if self._has_failed and self._is_stopping else 0",
        what="A sweep exits with status 0 though one of its jobs has failed.",
    ),
    Mutation(
        name="last-weights-are-tested",
        caught_by="tests/features/test_checkpoints.py::test_last_and_best_are_links_best_is_tested",
        within="_has_best_checkpoint",
        old="broadcast_object((setup.run_dir.checkpoints / BEST).exists(), setup.context)",
        new="not broadcast_object((setup.run_dir.checkpoints / BEST).exists(), setup.context)",
        what="The test at the end, and its column in the summary, are of the last weights instead of the best.",
    ),
    Mutation(
        name="oldest-unfinished-run-is-resumed",
        caught_by="tests/unit/jobs/test_saved_run.py::test_auto_is_the_newest_unfinished_training",
        within="newest_unfinished",
        old="sorted(folder.iterdir(), reverse=True)",
        new="sorted(folder.iterdir())",
        what="resume=auto resumes the oldest unfinished run instead of the newest.",
    ),
]
SWEEPS = [
    Mutation(
        "two-take-over-a-claim",
        caught_by="tests/unit/sweeps/test_claims.py::test_two_workers_never_both_take_over_a_claim",
        within="Claims._create",
        old="path.open('xb')",
        new="path.open('wb')",
        what="Two workers run one trial if both see that a third one was killed.",
    ),
    Mutation(
        "slow-worker-takes-an-old-claim",
        caught_by="tests/unit/sweeps/test_claims.py::test_a_worker_that_was_suspended_before_taking_takes_nothing",
        within="Claims._take",
        old="self._newest_generation(key) > claim.generation",
        new="False",
        what="A worker that was suspended at a bad moment runs a trial that another one runs.",
    ),
    Mutation(
        "pause-costs-claims",
        caught_by="tests/unit/sweeps/test_claims.py::test_a_pause_of_all_workers_costs_no_claim",
        within="_SEEN_AGAIN",
        old="1 / 6",
        new="0",
        what="After a laptop slept, one of two workers takes over the running trials of the other.",
    ),
    Mutation(
        "trials-are-repeated",
        caught_by="tests/unit/sweeps/test_folder.py::test_numbers_continue_and_nothing_is_repeated",
        within="SweepFolder._new_trials",
        old="key not in known",
        new="True",
        what="Values that are typed again when a sweep is continued are trained again.",
    ),
    Mutation(
        "sweep-secrets-for-all",
        caught_by="tests/unit/sweeps/test_folder.py::test_passwords_are_in_a_file_of_the_owner_only",
        within="SweepPlan.write",
        old="write_object(folder.sweep_file, {'version': _VERSION, **asdict(masked)})",
        new="write_object(folder.sweep_file, {'version': _VERSION, **asdict(self)})",
        what="The API keys of a sweep are in sweep.json, which everybody can read.",
    ),
]
STEPS = [
    Mutation(
        name="closure-draws-new-numbers",
        caught_by="tests/features/test_closures.py::test_each_call_of_a_step_draws_the_same_numbers",
        within="ClosureSteps.run",
        old="restore_generator_states(generators, devices=devices)",
        new="None",
        what="LBFGS compares losses with different dropout masks.",
    ),
    Mutation(
        name="closure-returns-own-loss",
        caught_by="tests/features/test_closures.py::test_closures_train_as_in_a_plain_loop_and_resume",
        within="ClosureSteps._pass",
        old="sum_over_ranks(part.grad, context) / context.world_size",
        new="part.grad",
        what="Each rank's line search follows the loss of its own samples.",
    ),
    Mutation(
        name="schedule-free-weights-are-rounded",
        caught_by="tests/features/test_optimizers.py::test_schedule_free_weights_are_evaluated_and_others_trained",
        within="weights_to_evaluate",
        old="parameter.copy_(copy)",
        new="pass",
        what="A run that is evaluated more often ends with other weights.",
    ),
    Mutation(
        name="task-state-has-the-model",
        caught_by="tests/features/test_trained_tasks.py::test_a_checkpoint_has_each_parameter_once",
        within="without_model_state",
        old="name not in shared",
        new="True",
        what="Checkpoints hold the model twice if the task keeps it as an attribute.",
    ),
    Mutation(
        name="bare-model-is-trained",
        caught_by="tests/features/test_trained_tasks.py::test_what_no_strategy_would_average_is_refused",
        within="DDP.accumulate",
        old="model.require_forward_param_sync is None",
        new="False",
        what="A task that calls the bare model trains each process by itself.",
    ),
    Mutation(
        name="positions-are-those-of-the-rank",
        caught_by="tests/features/test_step_info.py::test_a_contrastive_loss_is_that_of_one_process",
        within="BatchInfos._begin",
        old="sum(self._sizes(window)[: self._share.rank])",
        new="0",
        what="Every rank takes the first samples of the gathered batch for its own.",
    ),
    Mutation(
        name="slots-of-the-first-rank",
        caught_by="tests/features/test_slot_state.py::test_resumes_on_another_number_of_processes",
        within="SlotState._own_slots",
        old="self._context.rank",
        new="0",
        what="After a resume, all ranks continue with the hidden states of the first rank's samples.",
    ),
    Mutation(
        name="changed-frozen-weights-are-accepted",
        caught_by="tests/features/test_adapters.py::test_a_small_checkpoint_resumes_exactly",
        within="_changed",
        old="hash_of(state[name].detach()) != value",
        new="False",
        what="Adapters are evaluated on a base model with other weights than those they were trained on.",
    ),
    Mutation(
        name="share-of-an-epoch-is-rounded-up",
        caught_by="tests/features/test_lightning_data.py::test_weights_batches_and_validations_are_lightnings",
        within="EpochSteps.share",
        old="int(self.of(epoch) * share)",
        new="math.ceil(self.of(epoch) * share)",
        what="trainer.val_check_interval=0.5 validates a step later than Lightning in epochs of odd length.",
    ),
    Mutation(
        name="drop-last-of-evaluation-is-ignored",
        caught_by="tests/features/test_lightning_data.py::test_drop_last_leaves_the_same_samples_on_any_number_of_processes",
        within="_evaluated",
        old="len(dataset) // batch_size * batch_size",
        new="len(dataset)",
        what="An evaluation loader with drop_last=True evaluates its incomplete batch, too.",
    ),
    Mutation(
        name="copied-model-has-random-weights",
        caught_by="tests/features/test_copying_tasks.py::test_a_copy_begins_with_the_weights_of_init_from",
        within="load_for_task",
        old="config.init_from is None",
        new="True",
        what="A momentum encoder begins with random weights although the model has those of init_from.",
    ),
    Mutation(
        name="evaluation-forgets-the-task",
        caught_by="tests/features/test_copying_tasks.py::test_an_evaluation_has_the_state_of_the_task",
        within="load_task",
        old='"task" in training',
        new="False",
        what="job=eval evaluates with a task as it is built, without the momentum encoder that was saved.",
    ),
    Mutation(
        name="longest-loader-ends-with-the-shortest",
        caught_by="tests/features/test_lightning_data.py::test_weights_batches_and_validations_are_lightnings",
        within="CombinedBatches.num_batches",
        old='self._mode == "min_size"',
        new="True",
        what="Several train loaders end an epoch with the shortest one, whatever the mode.",
    ),
    Mutation(
        name="partial-is-called",
        caught_by="tests/unit/config/test_instantiate.py::test_nodes_are_built_as_hydra_builds_them",
        within="_build_node",
        old='node.get("_partial_", False)',
        new="False",
        what="A node inside with `_partial_: true` is called instead of passed on as a function.",
    ),
]
MUTATIONS = [*LAUNCH, *TRAINER, *DATA, *STRATEGIES, *CHECKPOINT, *CONFIG, *JOBS, *SWEEPS, *STEPS]


def outcome(mutation: Mutation, sources: dict[Path, str]) -> str:
    """Return "make test" or "make test-all", whichever catches it first, or "missed"."""
    path, source = mutated(mutation, sources)
    file, _, function = mutation.caught_by.partition("::")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__", "dist", "build"))
        (copy / path).write_text(source, encoding="utf-8")
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
    options = parser.parse_args(arguments)
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = set(options.names) - by_name.keys()
    if unknown:
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
    mutations = [by_name[name] for name in options.names or by_name]
    sources = framework_sources()

    mistakes = []
    for mutation in mutations:
        try:
            mutated(mutation, sources)
        except (MutationError, SyntaxError) as error:
            mistakes.append(str(error))
    if mistakes:
        print("\n".join(mistakes))
        return 1
    if options.check:
        return 0

    outcomes = []
    for mutation in mutations:
        how = outcome(mutation, sources)
        outcomes.append(how)
        print(f"{mutation.name:50}{how:16}{mutation.caught_by}", flush=True)
    print(", ".join(f"{how}: {outcomes.count(how)}" for how in ("make test", "make test-all", "missed")))
    return int("missed" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
