"""`format=json`: one JSON document on stdout, whatever the command does, and everything else on stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers import results
from tests.helpers.command import ROOT, run_framework
from tests.helpers.internals import JOBS, compose, json_text, only_answers_on_stdout, tolerant_output

SHORT = ("recipe=toy", "trainer.max_steps=20", "trainer.val_check_interval=10", "logger=jsonl")
OF_A_RUN = {"run", "monitor", "best", "last", "seconds", "started", "overrides", "metrics", "branch_of"}
OF_ALL = {"job", "recipe", "status", "exit_status", "results", "failure"}


class Answer(NamedTuple):
    status: int
    document: Any
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(
    fork_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """The command in a folder of its own, with `format=json`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Answer:
        capfd.readouterr()
        with tolerant_output(), only_answers_on_stdout():
            status = compose.main([*arguments, "format=json"], fork_server=fork_server)
        out, err = capfd.readouterr()
        return Answer(status, json.loads(out, parse_constant=refused_constant), err)

    return run


def refused_constant(name: str) -> None:
    """Refuse NaN and Infinity, which `json` reads and JSON doesn't have."""
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture
def trained(shared_run: Callable[..., Path]) -> Path:
    """A trained run, which tests only read."""
    return shared_run(*SHORT)


# What runs nothing


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["--version"], ["framework", "torch", "python"]),
        (["--help"], ["jobs", "groups", "documentation"]),
        (["recipe=toy", "--cfg", "job"], ["trainer", "model", "recipe"]),
        (["recipe=toy", "--cfg", "job", "--resolve", "-p", "trainer"], ["max_epochs", "precision"]),
        (["job=plan", "recipe=toy", "trainer.gpus=0"], ["topology", "steps", "notes"]),
        (["job=schema"], sorted(OF_ALL)),
    ],
    ids=" ".join,
)
def test_what_runs_nothing_prints_one_document(command: Command, arguments: list[str], keys: list[str]) -> None:
    answer = command(*arguments)
    assert answer.status == 0
    assert set(keys) <= answer.document.keys()


def test_the_configuration_is_that_of_the_command(command: Command) -> None:
    shown = command("recipe=toy", "seed=3", "trainer.max_epochs=7", "--cfg", "job").document
    assert (shown["seed"], shown["trainer"]["max_epochs"]) == (3, 7)
    assert shown["recipe"] == "${hydra:runtime.choices.recipe}"
    assert command("recipe=toy", "--cfg", "job", "--resolve").document["recipe"] == "toy"


# Jobs on runs


def test_lists_and_comparisons_are_the_same_by_either_key(
    command: Command, shared_run: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    runs = f"runs=[{shared_run(*SHORT)},{shared_run(*SHORT, 'seed=1')}]"
    for job in ("runs", "compare"):
        document = command(f"job={job}", runs).document
        capfd.readouterr()
        assert compose.main([f"job={job}", runs, "runs.format=json"]) == 0
        assert document == json.loads(capfd.readouterr().out)


def test_a_report_says_what_it_wrote(command: Command, trained: Path, tmp_path: Path) -> None:
    answer = command("job=report", f"runs={trained}")
    written = answer.document["results"]
    assert written["output"] == "report.html"
    assert written["size_bytes"] == (tmp_path / "report.html").stat().st_size
    assert written["runs"] == [str(trained)]


# Jobs with ranks


def test_a_training_prints_what_job_runs_lists(command: Command) -> None:
    answer = command(*SHORT, "trainer.gpus=0", "seed=3")
    document = answer.document
    assert document.keys() == OF_ALL | OF_A_RUN
    assert (document["status"], document["exit_status"], document["failure"]) == ("finished", 0, None)
    assert document["results"] == results.run_file(Path(document["run"]))["results"]
    assert "Training toy" in answer.err
    (listed,) = command("job=runs").document
    assert listed == {name: document[name] for name in listed}
    saved = Path(document["run"], "config.yaml").read_text()
    assert "format: json" not in saved
    assert "format=json" not in listed["overrides"]


class Asked(NamedTuple):
    """A job that reads a trained run, and names that its results have."""

    arguments: tuple[str, ...]
    results: set[str]
    # False: it makes no run directory.
    has_run: bool = True


JOBS_ON_WEIGHTS = [
    Asked(("job=eval",), {"metrics", "texts"}),
    Asked(("job=predict",), {"samples", "output"}),
    Asked(("job=export",), {"output", "size_bytes", "format", "model", "step"}, has_run=False),
]


@pytest.mark.parametrize("asked", JOBS_ON_WEIGHTS, ids=lambda asked: asked.arguments[0])
def test_a_job_on_weights_names_them_and_what_it_found(command: Command, trained: Path, asked: Asked) -> None:
    answer = command(*asked.arguments, f"checkpoint.path={trained}", "trust=true", "trainer.gpus=0")
    document = answer.document
    assert answer.status == document["exit_status"] == 0
    assert document["checkpoint"].startswith(str(trained))
    assert asked.results <= document["results"].keys()
    assert document.keys() == OF_ALL | {"checkpoint"} | (OF_A_RUN if asked.has_run else {"run"})


JOBS_ON_RECIPES = [
    Asked(("job=preflight", "preflight.seconds=0.5", "preflight.max_bytes=1000"), {"passed", "links", "checks"}),
    Asked(("job=parity", "parity.steps=1"), {"same", "processes", "output"}, has_run=False),
    Asked(("job=tune", "tune.find_batch_size=false", "tune.num_training=20"), {"lr", "overrides"}),
]


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.parametrize("asked", JOBS_ON_RECIPES, ids=lambda asked: asked.arguments[0])
def test_a_job_on_a_recipe_prints_what_its_file_has(command: Command, asked: Asked) -> None:
    answer = command(*asked.arguments, "recipe=toy", "trainer.gpus=0")
    document = answer.document
    assert answer.status == document["exit_status"]
    assert asked.results <= document["results"].keys()
    assert document.keys() >= OF_ALL
    assert (document["run"] is not None) == asked.has_run


OWN_JOB = """
import framework


class Answer(framework.Job):
    def work(self, setup, model):
        print("printed by a rank")
        return {"value": float("nan"), "step": 3}
"""


def test_the_results_of_an_own_job_are_printed_and_nan_is_null(command: Command, tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text(OWN_JOB)
    document = command("job=answering.Answer", "recipe=toy", "trainer.gpus=0").document
    assert document["results"] == {"value": None, "step": 3}
    assert document["run"].startswith("outputs/toy/answering.Answer/")


# Sweeps


def test_a_sweep_prints_its_trials_rows_and_the_best(command: Command) -> None:
    sweep = ("-m", *SHORT, "trainer.gpus=0", "optimizer.lr=0.1,0.001", "sweep.test=none", "sweep.jobs=1")
    document = command(*sweep).document
    assert document.keys() == {"job", "recipe", "status", "exit_status", "sweep", "results"}
    found = document["results"]
    assert [trial["trial"] for trial in found["trials"]] == [0, 1]
    assert {trial["status"] for trial in found["trials"]} == {"finished"}
    best = found["trials"][found["best"]]
    assert best["score"] == min(trial["score"] for trial in found["trials"])
    assert found["rows"][0]["trials"] == [found["best"]]
    assert [row["rank"] for row in found["rows"]] == [1, 2]

    # Nothing is left to run: the trials are those of before, without the key.
    again = command("-m", f"resume={document['sweep']}").document
    assert again["results"]["trials"] == found["trials"]

    planned = command(*sweep, "job=plan").document["results"]
    assert [trial["trial"] for trial in planned["trials"]] == [0, 1]
    assert planned["at_a_time"] == 1
    assert planned["seconds"] == 2 * planned["trial_seconds"]


@pytest.mark.exhaustive
def test_a_sweep_of_evaluations_prints_its_models(command: Command, trained: Path) -> None:
    sweep = ("-m", "job=eval", f"checkpoint.path={trained}", "trust=true", "eval.part=val,test", "trainer.gpus=0")
    (model,) = command(*sweep).document["results"]["models"]
    assert model["metrics"].keys() == {"val/loss", "test/loss"}
    assert model["trials"] == [0, 1]


# Failures


FAILS = """
from recipes.toy import ToyModel


class Failing(ToyModel):
    def forward(self, inputs):
        raise ZeroDivisionError("of mine")
"""


def test_a_failed_run_has_a_document_and_its_report_is_on_stderr(command: Command, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILS)
    answer = command(*SHORT, "trainer.gpus=0", "model._target_=failing.Failing")
    assert answer.status == answer.document["exit_status"] == 1
    assert answer.document["status"] == "failed"
    failure = answer.document["failure"]
    assert (failure["cause"], failure["rank"]) == ("ZeroDivisionError", 0)
    assert failure["message"] == "ZeroDivisionError: of mine"
    assert Path(failure["report"]).name == "failure.json"
    assert "ZeroDivisionError: of mine" in answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["format=jsno"], "format=jsno: must be one of text, json. Did you mean format=json?"),
        (["fromat=json"], "Did you mean format=json?"),
        (["++format=json", "job=runs"], "Type it on the command line"),
        (["-m", "format=json,text"], "must be one of text, json"),
        (["format=json", "--info", "all"], "format=json can go with --help, --version and --cfg job"),
        (["format=json", "--hydra-help"], "format=json can go with --help, --version and --cfg job"),
        (["format=json", "--cfg", "job", "-p", "trainer.max"], "there is no such section"),
        (["format=json", "job=runs", "runs.format=csv"], "Leave one of them out."),
        (["format=json", "recipe=none_such"], "none_such"),
        (["format=json", "recipe=toy", "trainer.gpus=0", "model.hiden=3"], "hiden"),
    ],
    ids=str,
)
def test_a_wrong_request_prints_nothing_on_stdout(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with tolerant_output(), only_answers_on_stdout():
        assert compose.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err


def test_a_file_of_the_user_does_not_choose_it(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "conf/recipe").mkdir(parents=True)
    (tmp_path / "conf/recipe/mine.yaml").write_text("# @package _global_\ndefaults: [toy]\nformat: json\n")
    monkeypatch.chdir(tmp_path)
    assert compose.main(["recipe=mine"]) == 2
    assert "format=json is set in a file." in capfd.readouterr().err


def test_the_page_names_every_job() -> None:
    page = (ROOT / "docs/scripts.md").read_text()
    named = set()
    for line in page.splitlines():
        if line.startswith("| `"):
            named |= set(re.findall(r"`(?:job=)?(\w+)`", line))
    assert set(JOBS) - named == set()


# The whole command


def test_what_ranks_print_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text(OWN_JOB)
    ran = run_framework("job=answering.Answer", "recipe=toy", "trainer.gpus=0", "format=json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["results"] == {"value": None, "step": 3}
    assert "printed by a rank" in ran.stderr


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """A Bash in which `$framework` is the command."""
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), "framework": f"{sys.executable} -m framework"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-o", "pipefail", "-c", line]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", ["--help", "job=runs", "recipe=toy trainer.fast_dev_run=true trainer.gpus=0"])
def test_a_reader_that_is_gone_is_answered_by_the_status(shell: Any, job: str) -> None:
    gone = shell(f"$framework {job} format=json | true")
    assert gone.returncode == 141
    assert "Traceback" not in gone.stderr
    read = shell(f"$framework {job} format=json | head -n 1")
    assert read.stdout in ("{\n", "[]\n")
    closed = shell(f"$framework {job} format=json >&-")
    assert closed.returncode == 0, closed.stderr
    full = shell(f"$framework {job} format=json > /dev/full")
    assert full.returncode == 1
    assert "The output can't be written" in full.stderr


def test_control_characters_are_escaped_and_infinities_null() -> None:
    assert json.loads(json_text({"a": [float("inf"), -float("inf"), 1.5, "\x1b\x7f"]})) == {
        "a": [None, None, 1.5, "\x1b\x7f"]
    }
    assert json_text("\x7f\x1b") == '"\\u007f\\u001b"'
