"""Documented commands work: they compose, fit their targets, and the example of an own recipe trains."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from framework import BatchInfo, EpochInfo, EvalInfo, FitInfo, Job, StepInfo
from framework.checkpoint import LocalStorage
from tests.helpers.documents import (
    ONLY_ANSWERS,
    Command,
    all_commands,
    commands,
    covering,
    documents,
    make_targets,
    write_shown_files,
)
from tests.helpers.internals import (
    FUNCTION,
    JOBS,
    JobResult,
    Request,
    check_targets,
    compose,
    create_run_dir,
    known_keys,
    save_config,
    sweep_module,
    write_checkpoint,
)
from tests.helpers.source import ROOT

ALL = all_commands()
BY_DEFAULT = covering(
    (command for command in ALL if command.place == "README.md" and "-m" not in command.arguments), options=False
)
# What several pages show is tried once.
DIFFERENT = list({tuple(command.arguments): command for command in [*ALL, *BY_DEFAULT]}.values())
# By default, each key that the README shows is tried.
TRIED = [
    command if command in BY_DEFAULT else pytest.param(command, marks=pytest.mark.exhaustive) for command in DIFFERENT
]


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the documentation shows, as a reader would have made them."""
    write_shown_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What jobs were asked to do; none of them does anything."""
    asked: list[Request] = []
    note_jobs(asked, monkeypatch)
    note_trials(asked, monkeypatch)
    return asked


@pytest.fixture(scope="module")
def default() -> Request:
    """What the command without arguments asks for."""
    asked: list[Request] = []
    with pytest.MonkeyPatch.context() as patch:
        note_jobs(asked, patch)
        assert compose.main([]) == 0
    return asked[0]


def note_jobs(asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the requests of jobs instead of doing them."""

    def note(_: Job, request: Request) -> JobResult:
        asked.append(request)
        return JobResult(0)

    # A class of the reader's own inherits it.
    monkeypatch.setattr(Job, "run", note)
    for job in (*JOBS.values(), FUNCTION):
        monkeypatch.setattr(pkgutil.resolve_name(job.path), "run", note)


def note_trials(asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the trials of sweeps, which would run in processes of their own."""

    def slots(_: object, requests: Sequence[Request], *, count: int) -> list[object]:
        asked.extend(requests)
        return []

    def plan_text(requests: Sequence[Request], _: object) -> str:
        asked.extend(requests)
        return ""

    monkeypatch.setattr(sweep_module, "_slots", slots)
    monkeypatch.setattr(sweep_module, "sweep_plan_text", plan_text)
    monkeypatch.setattr(sweep_module, "_run", lambda *_, **__: JobResult(0))


def test_the_readme_shows_commands() -> None:
    shown = [command.text for command in ALL if command.place == "README.md"]
    assert "python -m framework" in shown
    assert len(shown) >= 10


# Hydra logs when it is asked for information.
@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("command", TRIED, ids=lambda command: f"{command.place}: {command.text}")
def test_a_shown_command_composes_and_fits_its_targets(
    command: Command, default: Request, shown: Path, requests: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    status = compose.main([*command.concrete, *_stand_ins(command, default, folder=shown)])
    assert status == 0, capsys.readouterr().err
    if ONLY_ANSWERS & set(command.arguments):
        assert capsys.readouterr().out.strip()
        assert requests == []
    else:
        assert requests
    for request in requests:
        check_targets(request.config)


def _stand_ins(command: Command, default: Request, *, folder: Path) -> list[str]:
    """For runs and checkpoints that only the reader has, one that wasn't trained; other placeholders go."""
    keys = {argument.partition("=")[0] for argument in command.placeholders}
    if not keys & {"run", "runs", "checkpoint.path"}:
        return []
    run_dir = create_run_dir(folder / "outputs" / "stand-in")
    if "runs" in keys:
        return [f"runs=[{run_dir.path},outputs]"]
    save_config(run_dir, raw=default.raw, overrides=default.overrides)
    if "run" in keys:
        return [f"run={run_dir.path}"]
    state: dict[str, Any] = {"model": {}, "training": {}, "generators": []}
    text = run_dir.config_file.read_text()
    name = write_checkpoint(LocalStorage(run_dir.checkpoints), state, step=1, epoch=0, metrics={}, config_text=text)
    checkpoint = run_dir.checkpoints / name
    return [f"checkpoint.path={checkpoint}", "trust=true"]


def test_placeholders_and_make_targets_exist() -> None:
    for command in ALL:
        keys = {argument.partition("=")[0] for argument in command.placeholders if "=" in argument}
        assert keys <= set(known_keys()), command
    known = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in documents():
        assert make_targets(file.read_text()) <= known, file


def test_commands_are_found_as_they_are_written() -> None:
    text = """Type `python -m framework recipe=toy` or
```
$ make train ARGS="recipe=toy seed=1"
python -m framework a=1 \\
    b=2    # a comment
python -m framework resume=outputs/digits/...
  python -m framework --help   says more
torchrun --nnodes=2 \\
    --nproc-per-node=4 -m framework c=3
srun -N2 python -m framework resume="$run" # from a script
```
```yaml
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master: {template: {spec: {containers: [{command: [torchrun, -m, framework, d=4]}]}}}
```
```text
look at it with: python -m framework resume=outputs/digits/2026
```
"""
    found = list(commands(text, place="here"))
    assert [command.arguments for command in found] == [
        ["recipe=toy"],
        ["recipe=toy", "seed=1"],
        ["a=1", "b=2"],
        ["resume=outputs/digits/..."],
        ["--help"],
        ["c=3"],
        ["resume=$run"],
        ["d=4"],
    ]
    assert found[3].placeholders == ["resume=outputs/digits/..."]
    assert found[3].concrete == found[6].concrete == []


def test_contributing_names_existing_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:framework|conf|docs|tests)/[\w./]*)`", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("info", [BatchInfo, EpochInfo, EvalInfo, FitInfo, StepInfo])
def test_the_page_lists_what_info_has(info: Any) -> None:
    text = (ROOT / "docs/own_code.md").read_text()
    (attributes,) = re.findall(rf"^\| `{info.__name__}` \|.*\|(.*)\|$", text, flags=re.MULTILINE)
    shown = set(re.findall(r"`(?:info\.)?(\w+)", attributes))
    assert shown == set(inspect.get_annotations(info))
