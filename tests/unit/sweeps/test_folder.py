"""A sweep on disk: its plan survives damage, strangers and several writers; it is found again by its name."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError, DiskError
from tests.helpers.command import run_python
from tests.helpers.disks import full_at
from tests.helpers.internals import (
    RunDir,
    SearchPlan,
    SweepFolder,
    SweepPlan,
    Trial,
    config_hash,
    create_run_dir,
    find_sweep,
    newest_unfinished_sweep,
    save_config,
)
from tests.unit.config.raw import raw_config

ADDS_TRIALS = """
import sys
from pathlib import Path
from tests.helpers.internals import SweepFolder, Trial

folder = SweepFolder(Path(sys.argv[1]))
for step in range(15):
    mine = Trial(0, ("seed=" + sys.argv[2],), f"{sys.argv[2]} {step}")
    shared = Trial(0, ("seed=0",), f"shared {step}")
    added = folder.add_trials([mine, shared])
    assert [trial.config_hash for trial in added] == [mine.config_hash, shared.config_hash]
"""


def trial(number: int, *overrides: str) -> Trial:
    """A trial, whose overrides stand for its configuration."""
    return Trial(number, overrides, config_hash=sha256(" ".join(overrides).encode()).hexdigest())


PLAN = SweepPlan(
    created="2030-01-02T12:00:00+00:00",
    arguments=("-m", "recipe=toy", "optimizer.lr=0.1,1"),
    overrides=("recipe=toy", "optimizer.lr=0.1,1"),
    search_path=("file:///my/conf",),
    job="train",
    recipe="toy",
    monitor="val/loss",
    mode="min",
    over=("seed",),
    search=None,
    trials=(trial(0, "recipe=toy", "optimizer.lr=0.1"), trial(1, "recipe=toy", "optimizer.lr=1")),
)
SEARCH = replace(
    PLAN, search=SearchPlan(space={"optimizer.lr": "interval(0.1,1)"}, sampler={"seed": 1}, pruner=None, n_trials=3)
)
SECRET = replace(
    PLAN,
    arguments=("-m", "logger.wandb.api_key=abc123def", "--token", "abc123def"),
    overrides=("recipe=toy", "logger.wandb.api_key=abc123def", "+note=by_abc123def", "optimizer.lr=0.1,1"),
    trials=(
        trial(0, "logger.wandb.api_key=abc123def", "+note=by_abc123def", "optimizer.lr=0.1"),
        trial(1, "data.root=https://me:pass@host/x", "logger.wandb={api_key:abc123def,x:1}"),
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    """Where a sweep may be written."""
    path = tmp_path / "outputs" / "multirun" / "2030-01-02_12-00-00_abcd"
    path.mkdir(parents=True)
    return SweepFolder(path)


def end(folder: SweepFolder, *statuses: str | None) -> None:
    """Have the trials end with these statuses; None: it hasn't started."""
    for number, status in enumerate(statuses):
        if status is not None:
            run_dir = folder.trial(number)
            run_dir.path.mkdir(exist_ok=True)
            run_dir.update_run({"status": status})


# sweep.json


@pytest.mark.parametrize("plan", [PLAN, SEARCH, replace(PLAN, monitor=None, mode="max", over=(), trials=())])
def test_a_plan_is_read_as_it_was_written(folder: SweepFolder, plan: SweepPlan) -> None:
    plan.write(folder)
    assert SweepPlan.read(folder) == SweepPlan.read_with_secrets(folder) == plan
    assert [path.name for path in folder.path.iterdir()] == ["sweep.json"]


def test_the_file_has_what_is_documented(folder: SweepFolder) -> None:
    SEARCH.write(folder)
    assert json.loads(folder.sweep_file.read_text()) == {
        "version": 1,
        "created": "2030-01-02T12:00:00+00:00",
        "arguments": ["-m", "recipe=toy", "optimizer.lr=0.1,1"],
        "overrides": ["recipe=toy", "optimizer.lr=0.1,1"],
        "search_path": ["file:///my/conf"],
        "job": "train",
        "recipe": "toy",
        "monitor": "val/loss",
        "mode": "min",
        "over": ["seed"],
        "search": {
            "space": {"optimizer.lr": "interval(0.1,1)"},
            "sampler": {"seed": 1},
            "pruner": None,
            "n_trials": 3,
        },
        "trials": [
            {"number": 0, "overrides": ["recipe=toy", "optimizer.lr=0.1"], "config_hash": PLAN.trials[0].config_hash},
            {"number": 1, "overrides": ["recipe=toy", "optimizer.lr=1"], "config_hash": PLAN.trials[1].config_hash},
        ],
    }


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of everything in JSON."""
    yield path
    if isinstance(node, dict):
        for name, value in node.items():
            yield from places(value, (*path, name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from places(value, (*path, index))


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return JSON with another value at one place."""
    if not path:
        return value
    content = deepcopy(content)
    node = content
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return content


def read_or_refused(folder: SweepFolder) -> SweepPlan | str:
    """Return the plan, or the message that refuses it."""
    try:
        return SweepPlan.read(folder)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("value", [None, True, -1, 0.5, 10**40, "x", "\ud800", [], [[]], {}, {"x": None}])
def test_foreign_content_is_refused_in_one_line(folder: SweepFolder, value: Any) -> None:
    SEARCH.write(folder)
    content = json.loads(folder.sweep_file.read_text())
    refused = set()
    for place in places(content):
        folder.sweep_file.write_text(json.dumps(with_value(content, place, value)))
        plan = read_or_refused(folder)
        if isinstance(plan, str):
            assert plan.startswith(f"{folder.sweep_file} ")
            assert plan.endswith((" Restore it from a copy.", " Update the framework."))
            assert "\n" not in plan
            refused.add(place)
        else:
            assert all(type(planned.number) is int and planned.number >= 0 for planned in plan.trials)
            plan.write(folder)
            assert SweepPlan.read(folder) == plan
    # Whatever the value is, it can't be all of these.
    assert {(), ("version",), ("mode",), ("trials", 1)} <= refused
    assert ("created",) in refused or isinstance(value, str)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"version": 2}', "was written by a later version of the framework. Update the framework."),
        ('{"version": "1"}', "isn't the plan of a sweep: it has no version."),
        ("[1]", "isn't the plan of a sweep"),
        ('{"version": 1', "can't be read: Expecting"),
        ("[" * 100_000, "can't be read: it is nested too deeply"),
        ("\xff", "can't be read"),
    ],
)
def test_what_is_no_plan_is_named(folder: SweepFolder, text: str, reason: str) -> None:
    folder.sweep_file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=reason) as caught:
        SweepPlan.read(folder)
    assert str(caught.value).startswith(f"{folder.sweep_file} ")


def test_trials_have_different_numbers(folder: SweepFolder) -> None:
    replace(PLAN, trials=(trial(3, "a=1"), trial(3, "a=2"))).write(folder)
    with pytest.raises(ConfigError, match="two of its trials have the same number"):
        SweepPlan.read(folder)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_is_never_waited_for(folder: SweepFolder, make: Callable[[Path], None]) -> None:
    make(folder.sweep_file)
    with pytest.raises(ConfigError, match=r"sweep\.json can't be read"):
        SweepPlan.read(folder)


def test_a_huge_file_is_not_read(folder: SweepFolder) -> None:
    with folder.sweep_file.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="can't be read: it has 1,099,511,627,776 bytes"):
        SweepPlan.read(folder)


def test_a_folder_without_a_plan_is_no_sweep(folder: SweepFolder) -> None:
    with pytest.raises(ConfigError, match=r"is no sweep: it has no sweep\.json"):
        SweepPlan.read(folder)


def test_a_full_disk_keeps_the_plan(folder: SweepFolder) -> None:
    PLAN.write(folder)
    with full_at(100), pytest.raises(DiskError, match=r"sweep\.json can't be written: File too large"):
        SEARCH.write(folder)
    assert SweepPlan.read(folder) == PLAN
    assert len(list(folder.path.iterdir())) == 1


# Adding trials


def test_numbers_continue_and_nothing_is_repeated(folder: SweepFolder) -> None:
    PLAN.write(folder)
    old = PLAN.trials[1]
    new = trial(0, "optimizer.lr=10")
    newer = trial(0, "optimizer.lr=100")
    added = folder.add_trials([new, replace(old, number=7), newer, new])
    assert added == [replace(new, number=2), old, replace(newer, number=3), replace(new, number=2)]
    assert SweepPlan.read(folder).trials == (*PLAN.trials, added[0], added[2])
    written_ns = folder.sweep_file.stat().st_mtime_ns
    assert folder.add_trials([newer, old]) == [added[2], old]
    assert folder.sweep_file.stat().st_mtime_ns == written_ns


def test_the_directory_of_a_forgotten_trial_is_left_alone(folder: SweepFolder) -> None:
    """The plan was restored from an older copy."""
    PLAN.write(folder)
    for number in (2, 3):
        folder.trial(number).path.mkdir()
    (added,) = folder.add_trials([trial(0, "seed=1")])
    assert added.number == 4


def test_a_plan_can_be_changed(folder: SweepFolder) -> None:
    SEARCH.write(folder)

    def longer(plan: SweepPlan) -> SweepPlan:
        assert plan.search is not None
        return replace(plan, search=replace(plan.search, n_trials=9))

    assert folder.update(longer) == SweepPlan.read(folder) == longer(SEARCH)


@pytest.mark.multiproc
def test_several_processes_add_trials(folder: SweepFolder) -> None:
    PLAN.write(folder)

    def add(name: int) -> None:
        assert run_python("-c", ADDS_TRIALS, str(folder.path), str(name)).returncode == 0

    threads = [threading.Thread(target=add, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trials = SweepPlan.read(folder).trials
    assert [planned.number for planned in trials] == list(range(2 + 4 * 15))
    hashes = [planned.config_hash for planned in trials[2:]]
    assert len(set(hashes)) == len(hashes) == 4 * 15


# Secrets


def test_passwords_are_in_a_file_of_the_owner_only(folder: SweepFolder) -> None:
    SECRET.write(folder)
    text = folder.sweep_file.read_text()
    assert "abc123def" not in text
    assert "pass@" not in text
    assert SweepPlan.read(folder).arguments == ("-m", "logger.wandb.api_key=***", "--token", "***")
    assert SweepPlan.read(folder).overrides[1:3] == ("logger.wandb.api_key=***", "+note=by_***")
    assert stat.S_IMODE(folder.secrets_file.stat().st_mode) == 0o600
    restored = SweepPlan.read_with_secrets(folder)
    assert restored == replace(SECRET, arguments=restored.arguments)


def test_added_trials_keep_the_secrets_of_others(folder: SweepFolder) -> None:
    SECRET.write(folder)
    (added,) = folder.add_trials([trial(0, "logger.wandb.api_key=fed321cba")])
    assert "fed321cba" not in SweepPlan.read(folder).trials[2].overrides[0]
    assert SweepPlan.read_with_secrets(folder).trials == (*SECRET.trials, added)


def test_a_copy_without_secrets_asks_for_them(folder: SweepFolder) -> None:
    SECRET.write(folder)
    folder.secrets_file.unlink()
    copy = SweepPlan.read_with_secrets(folder)
    with pytest.raises(ConfigError) as caught:
        copy.with_typed_secrets(["logger.wandb.api_key=abc123def"])
    assert str(caught.value).startswith("note, data.root, logger.wandb: this copy of the sweep lacks")
    typed = [text for text in (*SECRET.overrides, *SECRET.trials[1].overrides) if "=0.1" not in text]
    restored = copy.with_typed_secrets(typed)
    assert restored == replace(SECRET, arguments=copy.arguments)
    assert PLAN.with_typed_secrets([]) == PLAN
    folder.update(lambda plan: plan.with_typed_secrets(typed))
    assert SweepPlan.read_with_secrets(folder) == restored


@pytest.mark.parametrize("damaged", [False, True])
def test_secrets_of_another_sweep_are_refused(folder: SweepFolder, damaged: bool) -> None:
    SECRET.write(folder)
    text = folder.secrets_file.read_text()
    if damaged:
        folder.secrets_file.write_text(text.replace("logger.wandb.api_key=abc123def", "[1]"))
    else:
        folder.secrets_file.write_text(text.replace("logger.wandb.api_key=", "recipe="))
    with pytest.raises(ConfigError, match=r"secrets\.yaml doesn't belong to the sweep\.json beside it"):
        SweepPlan.read_with_secrets(folder)
    folder.secrets_file.write_text("a: [")
    with pytest.raises(ConfigError, match=r"secrets\.yaml can't be read"):
        SweepPlan.read_with_secrets(folder)
    assert SweepPlan.read(folder).recipe == "toy"


# Configurations


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep": {"jobs": 2}},
        {"resume": "outputs/x"},
        {"trust": True},
        {"tags": ["a"]},
        {"path.outputs": "elsewhere"},
        {"logger": {}},
        {"trainer.progress": "plain"},
        {"eval.part": "val"},
        {"runs.sort": "best"},
    ],
    ids=str,
)
def test_what_changes_no_number_is_the_same_trial(changes: dict[str, Any]) -> None:
    assert config_hash(raw_config(changes)) == config_hash(raw_config({}))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"optimizer.lr": 0.3},
        {"model.new": None},
        {"trainer.limit_train_batches": 1},
        {"trainer.limit_train_batches": 1.0},
        {"init_from": "weights.pt"},
        {"model.by_number": {1: "a", "b": 2}},
        {"job": "eval"},
        {"job": "eval", "eval.part": "val"},
        {"job": "eval", "checkpoint.path": "outputs/x"},
    ],
    ids=str,
)
def test_what_changes_a_number_is_another_trial(changes: dict[str, Any]) -> None:
    seen = [raw_config({}), raw_config({"trainer.limit_train_batches": 2}), raw_config({"job": "eval", "seed": 1})]
    assert config_hash(raw_config(changes)) not in [config_hash(raw) for raw in seen]
    assert config_hash(raw_config(changes)) == config_hash(dict(reversed(raw_config(changes).items())))


def test_a_whole_number_and_a_share_are_different() -> None:
    """One batch, and all of them."""
    one, share = (config_hash(raw_config({"trainer.limit_train_batches": value})) for value in (1, 1.0))
    assert one != share


def test_a_hash_tells_no_password() -> None:
    hashes = {config_hash(raw_config({"task.api_key": key})) for key in ("abc123def", "fed321cba")}
    assert len(hashes) == 1


# Which sweep


def test_a_sweep_is_found_by_its_path(folder: SweepFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAN.write(folder)
    monkeypatch.chdir(tmp_path)
    for path in (folder.path, folder.path.relative_to(tmp_path), f"{folder.path}/"):
        assert find_sweep(path) == folder
    # The name that a user has given it.
    (tmp_path / "mine").symlink_to(folder.path)
    assert find_sweep("mine").path.samefile(folder.path)


def test_a_wrong_path_suggests_a_sweep(folder: SweepFolder, tmp_path: Path) -> None:
    PLAN.write(folder)
    newer = SweepFolder(folder.path.with_name("2031-01-02_12-00-00_abcd"))
    newer.path.mkdir()
    PLAN.write(newer)
    run_dir = create_run_dir(tmp_path / "outputs" / "toy")
    for run in (run_dir, folder.trial(0)):
        run.path.mkdir(exist_ok=True)
        save_config(run, raw=raw_config({}), overrides=["recipe=toy"])
    answers = {
        f"{folder.path}x": f"there is no such folder.\nDid you mean resume={folder.path}?",
        f"{newer.path.parent}": f"this is no sweep: it has no sweep.json.\nThe newest sweep in it: resume={newer.path}",
        f"{tmp_path / 'outputs'}": f"The newest sweep in it: resume={newer.path}",
        f"{folder.sweep_file}": f"It lies in a sweep: resume={folder.path}",
        f"{folder.trial(0).path}": "this is one run, not a sweep. Leave -m out to resume it.\nIt lies in a sweep: ",
        f"{run_dir.path}": "this is one run, not a sweep. Leave -m out to resume it.",
        "/no\0where": "there is no such folder.",
        f"/{'x' * 5000}": "there is no such folder.",
    }
    for path, answer in answers.items():
        with pytest.raises(ConfigError) as caught:
            find_sweep(path)
        assert str(caught.value).startswith(f"resume={path}: ")
        assert answer in str(caught.value)
    with pytest.raises(ConfigError, match=rf"sweep\.worker={run_dir.path}: this is one run, not a sweep\.$"):
        find_sweep(run_dir.path, key="sweep.worker")


@pytest.mark.parametrize("name", ["0", "logs", "logs/0.log", "claims", "claims/0.1", "study.log"])
def test_nothing_is_written_through_a_symlink(folder: SweepFolder, name: str) -> None:
    PLAN.write(folder)
    place = folder.path / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to("/tmp")
    with pytest.raises(ConfigError, match=f"{place} is a symlink, and might be written to"):
        find_sweep(folder.path)


def unfinished(outputs: Path, *, not_own: tuple[SweepFolder, ...] = ()) -> SweepFolder | None:
    return newest_unfinished_sweep(outputs, fits=lambda folder: folder not in not_own)


def test_the_newest_unfinished_sweep_is_resumed(folder: SweepFolder, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    assert unfinished(tmp_path / "nowhere") is None
    assert unfinished(outputs) is None
    older = SweepFolder(folder.path.with_name("2029-01-02_12-00-00_abcd"))
    older.path.mkdir()
    PLAN.write(older)
    PLAN.write(folder)
    (outputs / "multirun" / "9999").mkdir()
    for statuses in ((None, None), ("finished", None), ("stopped", "pruned")):
        end(folder, *statuses)
        assert unfinished(outputs) == folder
        assert unfinished(outputs, not_own=(folder,)) == older
    # What failed is run again only on request.
    for statuses in (("pruned", "finished"), ("finished", "failed")):
        end(folder, *statuses)
        assert unfinished(outputs) == older
    # Damage is a reason to run it again.
    folder.trial(1).run_file.write_text("{")
    assert unfinished(outputs) == folder


def test_a_damaged_sweep_stops_the_choice(folder: SweepFolder, tmp_path: Path) -> None:
    folder.sweep_file.write_text("{}")
    with pytest.raises(ConfigError, match=f"{folder.sweep_file} isn't the plan"):
        unfinished(tmp_path / "outputs")


def test_places_of_a_trial(folder: SweepFolder) -> None:
    assert folder.trial(3) == RunDir(folder.path / "3")
    assert folder.trial_log(3) == folder.path / "logs" / "3.log"
