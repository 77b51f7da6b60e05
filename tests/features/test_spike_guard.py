"""callbacks=[spike_guard]: an outlier's update is left out, or its samples are skipped after a rollback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.features.fault_cases import poisoned
from tests.helpers import results
from tests.helpers.loops import plain_loop
from tests.helpers.recipes import write_recipe

Train = Callable[..., Path]

STEPS = 12
# Sample 123 is one of step 7.
SPIKY = (
    "recipe=toy",
    "logger=[jsonl,tensorboard]",
    "data.datasets._target_=tests.features.fault_cases.poisoned",
    "+data.datasets.index=123",
    "+data.datasets.value=1000.0",
    "data.shuffle=false",
    "data.global_batch_size=20",
    f"trainer.max_steps={STEPS}",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=4",
    "checkpoint.monitor=null",
    "checkpoint.every_n_steps=3",
)
GUARDED = ("callbacks=[spike_guard]", "callbacks.spike_guard.window=16")


def batches() -> list[list[object]]:
    inputs, targets = poisoned(123, 1000.0).train.tensors
    return [list(pair) for pair in zip(inputs.split(20)[:STEPS], targets.split(20)[:STEPS], strict=True)]


@pytest.fixture
def guarded_run(shared_run: Train) -> Path:
    return shared_run(*SPIKY, *GUARDED)


def test_a_spikes_update_is_left_out_and_its_samples_are_named(guarded_run: Path) -> None:
    without = batches()
    del without[6]
    results.assert_same(results.weights(guarded_run), plain_loop(without))  # type: ignore[arg-type]
    assert results.results(guarded_run)["steps"] == STEPS
    (spike,) = results.run_file(guarded_run)["spikes"]
    assert (spike["step"], spike["number"], spike["rolls_back"]) == (7, 7, False)
    assert spike["values"].keys() == {"grad_norm", "loss"}
    assert spike["samples"] == list(range(120, 140))
    log = results.log(guarded_run)
    assert "spike_guard: step 7: grad_norm" in log
    assert "Samples 120, 121, 122, 123, 124, 125, 126, 127 and 12 more. The update is left out" in log


@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_ranks_leave_out_the_same_update(train: Train, guarded_run: Path, strategy: str) -> None:
    place = ("topology.procs_per_node=2", "trainer.accumulate_grad_batches=2", f"strategy={strategy}")
    run = train(*SPIKY, *GUARDED, *place)
    results.assert_same(results.weights(run), results.weights(guarded_run), tolerance=1e-5)
    (spike,) = results.run_file(run)["spikes"]
    (wanted,) = results.run_file(guarded_run)["spikes"]
    assert spike["values"] == pytest.approx(wanted["values"], rel=1e-4)
    assert spike["samples"] == wanted["samples"]


def test_a_resumed_guard_remembers_what_is_usual(train: Train, guarded_run: Path) -> None:
    run = train(*SPIKY, *GUARDED, "trainer.max_steps=6")
    train(f"resume={run}", f"trainer.max_steps={STEPS}")
    results.assert_same(results.weights(run), results.weights(guarded_run))
    assert results.run_file(run)["spikes"] == results.run_file(guarded_run)["spikes"]


@pytest.mark.multiproc
def test_a_rollback_restarts_without_the_samples(train: Train) -> None:
    """The clipping by value shows that the norm is that of before."""
    common = (
        *SPIKY,
        "topology.procs_per_node=2",
        "trainer.gradient_clip_algorithm=value",
        "trainer.gradient_clip_val=1",
    )
    rolled_back = train(*common, *GUARDED, "callbacks.spike_guard.action=rollback", "launcher.max_restarts=1")
    skipping = train(*common, "data.skip_steps=[7]")
    results.assert_same(results.weights(rolled_back), results.weights(skipping))
    record = results.run_file(rolled_back)
    assert len(record["restarts"]) == 1
    assert [entry["step"] for entry in record["skipped"]] == [7]
    assert record["skipped"] == results.run_file(skipping)["skipped"]


@pytest.fixture
def rolled_back_run(shared_run: Train) -> Path:
    """Its step 7 is the eighth batch."""
    return shared_run(*SPIKY, *GUARDED, "callbacks.spike_guard.action=rollback", "launcher.max_restarts=1")


def test_a_branch_leaves_out_what_was_rolled_back(train: Train, rolled_back_run: Path) -> None:
    made = train("job=branch", f"run={rolled_back_run}", "step=3")
    results.assert_same(results.weights(made), results.weights(rolled_back_run))
    assert results.run_file(made)["branch_of"]["changed"] == {"data.skip_steps": [[], [7]]}
    # Its step 9 is the tenth batch.
    skipping = train("job=branch", f"run={rolled_back_run}", "step=6", "skip=[9]")
    wanted = train(*SPIKY, *GUARDED, "data.skip_steps=[7,10]")
    results.assert_same(results.weights(skipping), results.weights(wanted))


def test_without_restarts_a_resume_skips_the_samples(train: Train) -> None:
    run = train(*SPIKY, *GUARDED, "callbacks.spike_guard.action=rollback", status=1)
    assert "continues from the last checkpoint without these samples" in results.failure(run)["cause"]
    train(f"resume={run}")
    assert results.results(run)["steps"] == STEPS
    assert [entry["step"] for entry in results.run_file(run)["skipped"]] == [7]


def test_a_kill_in_the_middle_of_a_rollback_changes_nothing(train: Train, rolled_back_run: Path) -> None:
    """The step is recorded, and the process is killed before it has ended."""
    killed = ("+callbacks.kill._target_=tests.features.fault_cases.KilledOnce", "+callbacks.kill.file=killed")
    run = train(*SPIKY, *GUARDED, *killed, "callbacks.spike_guard.action=rollback", status=1)
    assert results.run_file(run)["spikes"] == results.run_file(rolled_back_run)["spikes"]
    train(f"resume={run}")
    results.assert_same(results.weights(run), results.weights(rolled_back_run))
    assert results.run_file(run)["skipped"] == results.run_file(rolled_back_run)["skipped"]


@pytest.mark.exhaustive
def test_a_scaler_and_an_average_of_weights_go_with_it(train: Train) -> None:
    run = train(*SPIKY, "callbacks=[spike_guard,ema]", "callbacks.spike_guard.window=16", "trainer.precision=16-mixed")
    (spike,) = results.run_file(run)["spikes"]
    assert (spike["step"], spike["samples"]) == (7, list(range(120, 140)))
    assert results.results(run)["steps"] == STEPS


def test_the_update_of_one_objective_is_left_out(train: Train, tmp_path: Path) -> None:
    """As of a GAN's discriminator: the other one is trained in the same step."""
    sections = {
        "defaults": [{"override /optimizer": None}, {"override /logger": "jsonl"}],
        "model": {"_target_": "tests.features.optimizer_cases.Heads"},
        "task": {"_target_": "tests.features.optimizer_cases.Alternating", "every": 1},
        "data": {
            "datasets": {"_target_": "tests.features.fault_cases.two_targets", "index": 100, "value": 1000.0},
            "global_batch_size": 12,
            "shuffle": False,
        },
        "optimizer": {
            "copy": {"_target_": "torch.optim.Adam", "params": "^(body|copy)", "lr": 0.001},
            "guess": {"_target_": "torch.optim.SGD", "lr": 0.001},
        },
        "trainer": {"max_epochs": None, "max_steps": 10},
        "checkpoint": {"every_n_steps": 1, "save_top_k": -1, "monitor": None},
    }
    write_recipe(tmp_path, "heads", sections)
    run = train("recipe=heads", *GUARDED)
    (spike,) = results.run_file(run)["spikes"]
    assert (spike["step"], spike["values"].keys()) == (9, {"guess/grad_norm", "guess/loss"})
    before = results.weights(run, "step_00000008")
    after = results.weights(run, "step_00000009")
    changed = {name.partition(".")[0] for name in before if not before[name].equal(after[name])}
    assert changed == {"body", "copy"}


def test_steps_that_others_make_are_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    guarded = ("recipe=toy", "callbacks=[spike_guard]")
    train(*guarded, "callbacks.spike_guard.action=undo", status=2)
    assert "use one of skip, rollback" in capsys.readouterr().err
    removed = ("~optimizer.momentum", "~optimizer.weight_decay", "~optimizer.nesterov")
    train(*guarded, "optimizer._target_=torch.optim.LBFGS", *removed, status=2)
    assert "SpikeGuard decides about each update" in capsys.readouterr().err
