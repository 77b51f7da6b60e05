"""`job=branch`: a new run continues from a step of another one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.internals import compose

SHORT = (
    "recipe=toy",
    "logger=[jsonl,tensorboard]",
    "trainer.max_steps=40",
    "trainer.limit_test_batches=0",
    "trainer.val_check_interval=20",
    "trainer.log_every_n_steps=5",
    "checkpoint.every_n_steps=10",
    "checkpoint.save_top_k=-1",
)


@pytest.fixture
def whole_run(shared_run):
    return shared_run(*SHORT)


def branch(train, run: Path, step: int, *changes: str, status: int = 0) -> Path:
    made: Path = train("job=branch", f"run={run}", f"step={step}", *changes, status=status)
    return made


def branch_of(run: Path) -> dict[str, object]:
    facts: dict[str, object] = results.run_file(run)["branch_of"]
    return facts


def test_a_branch_without_changes_is_the_run_itself(train, whole_run, capfd):
    made = branch(train, whole_run, 20)
    results.assert_same(results.weights(made), results.weights(whole_run))
    curve = results.curve(whole_run, "train/loss")
    assert results.curve(made, "train/loss") == {step: loss for step, loss in curve.items() if step > 20}
    assert [event.step for event in results.events(made).Scalars("train/loss")] == [25, 30, 35, 40]
    assert branch_of(made) == {
        "run": str(whole_run),
        "step": 20,
        "checkpoint": "step_00000020",
        "repeated": 0,
        "changed": {},
    }
    assert f"Branching off {whole_run} after step 20" in capfd.readouterr().out
    # It takes no space.
    model = Path("checkpoints/step_00000020/model.pt")
    assert (made / model).samefile(whole_run / model)


def test_a_value_that_is_nan_has_not_changed(train):
    data = (
        "data.datasets._target_=tests.features.fault_cases.poisoned",
        "+data.datasets.index=1000",
        "+data.datasets.value=nan",
        "data.shuffle=false",
    )
    run = train(*SHORT, *data, "trainer.max_steps=10", "trainer.val_check_interval=10")
    assert branch_of(branch(train, run, 10))["changed"] == {}


def test_a_branch_between_checkpoints_repeats_the_steps_before_it(train, whole_run, capfd):
    made = branch(train, whole_run, 27)
    results.assert_same(results.weights(made), results.weights(whole_run))
    curve = results.curve(whole_run, "train/loss")
    assert results.curve(made, "train/loss") == {step: loss for step, loss in curve.items() if step > 27}
    assert (branch_of(made)["checkpoint"], branch_of(made)["repeated"]) == ("step_00000020", 7)
    assert "Repeating 7 steps" in capfd.readouterr().out
    assert results.saved_steps(made) == [27, 30, 40]
    assert sorted(path.name for path in made.iterdir() if path.name.startswith(".")) == []


def test_what_is_typed_holds_from_the_step_on(train, whole_run, capfd):
    made = branch(train, whole_run, 15, "optimizer.lr=0.02", "trainer.max_steps=20", "trainer.log_every_n_steps=1")
    assert set(results.curve(made, "train/lr").values()) == {0.02}
    assert branch_of(made)["changed"] == {
        "optimizer.lr": [0.001, 0.02],
        "trainer.max_steps": [40, 20],
        "trainer.log_every_n_steps": [5, 1],
    }
    assert "  optimizer.lr=0.02 (it was 0.001)" in capfd.readouterr().out
    # The steps before it were repeated with the old one.
    same = branch(train, whole_run, 15)
    results.assert_same(results.weights(made, "step_00000015"), results.weights(same, "step_00000015"))


def test_the_branch_has_what_was_in_force_after_the_step(train):
    """The run was resumed with another learning rate at step 20, and has no checkpoint of that time."""
    run = train(*SHORT, "trainer.max_steps=20")
    train(f"resume={run}", "optimizer.lr=0.02", "trainer.max_steps=40")
    shutil.rmtree(run / "checkpoints" / "step_00000020")
    results.assert_same(results.weights(branch(train, run, 20)), results.weights(run))
    results.assert_same(results.weights(branch(train, run, 25)), results.weights(run))


CHANGES = (
    ("optimizer=sgd",),
    ("scheduler=step", "scheduler.schedule.step_size=2"),
    ("trainer.max_steps=60", "scheduler=cosine"),
    ("seed=7",),
    ("data.global_batch_size=10",),
    ("callbacks=[ema]",),
    ("topology.procs_per_node=2",),
    ("data.folds=5", "data.fold=1"),
)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes[0])
def test_any_key_may_change(train, whole_run, changes):
    """A resume from the branch point, as after a kill before the first checkpoint, may have the changes as well."""
    made = branch(train, whole_run, 20, *changes)
    again = Path(shutil.copytree(made, made.with_name("again"), symlinks=True))
    train(f"resume={again}/checkpoints/step_00000020")
    assert results.results(made)["steps"] >= 40
    results.assert_same(results.weights(again), results.weights(made))


def test_a_resume_of_the_branch_may_not_change_more(train, whole_run):
    made = branch(train, whole_run, 20, "optimizer=sgd", "trainer.max_steps=30")
    train(f"resume={made}", "optimizer=adamw", status=2)


def test_another_schedule_goes_on_as_if_it_had_been_used_before(train, whole_run):
    schedule = (
        "scheduler=step",
        "scheduler.interval=step",
        "scheduler.schedule.step_size=8",
        "scheduler.schedule.gamma=0.5",
    )
    made = branch(train, whole_run, 20, *schedule, "trainer.log_every_n_steps=1", "optimizer.lr=0.08")
    rates = results.curve(made, "train/lr")
    assert [rates[step] for step in (21, 24, 25, 32, 33)] == pytest.approx([0.02, 0.02, 0.01, 0.01, 0.005])


def test_samples_of_steps_are_left_out(train, whole_run):
    """As in a run that skips them from the start."""
    made = branch(train, whole_run, 20, "skip=[25,30]")
    wanted = train(*SHORT, "data.skip_steps=[25,30]")
    results.assert_same(results.weights(made), results.weights(wanted))
    assert [entry["step"] for entry in results.run_file(made)["skipped"]] == [25, 30]
    assert branch_of(made)["changed"] == {"data.skip_steps": [[], [25, 30]]}
    assert "data.skip_steps=[25,30]" in results.run_file(made)["overrides"]


def test_steps_of_a_run_that_has_skipped_some_are_counted_as_it_did(train, whole_run):
    """Its step 30 would be number 31 if none was skipped."""
    first = branch(train, whole_run, 20, "skip=[25]")
    second = branch(train, first, 28, "skip=[30]")
    wanted = train(*SHORT, "data.skip_steps=[25,31]")
    results.assert_same(results.weights(second), results.weights(wanted))


def test_skipped_samples_are_trained_later(train):
    settings = (*SHORT, "trainer.limit_train_batches=15")
    run = train(*settings)
    made = branch(train, run, 10, "skip=[12]", "branch.skipped=later")
    wanted = train(*settings, "data.defer_steps=[12]")
    results.assert_same(results.weights(made), results.weights(wanted))


def test_a_branch_of_a_branch(train, whole_run, capfd):
    first = branch(train, whole_run, 10)
    second = branch(train, first, 25)
    results.assert_same(results.weights(second), results.weights(whole_run))
    assert branch_of(second)["run"] == str(first)
    capfd.readouterr()
    branch(train, first, 5, status=2)
    assert f"begins after step 10 of {whole_run}, which has computed step 6" in capfd.readouterr().err


def test_a_branch_resumes_exactly(train, whole_run):
    made = branch(train, whole_run, 17, "trainer.max_steps=25")
    train(f"resume={made}", "trainer.max_steps=40")
    results.assert_same(results.weights(made), results.weights(whole_run))
    assert results.repeated(made) == {}


@pytest.mark.parametrize("step", [18, pytest.param(33, marks=pytest.mark.exhaustive)])
def test_a_branch_that_is_killed_resumes_exactly(train, whole_run, step):
    """Before its first own checkpoint, and after it."""
    changes = ("optimizer.lr=0.002", "skip=[20]")
    killed = ("+callbacks.kill._target_=tests.features.fault_cases.KilledOnce", f"+callbacks.kill.step={step}")
    made = branch(train, whole_run, 17, *changes, *killed, "+callbacks.kill.file=killed", status=1)
    train(f"resume={made}")
    wanted = branch(train, whole_run, 17, *changes)
    results.assert_same(results.weights(made), results.weights(wanted))
    assert results.curve(made, "train/loss") == results.curve(wanted, "train/loss")


def test_a_ctrl_c_while_steps_are_repeated_leaves_no_run(train, fork_server, tmp_path, monkeypatch, capfd):
    file = tmp_path / "interrupt"
    interrupted = (
        "+callbacks.interrupt._target_=tests.features.fault_cases.Interrupted",
        "+callbacks.interrupt.step=3",
    )
    run = train(
        *SHORT, *interrupted, f"+callbacks.interrupt.file={file}", "checkpoint.every_n_steps=20", "trainer.max_steps=20"
    )
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert compose.main(["job=branch", f"run={run}", "step=18"], fork_server=fork_server) == 130
    assert "Nothing to resume; rerun the command." in capfd.readouterr().err
    assert list((tmp_path / "outputs").glob("toy/*")) == [run]


def test_a_branch_can_be_rerun_and_resumed_by_its_own_commands(train, whole_run):
    made = branch(train, whole_run, 20, "optimizer.lr=0.02", "trainer.max_steps=25")
    overrides = results.run_file(made)["overrides"]
    assert "optimizer.lr=0.02" in overrides
    assert not [text for text in overrides if text.startswith(("job=", "run=", "step="))]
    assert results.results(train(f"rerun={made}", "logger=jsonl"))["steps"] == 25


WRONG = (
    (("step=20", "skip=[41]"), "has made 40 steps, as far as its records show, and these are steps of it"),
    (("step=20", "skip=[20]"), "step 20 isn't after step=20, from which the new run continues. Use step=19"),
    (("step=1", "skip=[1]"), "To begin at the first step: python -m framework rerun="),
    (("step=20", "data.skip_steps=[7]"), "in step 7 can't change any more. Use step=6, or an earlier one."),
    (("step=99",), "has made 40 steps, as far as its records show. Use step=40."),
    ((), "job=branch needs step"),
    (
        ("step=20", "model._target_=torch.nn.Linear", "+model.in_features=10", "+model.out_features=5"),
        "don't fit the model",
    ),
    (("step=20", "topology.nnodes=2", "topology.rdzv_endpoint=here:1"), "starts on one machine"),
    (("step=20", "trainer.fast_dev_run=true"), "it writes no checkpoints"),
)


@pytest.mark.parametrize(("typed", "answer"), WRONG)
def test_a_wrong_request_leaves_no_run(train, whole_run, tmp_path, capfd, typed, answer):
    train("job=branch", f"run={whole_run}", *typed, status=2)
    assert answer in capfd.readouterr().err
    assert list((tmp_path / "outputs").glob("*/*")) == []
