"""Sweeps: a plan on disk, several trials at a time, failures that end nothing, stopping and continuing, a search."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.helpers import results
from tests.helpers.command import run_framework
from tests.helpers.internals import compose

LIMITS = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=1")
SHORT = ("logger=jsonl", "trainer.max_epochs=1", *LIMITS)
# Long enough to be interrupted.
LONG = ("recipe=toy", "trainer.gpus=0", "logger=jsonl", "trainer.max_epochs=40", "checkpoint.every_n_epochs=1")


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Sweep = Callable[..., Answer]


@pytest.fixture
def sweep(fork_server, tmp_path, monkeypatch, capfd) -> Sweep:
    def run(*overrides: str) -> Answer:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = compose.main(["-m", "trainer.gpus=0", *overrides], fork_server=fork_server)
        return Answer(status, *capfd.readouterr())

    return run


def sweep_folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "outputs" / "multirun").iterdir()
    return folder


def plan_of(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return plan


def table(folder: Path) -> list[dict[str, str]]:
    """The lines of results.csv, without how long trials took."""
    with (folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        del line["seconds"]
    return lines


def statuses(folder: Path) -> list[str]:
    return [line["status"] for line in table(folder)]


FAILING = """
class Failing:
    '''Fails in the trial with this seed, until there is a file `repaired`.'''
    def __init__(self, seed): self.seed = seed
    def on_fit_start(self, info):
        from pathlib import Path
        if self.seed == 2 and not Path("repaired").exists(): raise ValueError("this one fails")
"""
FAILS = ("+callbacks.f._target_=failing.Failing", "+callbacks.f.seed=${seed}")


def test_a_failing_trial_does_not_end_the_sweep(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    answer = sweep("recipe=toy", *SHORT, "seed=1,2,4", "sweep.jobs=1", *FAILS)
    assert answer.status == 1, answer.err
    folder = sweep_folder(tmp_path)
    lines = answer.out.splitlines()
    assert [line.split()[:3] for line in lines[1:7]] == [
        ["[0]", "seed=1", "running"],
        ["[0]", "seed=1", "finished"],
        ["[1]", "seed=2", "running"],
        ["[1]", "seed=2", "FAILED"],
        ["[2]", "seed=4", "running"],
        ["[2]", "seed=4", "finished"],
    ]
    assert f"log: outputs/multirun/{folder.name}/1/logs/rank_0.log" in lines[4]
    assert "3 trials: 2 finished, 1 failed" in lines
    assert statuses(folder) == ["finished", "failed", "finished"]
    assert table(folder)[1]["cause"] == "ValueError"
    assert [yaml.safe_load((folder / str(n) / "config.yaml").read_text())["seed"] for n in range(3)] == [1, 2, 4]
    assert f"tensorboard --logdir outputs/multirun/{folder.name}" not in answer.out
    for text in ((folder / "logs" / "1.log").read_text(), results.log(folder / "1")):
        assert "ValueError: this one fails" in text
    # Each would run alone by its overrides.
    typed = ["trainer.gpus=0", "recipe=toy", *SHORT, "seed=4"]
    assert plan_of(folder)["trials"][2]["overrides"][: len(typed)] == typed


def test_one_failing_trial_in_eight_changes_nothing_for_the_others(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    command = ("recipe=toy", *SHORT, "seed=range(1,9)", "sweep.jobs=2", "sweep.test=none", *FAILS)
    assert sweep(*command).status == 1
    failing = sweep_folder(tmp_path)
    assert statuses(failing).count("failed") == 1
    (tmp_path / "repaired").touch()
    assert sweep(*command).status == 0
    (whole,) = {*(tmp_path / "outputs" / "multirun").iterdir()} - {failing}
    for disturbed, undisturbed in zip(table(failing), table(whole), strict=True):
        if disturbed["status"] == "finished":
            assert disturbed["val/loss"] == undisturbed["val/loss"]
            assert disturbed["step"] == undisturbed["step"]


EIGHTH = """
import os, signal, time
import torch

class Eighth:
    # What the trial with seed 2 does in its second step.
    def __init__(self, seed, what): self.seed, self.what = seed, what
    def on_fit_start(self, info): self.model = info.model
    def on_train_step_end(self, info):
        if self.seed != 2 or info.step != 2: return
        match self.what:
            case "exception": raise ValueError("this one fails")
            case "memory": raise MemoryError
            case "exit": os._exit(3)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "hang": time.sleep(600)
            case "divergence":
                for parameter in self.model.parameters(): parameter.data.fill_(torch.nan)
"""
CAUSES = {
    "exception": "ValueError",
    "memory": "out of memory",
    "exit": "exit status 3",
    "kill": "killed (SIGKILL)",
    "hang": "timed out",
    "divergence": "NaN or infinite weights",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", CAUSES)
def test_whatever_one_trial_in_eight_does_changes_no_other(sweep, tmp_path, what):
    (tmp_path / "eighth.py").write_text(EIGHTH)
    limits = ("trainer.max_epochs=3", "trainer.log_every_n_steps=1", "backend.timeout=4", "logger=jsonl", *LIMITS)
    command = ("recipe=toy", *limits, "seed=range(1,9)", "sweep.jobs=2", "sweep.test=none")
    eighth = ("+callbacks.e._target_=eighth.Eighth", "+callbacks.e.seed=${seed}")
    others = []
    for case in (what, "nothing"):
        answer = sweep(*command, *eighth, f"+callbacks.e.what={case}")
        folder = max((tmp_path / "outputs" / "multirun").iterdir(), key=lambda path: path.stat().st_ctime_ns)
        lines = table(folder)
        if case == what:
            assert answer.status == 1
            assert [line["status"] for line in lines] == ["finished", "failed", *["finished"] * 6]
            assert lines[1]["cause"] == CAUSES[what]
        others.append([(line["val/loss"], line["step"]) for line in lines if line["trial"] != "1"])
    assert others[0] == others[1]


def test_failed_trials_are_restarted_on_request(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    sweep("recipe=toy", *SHORT, "seed=1,2", *FAILS)
    folder = sweep_folder(tmp_path)
    (tmp_path / "repaired").touch()
    first = results.run_file(folder / "0")["started"]
    answer = sweep(f"resume={folder}")
    assert answer.status == 0
    assert statuses(folder) == ["finished", "failed"]
    answer = sweep(f"resume={folder}", "sweep.retry=failed")
    assert answer.status == 0, answer.err
    assert statuses(folder) == ["finished", "finished"]
    assert results.run_file(folder / "0")["started"] == first


def test_failed_trials_of_a_search_are_restarted_on_request(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    search = ("sweep=optuna", "sweep.n_trials=2", "optimizer.lr=interval(0.01,0.1)", "sweep.pruner=null")
    typed = ("recipe=toy", *SHORT, *search, "seed=1,2", "sweep.jobs=1", *FAILS)
    assert sweep(*typed).status == 1
    folder = sweep_folder(tmp_path)
    assert statuses(folder) == ["finished", "failed"] * 2
    (tmp_path / "repaired").touch()
    first = results.run_file(folder / "0")["started"]
    assert sweep(f"resume={folder}").status == 0
    assert statuses(folder) == ["finished", "failed"] * 2
    answer = sweep(f"resume={folder}", "sweep.retry=failed")
    assert answer.status == 0, answer.err
    assert statuses(folder) == ["finished"] * 4
    assert results.run_file(folder / "0")["started"] == first


@pytest.mark.parametrize("swept", ["+tags=[a],[b]", "logger=jsonl,tensorboard", "trainer.progress=off,auto"])
def test_values_that_change_nothing_are_no_trials(sweep, tmp_path, swept):
    answer = sweep("recipe=toy", "trainer.max_epochs=1", *LIMITS, swept.lstrip("+"))
    assert answer.status == 2
    key = swept.lstrip("+").partition("=")[0].partition(".")[0]
    assert f"Trials differ only in {key}, which changes nothing that a trial computes" in answer.err
    assert not (tmp_path / "outputs").exists()


def test_trials_of_different_metrics_are_not_ranked(sweep, tmp_path):
    """As in a sweep over recipes."""
    answer = sweep("recipe=digits", *SHORT, "checkpoint.monitor=val/loss,val/accuracy")
    assert answer.status == 0, answer.err
    assert "not ranked: the trials don't have the same checkpoint.monitor and" in answer.out
    assert "best         trial" not in answer.out
    lines = table(sweep_folder(tmp_path))
    assert [line["status"] for line in lines] == ["finished", "finished"]
    assert all(float(line["score"]) > 0 for line in lines)


def test_a_sweep_is_not_continued_with_another_recipe(sweep, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    sweep("recipe=toy", *SHORT, "seed=1,3", *FAILS)
    folder = sweep_folder(tmp_path)
    (folder / "1" / "run.json").unlink()
    answer = sweep(f"resume={folder}", "recipe=digits")
    assert answer.status == 2
    assert "recipe=digits can't go with resume: that sweep's recipe is toy" in answer.err
    answer = sweep("resume=auto", "recipe=digits", "job=plan", "seed=1,2")
    assert "no unfinished sweep in outputs/multirun; a new one begins" in answer.err
    answer = sweep("resume=auto", "recipe=toy", "job=plan", "seed=1,2")
    assert f"resume=auto: outputs/multirun/{folder.name}" in answer.err


def test_new_values_add_trials_and_repeat_none(sweep, tmp_path):
    sweep("recipe=toy", *SHORT, "seed=1,2")
    folder = sweep_folder(tmp_path)
    before = [results.run_file(folder / number) for number in "01"]
    answer = sweep(f"resume={folder}", "seed=2,3", "optimizer.lr=0.05,0.01")
    assert answer.status == 0, answer.err
    assert [results.run_file(folder / number) for number in "01"] == before
    added = [trial["overrides"][-2:] for trial in plan_of(folder)["trials"][2:]]
    assert added == [
        ["seed=2", "optimizer.lr=0.05"],
        ["seed=2", "optimizer.lr=0.01"],
        ["seed=3", "optimizer.lr=0.05"],
        ["seed=3", "optimizer.lr=0.01"],
    ]
    assert statuses(folder) == ["finished"] * 6


def test_a_sweep_whose_recipe_has_changed_is_not_continued(sweep, tmp_path):
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndefaults: [toy]\noptimizer: {lr: 0.01}\n")
    (tmp_path / "failing.py").write_text(FAILING)
    sweep("recipe=mine", *SHORT, "seed=1,2", *FAILS)
    folder = sweep_folder(tmp_path)
    recipe.write_text("# @package _global_\ndefaults: [toy]\noptimizer: {lr: 0.02}\n")
    answer = sweep(f"resume={folder}", "sweep.retry=failed")
    assert answer.status == 2
    assert "Trial 0 of" in answer.err
    assert "would have another configuration today" in answer.err
    # New trials would be compared with the finished one.
    answer = sweep(f"resume={folder}", "seed=4")
    assert answer.status == 2
    assert "Trial 0 of" in answer.err
    assert len(plan_of(folder)["trials"]) == 2


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["optimizer.lr=0.1,abc"], "optimizer.lr=abc: must be a number"),
        (["seed=range(0)"], "one of its ranges is empty"),
        (["seed=range(0)", "job=plan"], "one of its ranges is empty"),
        (["seed=1,2", "sweep.jobs=1,2"], "settings of the sweep itself can't be swept over"),
        (["seed=1,2", "sweep.n_trials=3"], "sweep.n_trials=3 is for a search"),
        (["seed=1,2", "sweep.share_gpus=2"], "these run on the CPU"),
        (["seed=1,2", "resume=nowhere"], "there is no such folder"),
        (["optimizer.lr=interval(0.1,1)", "sweep=optuna", "checkpoint.monitor=null"], "checkpoint.monitor"),
        (["optimizer.lr=0.1", "sweep=optuna"], "no key has values to choose from"),
        (["optimizer.lr=interval(0.1,1)", "sweep=optuna", "sweep.n_trials=null"], "sweep.n_trials=N"),
        (
            ["optimizer.lr=interval(0.1,1)", "sweep=optuna", "sweep.sampler._target_=optuna.samplers.TPESampl"],
            "TPESampler",
        ),
        (
            ["optimizer.lr=interval(0.1,1)", "sweep=optuna", "sweep.pruner._target_=optuna.pruners.MedianPrunr"],
            "there is no MedianPrunr in optuna.pruners",
        ),
        (["optimizer.lr=interval(0.1,1)", "sweep=optunna"], "optunna"),
        (["optimizer.lr=interval(0.1,1)", "sweep=optuna", "sweep.direction=maximize"], "sweep.direction"),
        (["optimizer.lr=interval(0.1,1)", "sweep=optuna", "checkpoint.mode=maximize"], "checkpoint.mode=maximize"),
        (["optimizer.lr=interval(0.1,1)"], "Add -m sweep=optuna sweep.n_trials=20"),
        (["seed=int(interval(1,9))", "optimizer.lr=0.1,1", "sweep=optuna", "sweep.n_trials=2"], "can't be listed"),
        (["seed=1,2", "sweep.over=[fold]"], "sweep.over=[fold]: fold has one value in all trials"),
        (["seed=1", "optimizer.lr=0.1,1", "sweep.over=[seed]"], "seed has one value in all trials"),
        (["seed=1,2", "launcher=in_process"], "to debug a trial, type its values without -m"),
        (["seed=1,2", "job=plan", "launcher=in_process"], "to debug a trial, type its values without -m"),
        (["sweep.worker=nowhere"], "sweep.worker=nowhere: there is no such folder"),
        (["sweep.worker=."], "sweep.worker=.: this is no sweep: it has no sweep.json"),
        (["sweep.worker=auto"], "sweep.worker=auto: there is no such folder"),
        (["seed=1,2", "job=runs"], "job=runs can't go with a sweep"),
        (["seed=1,2", "hydra/launcher=joblib"], "joblib"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(sweep, tmp_path, typed, expected):
    answer = sweep("recipe=toy", *SHORT, *typed)
    assert answer.status == 2
    assert expected in answer.err
    assert not (tmp_path / "outputs").exists()


KEYED = """
class Keyed:
    def __init__(self, secret_key): ...
"""


@pytest.mark.parametrize("search", [(), ("sweep=optuna", "sweep.n_trials=3")], ids=["grid", "search"])
@pytest.mark.parametrize(
    "values", ["+callbacks.k.secret_key=range(1,4)", "callbacks=first_key,second_key"], ids=["typed", "in files"]
)
def test_trials_that_differ_in_hidden_values_are_refused(sweep, tmp_path, search, values):
    """Passwords are masked wherever they are kept, so nobody could say which trial had which."""
    (tmp_path / "keyed.py").write_text(KEYED)
    folder = tmp_path / "conf" / "callbacks"
    folder.mkdir(parents=True)
    for number, name in enumerate(("first_key", "second_key")):
        (folder / f"{name}.yaml").write_text(f"k: {{_target_: keyed.Keyed, secret_key: {number}}}\n")
    keyed = [values]
    if values.startswith("+"):
        keyed.append("+callbacks.k._target_=keyed.Keyed")
    answer = sweep("recipe=toy", *SHORT, *keyed, *search)
    assert answer.status == 2
    assert "Trials differ only in callbacks.k.secret_key" in answer.err
    assert not (tmp_path / "outputs").exists()
    # One value hides nothing.
    one = ("+callbacks.k._target_=keyed.Keyed", "+callbacks.k.secret_key=7", "seed=1,2", "job=plan")
    assert sweep("recipe=toy", *SHORT, *one).status == 0


def test_settings_of_sweeps_need_a_sweep(fork_server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert compose.main(["recipe=toy", "sweep.jobs=2"], fork_server=fork_server) == 2
    assert "sweep.jobs=2 is for sweeps. Type -m too" in capsys.readouterr().err


def test_the_plan_of_a_sweep_starts_nothing(sweep, tmp_path):
    answer = sweep("job=plan", "recipe=toy", *SHORT, "seed=1,2,3", "sweep.jobs=2")
    assert answer.status == 0, answer.err
    assert "trials       3" in answer.out
    assert "at a time    2" in answer.out
    assert "2      seed=3" in answer.out
    assert not (tmp_path / "outputs").exists()


def test_only_the_best_trial_is_tested(sweep, tmp_path):
    answer = sweep("recipe=toy", *SHORT, "optimizer.lr=0.001,0.05")
    assert answer.status == 0, answer.err
    folder = sweep_folder(tmp_path)
    assert [results.results(folder / number)["test"] for number in "01"] == [None, None]
    tested = [number for number in "01" if list((folder / number / "eval").glob("*"))]
    assert tested == ["1"]
    assert "test/loss" in answer.out
    # Continuing it tests nothing again.
    sweep(f"resume={folder}")
    assert len(list((folder / "1" / "eval").iterdir())) == 1


def test_all_trials_are_tested_on_request(sweep, tmp_path):
    sweep("recipe=toy", *SHORT, "seed=1,2", "sweep.test=all")
    folder = sweep_folder(tmp_path)
    assert all(results.results(folder / number)["test"]["metrics"] for number in "01")


EDITED = """
from pathlib import Path

class Edited:
    '''Somebody edits this module while the trial with seed 2 is training.'''
    def __init__(self, seed): self.seed = seed
    def on_fit_start(self, info):
        if self.seed == 2:
            with Path(__file__).open("a") as file: file.write("# another line")
"""


def test_trials_of_changed_code_are_marked(sweep, tmp_path):
    (tmp_path / "edited.py").write_text(EDITED)
    edited = ("+callbacks.e._target_=edited.Edited", "+callbacks.e.seed=${seed}")
    assert sweep("recipe=toy", *SHORT, "seed=1,2,4", "sweep.jobs=1", *edited).status == 0
    folder = sweep_folder(tmp_path)
    # What a trial has imported is looked at before it trains.
    assert [line["code_changed"] for line in table(folder)] == ["false", "false", "true"]
    modules = results.run_file(folder / "0")["modules"]
    assert modules["edited"] == hashlib.sha256(EDITED.encode()).hexdigest()
    assert modules.keys() >= {"recipes.toy"}
    assert not any(name.startswith(("framework", "torch", "numpy")) for name in modules)


# A search


def test_a_search_goes_on_after_a_failed_trial(sweep, tmp_path):
    search = ("sweep=optuna", "sweep.n_trials=5", "optimizer.lr=choice(0.001,0.01,1e30)", "sweep.pruner=null")
    answer = sweep("recipe=toy", *SHORT, "trainer.log_every_n_steps=1", *search)
    assert answer.status in (0, 1), answer.err
    folder = sweep_folder(tmp_path)
    ended = statuses(folder)
    assert set(ended) <= {"finished", "failed"}
    assert "finished" in ended
    # It is a total: nothing is left.
    again = sweep(f"resume={folder}")
    assert len(statuses(folder)) == len(ended)
    assert "running" not in again.out


def test_a_search_goes_on_after_values_that_exclude_each_other(sweep, tmp_path):
    keys = ("data.loader=auto,resident", "data.num_workers=0,1", "sweep.pruner=null")
    answer = sweep("recipe=toy", *SHORT, "sweep=optuna", "sweep.n_trials=12", "sweep.jobs=1", *keys)
    assert answer.status == 0, answer.err
    assert "The search counts data.loader=resident data.num_workers=1 as failed" in answer.err
    assert set(statuses(sweep_folder(tmp_path))) == {"finished"}


def test_the_report_of_a_search_says_which_keys_mattered(sweep, tmp_path):
    keys = ("optimizer.lr=tag(log,interval(1e-5,0.1))", "optimizer.weight_decay=choice(0,1e-9)")
    assert sweep("recipe=toy", *SHORT, "sweep=optuna", "sweep.n_trials=5", "sweep.pruner=null", *keys).status == 0
    assert compose.main(["job=report", f"runs={sweep_folder(tmp_path)}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Importance of what was searched" in page
    shares = {key: int(share) for key, share in re.findall(r"<td>(optimizer\.\w+)</td><td>(\d+)%</td>", page)}
    assert shares.keys() == {"optimizer.lr", "optimizer.weight_decay"}
    assert shares["optimizer.lr"] > shares["optimizer.weight_decay"]


def test_a_search_is_continued_only_as_it_was(sweep, tmp_path):
    """Each wrong continuation is answered before a trial starts or a file changes."""
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\ndefaults: [toy]\ntrainer: {log_every_n_steps: 1}\n")
    typed = ("recipe=mine", *SHORT, "optimizer.lr=interval(0.01,0.1)", "seed=1,2")
    assert sweep(*typed, "sweep=optuna", "sweep.n_trials=2", "sweep.pruner=null", "sweep.jobs=1").status == 0
    folder = sweep_folder(tmp_path)
    assert statuses(folder) == ["finished"] * 4
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    other_plan = plan_of(other)
    other_plan["created"] = "2020-01-01T00:00:00+00:00"
    (other / "sweep.json").write_text(json.dumps(other_plan))

    refusals = {
        ("sweep.n_trials=1",): "sweep.n_trials=1, and the search has chosen 2 already",
        ("checkpoint.mode=max",): "checkpoint.mode=max, and the sweep has searched with min so far",
        ("optimizer.lr=interval(0.01,0.2)",): "The sweep has searched other values so far",
        ("seed=1,2,3",): "The search has compared means over seed=1,2 so far, and not means over seed=1,2,3",
        ("sweep.over=[]", "sweep.n_trials=3"): "sweep.over=[]: the sweep began with sweep.over=[seed]",
        ("trainer.max_epochs=2", "sweep.n_trials=3"): "trainer.max_epochs=2 changes it",
        ("sweep=grid", "sweep.n_trials=null"): "is a search. Leave out sweep=grid",
    }
    before = {file: file.read_bytes() for file in (folder / "sweep.json", folder / "study.log")}
    for changes, expected in refusals.items():
        answer = sweep(f"resume={folder}", *changes)
        assert (answer.status, expected in answer.err) == (2, True), answer.err
    answer = sweep(f"resume={other}", "sweep.n_trials=3")
    assert answer.status == 2
    assert "study.log belongs to another sweep" in answer.err
    recipe.write_text("# @package _global_\ndefaults: [toy]\ntrainer: {log_every_n_steps: 2}\n")
    answer = sweep(f"resume={folder}", "sweep.n_trials=3")
    assert answer.status == 2
    assert "a recipe, or another file that it is composed of, has changed" in answer.err
    assert {file: file.read_bytes() for file in before} == before

    recipe.write_text("# @package _global_\ndefaults: [toy]\ntrainer: {log_every_n_steps: 1}\n")
    assert sweep(f"resume={folder}", "sweep.n_trials=3").status == 0
    assert statuses(folder) == ["finished"] * 6
    # The new total stays.
    assert sweep(f"resume={folder}").status == 0
    assert plan_of(folder)["search"]["n_trials"] == 3


def test_a_search_ends_if_its_first_trial_is_refused(sweep, tmp_path):
    search = ("sweep=optuna", "sweep.n_trials=9", "optimizer.lr=interval(0.01,0.1)", "checkpoint.monitor=val/los")
    answer = sweep("recipe=toy", *SHORT, *search, "sweep.jobs=1")
    assert answer.status == 1
    assert "checkpoint.monitor=val/los is never computed" in answer.out
    assert len(statuses(sweep_folder(tmp_path))) == 1


def test_a_search_prunes_by_the_first_seed_and_compares_means(sweep, tmp_path):
    typed = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=30", *LIMITS)
    search = ("sweep=optuna", "sweep.n_trials=6", "optimizer.lr=choice(1e-6,0.05)", "seed=1,2", "sweep.jobs=1")
    pruner = ("sweep.pruner.n_startup_trials=1", "sweep.pruner.n_warmup_steps=1")
    answer = sweep(*typed, *search, *pruner)
    assert answer.status == 0, answer.err
    folder = sweep_folder(tmp_path)
    lines = table(folder)
    by_value: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        by_value.setdefault(line["optimizer.lr"], []).append(line)
    # Each value runs once with each seed: a search that chooses it again gets the same result.
    assert [line["seed"] for line in by_value["0.05"]] == ["1", "2"]
    assert {line["status"] for line in by_value["0.05"]} == {"finished"}
    best = answer.out.partition("\n1 ")[2].splitlines()[:2]
    assert "optimizer.lr=0.05" in "".join(best)


# Stopping and continuing


def start_sweep(tmp_path: Path, *typed: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "framework", "-m", *typed]
    return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_checkpoints(tmp_path: Path, *, count: int) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if len(list(tmp_path.glob("outputs/multirun/*/*/checkpoints/last"))) >= count:
            return sweep_folder(tmp_path)
        time.sleep(0.05)
    raise AssertionError("no trial has saved a checkpoint")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The folder of a sweep over four seeds that ran without a break."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_framework("-m", *LONG, "seed=1,2,3,4", "sweep.jobs=2", cwd=folder).returncode == 0
    return sweep_folder(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
@pytest.mark.exhaustive
def test_a_stopped_sweep_continues(tmp_path, undisturbed, number):
    typed = (*LONG, "seed=1,2,3", "sweep.jobs=2")
    process = start_sweep(tmp_path, *typed)
    folder = wait_for_checkpoints(tmp_path, count=2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    assert f"resume={folder.relative_to(tmp_path)}" in out
    # One may have finished just before, and another begun.
    assert {"stopped", "interrupted"} & set(statuses(folder))
    assert not {"failed", "crashed"} & set(statuses(folder))

    result = run_framework("-m", "resume=auto", *typed, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert statuses(folder) == ["finished"] * 3
    assert scores(folder) == scores(undisturbed)[:3]


@pytest.mark.exhaustive
def test_a_killed_sweep_continues(tmp_path, undisturbed):
    typed = (*LONG, "seed=1,2,3,4", "sweep.jobs=2")
    process = start_sweep(tmp_path, *typed)
    folder = wait_for_checkpoints(tmp_path, count=2)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    for _ in range(2):
        process = start_sweep(tmp_path, f"resume={folder}")
        time.sleep(4)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=120)

    result = run_framework("-m", f"resume={folder}", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert statuses(folder) == ["finished"] * 4
    assert scores(folder) == scores(undisturbed)


@pytest.mark.exhaustive
def test_a_resumed_trial_goes_on_counting_its_validations(tmp_path):
    """A pruner compares the validations of trials by their numbers."""
    search = ("sweep=optuna", "sweep.n_trials=1", "optimizer.lr=interval(0.001,0.002)", "sweep.jobs=1")
    process = start_sweep(tmp_path, *LONG, *search)
    folder = wait_for_checkpoints(tmp_path, count=1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    before = reported_validations(folder)
    result = run_framework("-m", f"resume={folder}", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    after = reported_validations(folder)[len(before) :]
    # Some follow each other too fast for each to be reported.
    assert 0 <= before[-1] < after[0] < after[-1] < 40
    assert after == sorted(after)


def reported_validations(folder: Path) -> list[int]:
    """The numbers of the validations that Optuna was told of, in this order."""
    entries = [json.loads(line) for line in (folder / "study.log").read_text().splitlines()]
    return [entry["step"] for entry in entries if "intermediate_value" in entry]


def scores(folder: Path) -> list[tuple[str, str]]:
    return [(line["val/loss"], line["step"]) for line in table(folder)]


@pytest.mark.exhaustive
def test_two_workers_share_a_sweep(tmp_path):
    process = start_sweep(tmp_path, *LONG, "seed=range(1,7)", "sweep.jobs=1")
    folder = wait_for_checkpoints(tmp_path, count=1)
    helper = run_framework(f"sweep.worker={folder}", "sweep.jobs=1", cwd=tmp_path)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert helper.returncode == 0, helper.stdout + helper.stderr
    assert statuses(folder) == ["finished"] * 6
    own = {line.split()[0] for line in out.splitlines() if line.endswith("running")}
    helped = {line.split()[0] for line in helper.stdout.splitlines() if line.endswith("running")}
    assert helped
    assert not own & helped


@pytest.mark.exhaustive
def test_two_commands_that_resume_a_sweep_share_it(tmp_path):
    stopped = start_sweep(tmp_path, *LONG, "seed=range(1,7)", "sweep.jobs=1")
    folder = wait_for_checkpoints(tmp_path, count=1)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=120)
    # One of them adds trials.
    both = [start_sweep(tmp_path, f"resume={folder}", "sweep.jobs=1", *more) for more in ((), ("seed=range(5,9)",))]
    started = []
    for process in both:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out
        started += [line.split()[0] for line in out.splitlines() if line.endswith("running")]
    assert len(started) == len(set(started)) >= 7
    assert statuses(folder) == ["finished"] * 8
    # Only one of them evaluates the best trial.
    assert len(list(folder.glob("*/eval/*"))) == 1


def test_the_list_of_a_sweep_has_a_row_for_each_setting(sweep, tmp_path, capfd):
    """The sweep is named without its folder; a sweep without seeds needs no second table."""
    assert sweep("recipe=toy", *SHORT, "optimizer.lr=0.001,0.1", "seed=1,2").status == 0
    folder = sweep_folder(tmp_path)

    def listed(*arguments: str) -> str:
        capfd.readouterr()
        assert compose.main(["job=runs", f"runs={folder.name}", *arguments]) == 0
        return str(capfd.readouterr().out)

    runs, table_of_rows = listed().split(f"\n\noutputs/multirun/{folder.name}\n")
    assert f"4 runs in {folder.name}: 4 finished" in runs
    ranked = [line for line in table_of_rows.splitlines() if "optimizer.lr=" in line]
    assert ["optimizer.lr=0.1" in line for line in ranked] == [True, False]
    assert "mean val/loss" in table_of_rows
    assert len(json.loads(listed("runs.format=json"))) == 4

    # A plan that can't be read hides no run.
    (folder / "sweep.json").write_text("{")
    assert "mean" not in listed()
    assert compose.main(["job=compare", f"runs={folder.name}"]) == 0
    assert compose.main(["job=report", f"runs={folder.name}"]) == 0


def evaluated_models(folder: Path) -> list[dict[str, str]]:
    """The lines of results.csv of a sweep of evaluations."""
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_models_of_a_sweep_are_evaluated_in_one_table(sweep, tmp_path):
    """On two parts, best model first, though one checkpoint is damaged; it is tried again on a resume."""
    assert sweep("recipe=toy", *SHORT, "optimizer.lr=0.0001,0.1,0.05").status == 0
    trained = sweep_folder(tmp_path)
    weights = trained / "0" / "checkpoints" / "best" / "model.pt"
    intact = weights.read_bytes()
    damaged = bytearray(intact)
    damaged[-1] ^= 1
    weights.write_bytes(damaged)

    answer = sweep("job=eval", f"checkpoint.path={trained}", "eval.part=train,val", "sweep.jobs=1")
    assert answer.status == 1, answer.err
    (evaluated,) = {*(tmp_path / "outputs" / "multirun").iterdir()} - {trained}
    lines = evaluated_models(evaluated)
    assert [line["overrides"] for line in lines] == [f"optimizer.lr={rate}" for rate in (0.0001, 0.1, 0.05)]
    assert [line["status"].partition(":")[0] for line in lines] == ["refused", "finished", "finished"]
    assert "model.pt" in lines[0]["status"]
    for line in lines[1:]:
        run = json.loads((tmp_path / line["checkpoint"] / "../../run.json").read_text())
        assert float(line["val/loss"]) == pytest.approx(run["results"]["score"], rel=1e-5)
        assert float(line["train/loss"]) > 0
    shown = answer.out[answer.out.index("\nmodel") :].splitlines()[2:5]
    assert [line.split()[1] for line in shown] == ["optimizer.lr=0.1", "optimizer.lr=0.05", "optimizer.lr=0.0001"]
    assert "6 evaluations of 3 models: 4 finished, 2 refused" in answer.out

    weights.write_bytes(intact)
    assert sweep(f"resume={evaluated}").status == 0
    lines = evaluated_models(evaluated)
    assert [line["status"] for line in lines] == ["finished"] * 3
    assert float(lines[0]["val/loss"]) > float(lines[1]["val/loss"])


def test_models_of_several_runs_keep_their_own_configurations(sweep, tmp_path):
    """Recipes with other data and metrics, named as a run, a checkpoint and a sweep."""
    assert sweep("recipe=toy", *SHORT, "seed=1,2").status == 0
    trained = sweep_folder(tmp_path)
    for recipe in ("toy", "digits"):
        assert run_framework(f"recipe={recipe}", "trainer.gpus=0", *SHORT, cwd=tmp_path).returncode == 0
    (toy,) = (tmp_path / "outputs" / "toy").iterdir()
    (digits,) = (tmp_path / "outputs" / "digits").iterdir()
    answer = sweep("job=eval", f"checkpoint.path={toy},{digits}/checkpoints/best,{trained}", "eval.part=val")
    assert answer.status == 0, answer.err
    (evaluated,) = {*(tmp_path / "outputs" / "multirun").iterdir()} - {trained}
    lines = evaluated_models(evaluated)
    assert [Path(line["checkpoint"]).parts[1] for line in lines] == ["toy", "digits", "multirun", "multirun"]
    assert [bool(line["val/accuracy"]) for line in lines] == [False, True, False, False]
    assert not (toy / "eval").exists()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("{sweep}/0,nowhere", "nowhere"),
        ("{sweep},{sweep}/sweep.json", "sweep.json"),
        ("{empty}", "no trial of the sweep has a checkpoint yet"),
        ("[1,2]", "must name runs, checkpoints or sweeps"),
    ],
    ids=["no such run", "a file", "a sweep without checkpoints", "numbers"],
)
def test_models_that_are_not_there_are_refused_before_any_is_evaluated(sweep, tmp_path, path: str, says: str):
    assert sweep("recipe=toy", *SHORT, "seed=1").status == 0
    trained = sweep_folder(tmp_path)
    empty = tmp_path / "empty"
    shutil.copytree(trained, empty, ignore=shutil.ignore_patterns("checkpoints"))
    answer = sweep("job=eval", f"checkpoint.path={path.format(sweep=trained, empty=empty)}")
    assert answer.status == 2
    assert says in answer.err
    assert [*(tmp_path / "outputs" / "multirun").iterdir()] == [trained]


def test_a_sweep_is_no_single_model(sweep, tmp_path):
    assert sweep("recipe=toy", *SHORT, "seed=1").status == 0
    trained = sweep_folder(tmp_path)
    done = run_framework("job=eval", f"checkpoint.path={trained}", cwd=tmp_path)
    assert (done.returncode, "Type -m too" in done.stderr) == (2, True)
