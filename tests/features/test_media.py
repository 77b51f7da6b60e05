"""What tasks and callbacks return to be logged reaches each logger that can show it, from rank 0, with its step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from framework import DataError, Image, Table
from framework.errors import TargetError
from framework.tasks import PredictedAgainstTrue, WorstMistakes
from tests.helpers import results
from tests.helpers.internals import media_of, picture_from, pixels_of

CASES = "tests.features.media_cases"
SHORT = ("recipe=toy", "trainer.limit_train_batches=10", "trainer.limit_test_batches=0", "trainer.max_epochs=1")
LOGGED = (*SHORT, "logger=[tensorboard,jsonl,console]", "trainer.log_every_n_steps=5")
TWO = "topology.procs_per_node=2"
SHOWING = (
    "task=showing",
    "data.batch_size=8",
    "data.eval_batch_size=8",
    "trainer.accumulate_grad_batches=2",
    "trainer.limit_train_batches=20",
)


@pytest.fixture(autouse=True)
def option(request: pytest.FixtureRequest) -> None:
    if "tmp_path" in request.fixturenames:
        folder: Path = request.getfixturevalue("tmp_path")
        (folder / "conf/task").mkdir(parents=True)
        (folder / "conf/task/showing.yaml").write_text(f"_target_: {CASES}.Showing\n")


def lines(run_dir: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (run_dir / "lines.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.multiproc)])
def test_rank_0_makes_media_for_logged_steps(train, tmp_path, ranks):
    run_dir = train(*LOGGED, *SHOWING, f"topology.procs_per_node={ranks}")
    # Steps 5 and 10 are shown, each with one of two micro-batches.
    assert results.log(run_dir).count("SHOWN training") == 2
    # One of many batches is shown, and none in the sanity check.
    assert results.log(run_dir).count("SHOWN validation") == 1
    assert ranks == 1 or "SHOWN" not in results.log(run_dir, 1)
    events = results.events(run_dir)
    assert {"train/output", "val/output"} <= set(events.Tags()["histograms"])
    assert [event.step for event in events.Images("train/input")] == [5, 10]
    assert [event.step for event in events.Images("val/input")] == [10]


def test_without_a_logger_no_media_is_made(train, tmp_path):
    assert "SHOWN" not in results.log(train(*SHORT, *SHOWING, "logger=none"))


REPORTING = (*LOGGED, "~task.metrics.predicted", f"+callbacks.reporting._target_={CASES}.Reporting")


@pytest.fixture
def artifact(tmp_path):
    (tmp_path / "conf.txt").write_text("content")


@pytest.mark.multiproc
@pytest.mark.usefixtures("artifact")
def test_what_callbacks_report(train):
    run_dir = train(*REPORTING, TWO, "trainer.max_epochs=2", f"+logger.lines._target_={CASES}.Lines")
    assert results.curve(run_dir, "train/epoch_start") == {0: 0, 10: 1}
    assert results.curve(run_dir, "train/epoch_end") == {10: 0, 20: 1}
    # The value is rank 0's, of the step that isn't logged otherwise.
    assert results.curve(run_dir, "train/third") == {3: 3}
    # Pairs: the sums of both ranks over those of the counts, since the last log.
    expected = {step: 3 * sum(range(step - 4, step + 1)) / 15 for step in (5, 10, 15, 20)}
    assert results.curve(run_dir, "train/step_sum") == expected
    assert results.curve(run_dir, "train/of_one_rank") == dict.fromkeys(expected, 2.0)
    assert results.curve(run_dir, "val/val_sum") == {10: 0.5, 20: 0.5}
    seen = [line for line in lines(run_dir) if line[0] not in ("metrics", "results") and line[1] != "summary"]
    once = lambda step: [  # noqa: E731
        ["images", "val/image", step, [[3, 4, 5]]],
        ["images", "val/images", step, [[2, 2], [1, 2, 2]]],
        ["figure", "val/figure", step, "Figure"],
        ["histogram", "val/histogram", step, 10],
        ["table", "val/table", step, [["a|b", 0.5], [None, 1], ["torch.float32", 1]]],
        ["text", "val/text", step, "some *text*"],
        ["artifact", "val/a file", step, "conf.txt"],
    ]
    assert seen == [["text", "config", 0, ""], *once(10), *once(20)]
    events = results.events(run_dir)
    assert events.Tags()["images"] == ["val/image", "val/images/0", "val/images/1", "val/figure"]
    assert events.Tags()["histograms"] == ["val/histogram"]
    (table, _) = events.Tensors("val/table/text_summary")
    assert table.tensor_proto.string_val[0].decode().splitlines()[2] == "| a\\|b | 0.5 |"


def test_pairs_waiting_for_a_log_are_resumed(train, artifact):
    whole = train(*REPORTING)
    stopped = train(*REPORTING, "+callbacks.reporting.stop_after=7")
    assert results.results(stopped)["ended_by"] == "enough"
    assert results.results(stopped)["steps"] == 7
    part = train(*REPORTING, "trainer.max_steps=7")
    resumed = train(f"resume={part}", "trainer.max_steps=null")
    curve = results.curve(resumed, "train/step_sum")
    assert curve[10] == results.curve(whole, "train/step_sum")[10] == 8.0


@pytest.mark.usefixtures("artifact")
def test_a_logger_needs_nothing_but_log(train):
    run_dir = train(*REPORTING, f"+logger.numbers._target_={CASES}.Numbers")
    # The JSON lines hold numbers only.
    assert results.repeated(run_dir) == {}


def test_final_metrics_are_logged_once(train, tmp_path):
    logged = (*SHORT, "trainer.max_epochs=2", "trainer.limit_test_batches=2", f"+logger.lines._target_={CASES}.Lines")
    run_dir = train(*logged)
    (found,) = (line for line in lines(run_dir) if line[0] == "results")
    assert lines(run_dir)[-1] == found
    found_of = results.results(run_dir)
    metrics = {**found_of["last"]["metrics"], **found_of["test"]["metrics"], "best/val/loss": found_of["score"]}
    assert found[1:] == ["", None, metrics]


def test_values_that_cannot_be_logged_are_refused(train, tmp_path, capsys):
    (tmp_path / "odd.py").write_text(
        "from framework import Log\nclass Odd:\n    def on_validation_end(self, info): return Log({'x': 'y'})\n"
    )
    train(*SHORT, "+callbacks.odd._target_=odd.Odd", status=2)
    assert "val/x is logged as 'y'. Log a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "hint"), [((5, 5, 3), "permute(2, 0, 1)"), ((2, 3, 4, 4), "For a batch give a list"), ((7, 4, 4), "C 1")]
)
def test_images_of_other_shapes_are_refused(shape, hint):
    with pytest.raises(DataError, match=r"framework.Image got pixels of shape") as caught:
        Image(torch.zeros(shape))
    assert hint in str(caught.value)


@pytest.mark.parametrize(("shape", "size"), [((1, 28), (28, 1)), ((3, 1, 28), (28, 1)), ((3, 28, 1), (1, 28))])
def test_narrow_images_keep_their_shape(shape, size):
    assert picture_from(pixels_of(Image(torch.zeros(shape)))).size == size


def test_an_image_without_pixels_is_refused():
    with pytest.raises(DataError, match=r"framework.Image got pixels of shape \(0, 5\)"):
        Image(torch.zeros(0, 5))


def test_a_table_with_a_short_row_is_refused():
    with pytest.raises(DataError, match=r"2 columns \(a, b\), and row 1 has 1"):
        Table(["a", "b"], [[1, 2], [3]])


@pytest.mark.parametrize(
    "pixels",
    [
        np.array([[0.0, 1.0], [2.0, np.nan]], dtype=np.float32),
        torch.tensor([[0.0, 1.0], [9.0, -1.0]], dtype=torch.bfloat16, requires_grad=True),
        np.array([[0, 255], [300, -3]]),
        torch.tensor([[0, 255], [255, 0]], dtype=torch.uint8),
        torch.tensor([[False, True], [True, False]]),
    ],
)
def test_pixels_of_any_type(pixels):
    found = pixels_of(Image(pixels))
    assert found.dtype == np.uint8
    assert found.shape == (2, 2, 1)
    assert found.ravel().tolist() == [0, 255, 255, 0]


# What metrics show


def test_classification_shows_confusions_classes_and_the_worst_mistakes(train):
    short = ("recipe=digits", "logger=tensorboard", "trainer.max_epochs=1", "trainer.limit_test_batches=0")
    events = results.events(train(*short))
    assert {"val/confusion", "val/mistakes"} <= set(events.Tags()["images"])
    (classes,) = events.Tensors("val/confusion/classes/text_summary")
    lines = classes.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == "| class | accuracy | samples |"
    cells = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [int(label) for label, *_ in cells] == list(range(10))
    right = sum(float(accuracy) * int(count) for _, accuracy, count in cells)
    (accuracy,) = (event.value for event in events.Scalars("val/accuracy"))
    assert right / 180 == pytest.approx(accuracy, abs=1e-3)


@pytest.mark.multiproc
def test_a_regression_shows_predicted_against_true_values(train):
    events = results.events(train(*SHORT, "logger=tensorboard", TWO))
    assert [event.step for event in events.Images("val/predicted")] == [10]


# Epochs of one step, each with a validation, and many of them within the seconds between two drawings.
VALIDATIONS = ("recipe=toy", "trainer.limit_train_batches=1", "trainer.limit_test_batches=0", "trainer.max_epochs=40")


@pytest.mark.usefixtures("artifact")
def test_only_the_newest_pictures_of_metrics_are_logged(train):
    own = (f"+callbacks.reporting._target_={CASES}.Reporting", f"+logger.lines._target_={CASES}.Lines")
    run_dir = train(*VALIDATIONS, "logger=jsonl", "checkpoint=none", *own)
    steps = [line[2] for line in lines(run_dir) if line[1] == "val/predicted"]
    assert steps[0] == 1
    assert steps[-1] == 40
    assert len(steps) < 40
    assert len(results.curve(run_dir, "val/loss")) == 40
    # What the user's code returns is logged each time.
    assert [line[2] for line in lines(run_dir) if line[1] == "val/image"] == list(range(1, 41))
    assert [file.name for file in (run_dir / "media").glob("val__predicted_*")] == ["val__predicted_40.png"]


@pytest.mark.parametrize("end", ["raise", "stop"])
def test_a_run_that_ends_early_has_its_last_picture(train, tmp_path, end):
    (tmp_path / "ending.py").write_text(
        "from framework import Stop\n"
        "class Ending:\n"
        "    def on_validation_end(self, info):\n"
        "        if info.step == 7:\n"
        f"            {'raise KeyError(7)' if end == 'raise' else 'return Stop(str(7))'}\n"
    )
    ending = "+callbacks.ending._target_=ending.Ending"
    run_dir = train(*VALIDATIONS, "logger=jsonl", ending, status=1 if end == "raise" else 0)
    assert [file.name for file in (run_dir / "media").iterdir()] == ["val__predicted_7.png"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("ignored", [None, 2])
def test_the_worst_mistakes_are_those_of_all_ranks(ranks, ignored):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(60, 4, generator=generator)
    target = torch.randint(4, (60,), generator=generator)
    images = torch.arange(60.0).reshape(60, 1, 1, 1) * torch.tensor([[0.0, 1.0]])
    target[7] = target[7] if ignored is None else ignored
    scores[8, 0] = float("nan")
    metrics = [WorstMistakes(number=5, ignore_index=ignored) for _ in range(ranks)]
    for number, (one, its, image) in enumerate(zip(scores.split(7), target.split(7), images.split(7), strict=True)):
        metrics[number % ranks].update(one, its, image)
    whole = WorstMistakes(number=5, ignore_index=ignored)
    for metric in metrics:
        whole.merge(metric.state())
    losses = cross_entropy(scores, target, reduction="none").nan_to_num(nan=torch.inf)
    losses[(scores.argmax(dim=1) == target) | (target == ignored)] = -torch.inf
    worst = losses.topk(5).indices
    state = whole.state()
    assert state is not None
    for found, wanted in zip(state, (losses, target, scores.argmax(dim=1)), strict=False):
        torch.testing.assert_close(found, wanted[worst])
    picture = whole.media()[""]
    assert isinstance(picture, Image)
    whole.reset()
    assert whole.media() == {}


def test_metrics_that_cannot_be_drawn_show_nothing():
    right = WorstMistakes()
    right.update(torch.eye(3), torch.arange(3), torch.zeros(3, 1, 2, 2))
    assert right.media() == {}
    other = WorstMistakes()
    other.update(torch.eye(3), torch.tensor([1, 2, 0]), torch.zeros(3, 5))
    assert other.media() == {}
    chart = PredictedAgainstTrue(number=3)
    chart.update(torch.zeros(2, 1), torch.zeros(2))
    assert chart.media() == {}
    chart.update(torch.tensor([1.0, float("nan"), 2.0, 9.0]), torch.zeros(4))
    assert sum(points.shape[1] for points in chart.state()) == 3
    assert isinstance(chart.media()[""], Image)


def test_media_must_be_a_dict():
    with pytest.raises(TargetError, match=r"media of StepOutput returned \[1\]. Return a dict"):
        media_of(lambda: [1])  # type: ignore[arg-type, return-value]


ENCODERS = """
import threading
from PIL import Image as Pillow
save = Pillow.Image.save
def noting(image, file, **options):
    print("ENCODED by", threading.current_thread().name, flush=True)
    save(image, file, **options)
class Threads:
    def on_fit_start(self, info): Pillow.Image.save = noting
    def on_fit_end(self): Pillow.Image.save = save
"""


@pytest.mark.usefixtures("artifact")
def test_an_image_is_encoded_once_beside_the_training(train, tmp_path):
    (tmp_path / "encoders.py").write_text(ENCODERS)
    run_dir = train(*REPORTING, "+callbacks.threads._target_=encoders.Threads", "logger=[jsonl,tensorboard]")
    by = [line for line in results.log(run_dir).splitlines() if line.startswith("ENCODED by")]
    # One, a list of two, and a figure.
    assert by == ["ENCODED by encoder_0"] * 4
    assert len(list((run_dir / "media").glob("*.png"))) == 4
    assert len(results.events(run_dir).Tags()["images"]) == 4


FIGURES = """
from pathlib import Path
from matplotlib import pyplot
from framework import Figure, Log
class Figures:
    def on_train_step_end(self, info): return Log({"figure": Figure(pyplot.figure())})
    def on_fit_end(self): Path("open").write_text(str(pyplot.get_fignums()))
"""


def test_figures_are_closed_where_nothing_is_logged(train, tmp_path):
    (tmp_path / "figures.py").write_text(FIGURES)
    train(*SHORT, "trainer.max_steps=2", "logger=none", "+callbacks.figures._target_=figures.Figures")
    assert (tmp_path / "open").read_text() == "[]"
