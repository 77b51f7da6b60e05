"""Trackers through their own libraries, offline: one run and one curve, whatever happens to the process."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from pathlib import Path

import pytest
import yaml

from framework.errors import ConfigError
from framework.loggers import WandbLogger
from tests.helpers import results
from tests.helpers.command import run_framework, started_python
from tests.helpers.internals import RunDir, Worker, check_installed
from tests.helpers.trackers import mlflow_curve, mlflow_rows, wandb_curve, wandb_run

CASES = "tests.features.tracker_cases"
SHORT = ("recipe=toy", "trainer.limit_train_batches=20", "trainer.limit_test_batches=2", "trainer.log_every_n_steps=5")
FAKE = (*SHORT, "trainer.max_epochs=2", "logger=[jsonl,console]", f"+logger.fake._target_={CASES}.Fake")


@pytest.fixture(autouse=True)
def without_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No key and no server of the user's."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path_factory.mktemp("home") / "netrc"))


def mlflow_of(run_dir: Path) -> tuple[Path, str]:
    """The database and the run's id."""
    found = results.run_file(run_dir)["trackers"]["mlflow"]
    return Path(found["tracking_uri"].removeprefix("sqlite:///")), found["run_id"]


@pytest.fixture
def killed_run(train):
    """Return a function that trains on two processes with these loggers, is killed after a step, and resumes."""

    def run(logger: str, *overrides: str) -> Path:
        # The run can be resumed from step 20.
        resumable = ("checkpoint.every_n_steps=20", "checkpoint.asynchronous=false")
        saves = ("trainer.max_epochs=3", *resumable, "topology.procs_per_node=2")
        killed = f"+callbacks.killed._target_={CASES}.KilledOnce"
        run_dir: Path = train(*SHORT, f"logger=[jsonl,{logger}]", *saves, killed, *overrides, status=1)
        # There is nothing if the run hadn't even started.
        before = results.run_file(run_dir).get("trackers", {})
        assert train(f"resume={run_dir}") == run_dir
        after = results.run_file(run_dir).get("trackers", {})
        for tracker, key in (("wandb", "id"), ("mlflow", "run_id")):
            assert tracker not in before or before[tracker][key] == after[tracker][key]
        return run_dir

    return run


CURVES = ("train/loss", "val/loss", "test/loss")


@pytest.mark.multiproc
def test_a_killed_wandb_run_stays_one_run(killed_run):
    run_dir = killed_run("wandb", "tags=[baseline,big]")
    for name in CURVES:
        wanted = results.curve(run_dir, name)
        assert wandb_curve(run_dir, name) == wanted
    assert list(results.curve(run_dir, "train/loss")) == list(range(5, 61, 5))
    run, history, summary = wandb_run(run_dir)
    # The text is logged at each start.
    assert [row["_step"] for row in history if "summary/_type" in row] == [0, 20]
    known = results.run_file(run_dir)["trackers"]["wandb"]
    assert (run.project, list(run.tags), run.run_id) == ("toy", ["baseline", "big"], known["id"])
    assert summary["best/val/loss"] == results.results(run_dir)["score"]
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert config["optimizer"]["lr"] == 0.001
    assert results.run_file(run_dir)["tags"] == ["baseline", "big"]


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_killed_mlflow_run_stays_one_run(killed_run):
    run_dir = killed_run("mlflow", "tags=[baseline,big]")
    database, run_id = mlflow_of(run_dir)
    for name in CURVES:
        assert mlflow_curve(database, run_id, name) == results.curve(run_dir, name)
    assert mlflow_rows(database, "SELECT name, status FROM runs") == [(run_dir.name, "FINISHED")]
    params = dict(mlflow_rows(database, "SELECT key, value FROM params WHERE run_uuid = ?", run_id))
    assert (params["optimizer.lr"], params["recipe"]) == ("0.001", "toy")
    tags = dict(mlflow_rows(database, "SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
    assert tags["baseline"] == tags["big"] == "true"
    (best,) = mlflow_rows(database, "SELECT value FROM metrics WHERE run_uuid = ? AND key = 'best/val/loss'", run_id)
    assert best == (results.results(run_dir)["score"],)


@pytest.mark.exhaustive
def test_wandb_keeps_a_picture_that_has_waited(train):
    # The picture of step 6 is logged at the end, after the numbers of step 8.
    steps = ("trainer.max_steps=8", "trainer.val_check_interval=3", "trainer.log_every_n_steps=1")
    run_dir = train(*SHORT, *steps, "trainer.limit_test_batches=0", "logger=[jsonl,wandb]", "checkpoint=none")
    _, history, _ = wandb_run(run_dir)
    pictures = [row["val/predicted/path"] for row in history if "val/predicted/path" in row]
    assert len(pictures) == 2
    assert "_8_" in pictures[-1]


@pytest.mark.exhaustive
def test_media_and_checkpoints_reach_the_trackers(train, tmp_path):
    (tmp_path / "conf.txt").write_text("content")
    keep = ("logger.wandb.log_checkpoints=all", "logger.mlflow.log_checkpoints=best")
    reporting = ("~task.metrics.predicted", "+callbacks.reporting._target_=tests.features.media_cases.Reporting")
    run_dir = train(*SHORT, "trainer.max_epochs=1", "logger=[jsonl,wandb,mlflow]", *reporting, *keep)
    assert " is off" not in results.log(run_dir)
    _, history, _ = wandb_run(run_dir)
    (row,) = (row for row in history if row["_step"] == 20)
    kinds = {name: row[f"val/{name}/_type"] for name in ("image", "images", "figure", "histogram", "table", "text")}
    assert kinds == {
        "image": "image-file",
        "images": "images/separated",
        "figure": "image-file",
        "histogram": "histogram",
        "table": "table-file",
        "text": "html-file",
    }
    assert row["val/image/caption"] == "grey"
    assert (row["val/image/width"], row["val/image/height"]) == (5, 4)
    (folder,) = (tmp_path / "outputs/mlartifacts/toy").glob("*/artifacts")
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    media = {file for file in found if file.startswith("media/")}
    assert media == {
        "media/val/image/val__image_00000020_0.png",
        *(f"media/val/images/val__images_00000020_{number}.png" for number in range(2)),
        "media/val/figure/val__figure_00000020_0.png",
        "media/val/table/00000020.csv",
        "media/val/text/00000020.txt",
        "media/summary/00000000.txt",
    }
    assert {"val/a file/conf.txt", "config.yaml", "checkpoints/step_00000020/manifest.json"} <= found


# Trackers that fail


@pytest.mark.parametrize("where", ["begin", "numbers", "finish False"])
@pytest.mark.parametrize("trouble", ["raise", "exit", "hang"])
def test_a_failing_tracker_is_reported_once(train, trouble, where):
    run_dir = train(
        *FAKE, f"+logger.fake.trouble={trouble}", f"+logger.fake.where='{where}'", "+logger.fake.close_timeout_s=0.3"
    )
    assert results.results(run_dir)["steps"] == 40
    assert len(results.curve(run_dir, "train/loss")) == 8
    log = results.log(run_dir)
    said = {
        "raise": "logger.fake is off: ValueError: the library's own. Training continues without it.",
        "exit": "logger.fake is off: SystemExit: 3. Training continues without it.",
        "hang": "logger.fake isn't done after 0.3 s; the run ends without it.",
    }
    assert len(re.findall(f"WARNING {re.escape(said[trouble])}", log)) == 1
    assert log.count("WARNING logger.fake") == 1
    assert (run_dir / "fake").read_text().split("\n")[-2] == where


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["bytes", "folder"])
def test_a_damaged_database_is_named_once(train, tmp_path, damage):
    database = tmp_path / "outputs/mlflow.db"
    database.parent.mkdir(exist_ok=True)
    if damage == "folder":
        database.mkdir()
    else:
        database.write_bytes(b"\xff" * 5000)
    # MLflow itself tries to open it for longer than that.
    run_dir = train(*SHORT, "trainer.max_steps=10", "logger=[jsonl,mlflow]", "logger.mlflow.close_timeout_s=50")
    log = results.log(run_dir)
    assert log.count("WARNING logger.mlflow") == 1
    assert f"{database} can't be opened" in log
    assert results.results(run_dir)["steps"] == 10


@pytest.mark.exhaustive
def test_names_that_mlflow_refuses_are_changed(train, tmp_path):
    (tmp_path / "names.py").write_text(
        "import torch\n"
        "from framework import Image, Log\n"
        "class Names:\n"
        "    def on_validation_end(self, report):\n"
        "        numbers = {'p/': 1.0, 'a//b': 2.0, '..': 3.0, 'acc@1': 4.0, 'acc#1': 5.0}\n"
        "        return Log({**numbers, 'x/1': Image(torch.zeros(2, 2)), 'x_1': Image(torch.ones(2, 2))})\n"
    )
    run_dir = train(*SHORT, "trainer.max_epochs=1", "logger=[jsonl,mlflow]", "+callbacks.names._target_=names.Names")
    database, run_id = mlflow_of(run_dir)
    rows = mlflow_rows(database, "SELECT key, value FROM metrics WHERE run_uuid = ?", run_id)
    wanted = {"val/p": 1.0, "val/a/b": 2.0, "val": 3.0, "val/acc_1": 4.0}
    assert wanted.items() <= dict(rows).items()
    assert [value for key, value in rows if re.fullmatch(r"val/acc_1_[0-9a-f]{8}", key)] == [5.0]
    folder, other = (
        next((tmp_path / "outputs/mlartifacts").rglob(f"media/val/{name}/*.png")) for name in ("x/1", "x_1")
    )
    assert folder.read_bytes() != other.read_bytes()


def test_a_tracker_receives_the_runs_result(train, tmp_path):
    assert (train(*FAKE) / "fake").read_text().splitlines()[-2:] == ["final", "finish False"]
    (tmp_path / "falls.py").write_text("class Falls:\n    def on_train_step_end(self, report): 1 / 0\n")
    run_dir = train(*FAKE, "+callbacks.falls._target_=falls.Falls", status=1)
    # What was logged before the first step (the text `summary`) reaches the tracker as an earlier row.
    assert (run_dir / "fake").read_text().splitlines() == ["begin", "earlier 1", "finish True"]


def test_a_slow_tracker_loses_calls_and_says_so(capsys, tmp_path):
    worker = Worker("slow", root=tmp_path)
    begins = threading.Event()
    may_end = threading.Event()

    def block() -> None:
        begins.set()
        may_end.wait(60)

    worker.submit(block)
    assert begins.wait(60)
    done: list[int] = []
    for number in range(1100):
        worker.submit(partial(done.append, number))
    may_end.set()
    assert worker.close(timeout_s=60)
    assert done == list(range(1000))
    printed = capsys.readouterr().out
    assert printed.count("logger.slow is slower than the training: 1000 calls wait") == 1


@pytest.mark.exhaustive
def test_wandb_whose_own_process_hangs_is_given_up(train):
    stopping = f"+callbacks.stopping._target_={CASES}.Stopping"
    run_dir = train(*SHORT, "trainer.max_epochs=2", "logger=[jsonl,wandb]", "logger.wandb.close_timeout_s=2", stopping)
    assert results.results(run_dir)["steps"] == 40
    assert results.log(run_dir).count("WARNING logger.wandb isn't done after 2 s") == 1


@pytest.mark.exhaustive
def test_wandb_without_its_server_continues_offline(train, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a1" * 20)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run_dir = train(*SHORT, "trainer.max_epochs=1", "logger=[jsonl,wandb]", "logger.wandb.settings={init_timeout:2}")
    assert "It continues offline" in results.log(run_dir)
    assert wandb_curve(run_dir, "train/loss") == results.curve(run_dir, "train/loss")


@pytest.mark.exhaustive
@pytest.mark.multiproc
# The server, which imports a database toolkit, takes a minute to start on a busy machine.
@pytest.mark.timeout(300)
def test_mlflow_through_a_server(killed_run, tmp_path):
    database = tmp_path / "server.db"
    store = ("--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(tmp_path / "kept"))
    place = ("--host", "127.0.0.1", "--port", "0", "--workers", "1")
    with started_python("-m", "mlflow", "server", *place, *store, cwd=tmp_path) as server:
        server.wait_for_output("Application startup complete", timeout=200)
        (address,) = set(re.findall(r"http://127\.0\.0\.1:\d+", server.printed()))
        uri = f"logger.mlflow.tracking_uri={address}"
        run_dir = killed_run("mlflow", uri, "logger.mlflow.log_checkpoints=best")
    run_id = results.run_file(run_dir)["trackers"]["mlflow"]["run_id"]
    assert mlflow_curve(database, run_id, "train/loss") == results.curve(run_dir, "train/loss")
    assert list((tmp_path / "kept").rglob("manifest.json"))


# Names, groups, options


@pytest.mark.parametrize(
    ("place", "sweep", "name"),
    [("outputs/toy/a", None, "a"), ("outputs/multirun/2026_x/3", "2026_x", "2026_x/3")],
)
def test_a_sweeps_runs_are_one_group(tmp_path, place, sweep, name):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"tags": ["x"]}))
    logger = WandbLogger(run_dir=RunDir(folder))
    assert (logger.sweep, logger.run_name, logger.tags) == (sweep, name, ["x"])


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_sweeps_trials_are_children_of_one_mlflow_run(tmp_path):
    """Two begin at the same time, and a third one is added when the sweep is continued."""
    typed = (*SHORT, "trainer.gpus=0", "trainer.max_epochs=1", "logger=[jsonl,mlflow]", "sweep.test=none")
    done = run_framework("-m", *typed, "seed=1,2", "sweep.jobs=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs/multirun").iterdir()
    again = run_framework("-m", f"resume={folder}", "seed=1,2,3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr

    database = tmp_path / "outputs/mlflow.db"
    names = dict(mlflow_rows(database, "SELECT run_uuid, name FROM runs"))
    assert sorted(names.values()) == [folder.name, *(f"{folder.name}/{number}" for number in range(3))]
    parents = dict(mlflow_rows(database, "SELECT run_uuid, value FROM tags WHERE key = 'mlflow.parentRunId'"))
    (parent,) = set(parents.values())
    assert names[parent] == folder.name
    assert parents.keys() == names.keys() - {parent}


def test_other_checkpoints_than_best_and_all_are_refused(train, capsys):
    train(*SHORT, "logger=wandb", "logger.wandb.log_checkpoints=some", status=2)
    assert "logger.wandb.log_checkpoints=some: must be best, all or null" in capsys.readouterr().err


def test_an_earlier_run_resumes_without_its_csv_logger(train, capsys):
    run_dir = train(*SHORT, "logger=jsonl", "trainer.max_steps=20")
    # Earlier versions recorded no checksums, so the files may be edited.
    facts = results.run_file(run_dir)
    for name in ("files", "config"):
        facts.pop(name, None)
    (run_dir / "run.json").write_text(json.dumps(facts))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["logger"]["csv"] = {"_target_": "framework.loggers.CSVLogger"}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    overrides = (run_dir / "overrides.yaml").read_text()
    (run_dir / "overrides.yaml").write_text(overrides.replace("logger=jsonl", "logger=[jsonl,csv]"))

    train(f"resume={run_dir}", "trainer.max_steps=30")
    said = 'sets logger.csv={"_target_": "framework.loggers.CSVLogger"}, which no longer exists and is ignored'
    assert said in capsys.readouterr().err
    assert list(results.curve(run_dir, "train/loss")) == [5, 10, 15, 20, 25, 30]


def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch):
    check_installed("wandb")
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("no_such_tracker", "nor_this"):
        with pytest.raises(ConfigError, match=rf"{name} isn't installed. To log to it: pip install"):
            check_installed(name)
