"""`data.skip_steps` and `data.defer_steps` through the command: what is trained, recorded and resumed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import exact, results
from tests.helpers.loops import plain_loop, toy_batches

Train = Callable[..., Path]

SHORT = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.limit_train_batches=6",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=3",
)
# The second epoch loses its first and last step; the third one begins with step 13.
SKIPPING = ("data.skip_steps=[3,7,12]", "data.defer_steps=[2,14]")
ORDER = (1, 4, 5, 6, 2, 8, 9, 10, 11, 13, 15, 16, 17, 18, 14)


@pytest.fixture
def whole_run(shared_run: Train) -> Path:
    return shared_run(*SHORT, *SKIPPING)


def test_skipping_trains_like_a_loop_without_these_batches(whole_run: Path) -> None:
    batches = toy_batches(epochs=3, batches=6)
    wanted = plain_loop([batches[number - 1] for number in ORDER])
    results.assert_same(results.weights(whole_run), wanted)
    assert results.results(whole_run)["steps"] == len(ORDER)
    assert list(results.curve(whole_run, "val/loss")) == [5, 9, 15]


def test_skipped_samples_are_in_the_record(whole_run: Path) -> None:
    record = results.run_file(whole_run)["skipped"]
    assert [(entry["step"], entry["epoch"], entry["deferred"]) for entry in record] == [
        (2, 0, True),
        (3, 0, False),
        (7, 1, False),
        (12, 1, False),
        (14, 2, True),
    ]
    assert record[1]["positions"] == [40, 60]
    assert len(set(record[1]["samples"])) == 20
    assert "The samples of step 3 are skipped: number 40 to 59 in the order of epoch 0" in results.log(whole_run)


@pytest.mark.multiproc
def test_ranks_that_accumulate_skip_the_same_samples(train: Train, whole_run: Path) -> None:
    run = train(
        *SHORT,
        *SKIPPING,
        "topology.procs_per_node=2",
        "trainer.accumulate_grad_batches=2",
        "trainer.limit_train_batches=12",
        "data.global_batch_size=20",
        "data.num_workers=1",
        "data.loader=dataloader",
    )
    results.assert_same(results.weights(run), results.weights(whole_run), tolerance=1e-6)
    assert results.run_file(run)["skipped"] == results.run_file(whole_run)["skipped"]


@pytest.mark.parametrize("steps", [4, 14])
def test_a_resumed_run_skips_the_same_samples(train: Train, whole_run: Path, steps: int) -> None:
    run = train(*SHORT, *SKIPPING, f"trainer.max_steps={steps}")
    train(f"resume={run}", "trainer.max_steps=null")
    results.assert_same(results.weights(run), results.weights(whole_run))
    assert exact.numbers(run) == exact.numbers(whole_run)
    assert results.run_file(run)["skipped"] == results.run_file(whole_run)["skipped"]


def test_a_resumed_run_may_skip_more(train: Train) -> None:
    """As after a spike: all that was left of an epoch is passed over, and the next one has no step at all."""
    run = train(*SHORT, "trainer.max_epochs=null", "trainer.max_steps=4")
    train(f"resume={run}", "trainer.max_steps=10", f"data.skip_steps={[5, 6, *range(7, 13), 13]}".replace(" ", ""))
    batches = toy_batches(epochs=4, batches=6)
    wanted = plain_loop([*batches[:4], *batches[13:19]])
    results.assert_same(results.weights(run), wanted)
    assert results.results(run)["epochs"] == 3


def test_validations_in_an_epoch_are_as_many(train: Train) -> None:
    """Half of the first epoch ends with a step that is skipped."""
    run = train(*SHORT, "trainer.max_epochs=2", "trainer.val_check_interval=0.5", "data.skip_steps=[3]")
    assert list(results.curve(run, "val/loss")) == [3, 5, 8, 11]


def test_wrong_steps_are_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train(*SHORT, "data.skip_steps=3", status=2)
    assert "Write data.skip_steps=[3]." in capsys.readouterr().err
    train(*SHORT, "data.skip_steps=[0]", status=2)
    assert "a list of steps such as [120,121], counted from 1" in capsys.readouterr().err
    train(*SHORT, "data.skip_steps=[3,4]", "data.defer_steps=[4]", status=2)
    assert "both have 4" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["skip_steps", "defer_steps"])
def test_a_step_that_was_trained_cannot_be_skipped(
    train: Train, whole_run: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """The message's command is one that can be typed."""
    steps = [3, 4, 17] if key == "skip_steps" else [4, 14]
    change = f"data.{key}={steps}".replace(" ", "")
    train(f"resume={whole_run}", change, "trainer.max_epochs=4", status=2)
    advice = capsys.readouterr().err.strip().splitlines()[-1]
    assert "job=branch" in advice
    branch = shlex.split(advice.partition("python -m framework ")[2])
    made = train(*branch, "trainer.max_steps=5")
    assert results.results(made)["steps"] == 5


def test_a_step_is_left_out_for_good(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps behind the checkpoint that is named may change, and those that stay the same."""
    run = train(*SHORT, "trainer.max_epochs=1", "data.skip_steps=[1,3]", "checkpoint.every_n_steps=1")
    train(f"resume={run}", "data.skip_steps=[3]", "trainer.max_epochs=2", status=2)
    assert "python -m framework rerun=" in capsys.readouterr().err
    train(f"resume={run}", "data.skip_steps=[1,3,8]", "trainer.max_epochs=2")
    assert [entry["step"] for entry in results.run_file(run)["skipped"]] == [1, 3, 8]


def test_a_run_that_has_ended_says_that_nothing_is_trained(
    train: Train, whole_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("job=branch", f"run={whole_run}", "step=15")
    assert "No step was trained: the run had made 15 steps when this command began" in capsys.readouterr().out
