"""Every command of the documentation is run: those of the README always, the others with `--exhaustive`.

Trainings are cut to a few steps. What needs GPUs or several nodes is planned instead; what needs MNIST's files too,
where they aren't there. Commands that only answer (`--help`, `--cfg`) are run by tests/shape/test_docs.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from framework import cli
from tests.conftest import DATA_VARIABLE
from tests.helpers.documents import ONLY_ANSWERS, Command, commands, documents, write_shown_files

if TYPE_CHECKING:
    from framework.launch.warm import WarmServer

pytestmark = pytest.mark.multiproc

_ALL = [command for file in documents() for command in commands(file.read_text(), place=file.name)]
_ALWAYS = {tuple(command.arguments) for command in _ALL if command.place == "README.md"}
_DIFFERENT = {
    tuple(command.arguments): command
    for command in _ALL
    if not ONLY_ANSWERS & set(command.arguments) and command.arguments != ["…"]
}

SHORT = {
    "train": ("trainer.max_epochs=1", *(f"trainer.limit_{part}_batches=1" for part in ("train", "val", "test"))),
    "parity": ("parity.steps=1",),
    "preflight": ("preflight.seconds=0.1", "preflight.max_bytes=4096"),
    "tune": ("tune.max_batch_size=16",),
}
"""By job, what makes it short."""
NEEDS_MORE = re.compile(r"trainer\.gpus=[1-9]\d*|topology=multi_node|topology\.nnodes=.*")
"""Machines that the tests don't have."""
LEFT_OUT = re.compile(r"(data\.root|data\.mirrors|path\.outputs|preflight\.(min|max)_\w+)=.*")
"""Places that don't exist here, and speeds that a machine needn't have to run tests."""
A_RUN = re.compile(r"(?<==)(outputs/\w+/)?(RUN|\.\.\.|\$run)")

Answer = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as of a reader who has made the files that the documentation shows, and their data."""
    made = tmp_path_factory.mktemp("reader")
    write_shown_files(made)
    for name in ("a.txt", "b.txt", "c.txt"):
        (made / name).write_text("0 1 2 3 4 5 6 7 8 9 0 1 2 3 4\n" * 40)
    return made


@pytest.fixture
def answer(warm: WarmServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return lambda *arguments: cli.main(arguments, warm=warm)


@pytest.fixture
def run_dir(answer: Answer, folder: Path, tmp_path: Path) -> Path:
    """A copy of a run that was ended after two steps: what `outputs/digits/...` and `RUN` stand for."""
    if not (folder / "ended").exists():
        short = ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.max_steps=2", "scheduler=none")
        limits = ("trainer.val_check_interval=2", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
        assert answer("recipe=digits", "path.outputs=ended", "trainer.gpus=0", *short, *limits) == 0
    first = min(folder.glob("ended/digits/*"))  # evaluations lie there too
    return Path(shutil.copytree(first, tmp_path / "run", symlinks=True))


@pytest.mark.usefixtures("own_state")  # launcher=in_place trains in this process
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=command.text, marks=() if key in _ALWAYS else pytest.mark.exhaustive)
        for key, command in _DIFFERENT.items()
    ],
)
def test_a_documented_command_runs(command: Command, answer: Answer, request: pytest.FixtureRequest) -> None:
    if "export.format=onnx" in command.arguments and not importlib.util.find_spec("onnxscript"):
        pytest.skip("onnxscript isn't installed")
    typed = _short(command, request)
    capture = request.config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()
    status = answer(*typed)
    printed = "".join(capture.read_global_capture())  # of the ranks, too, whose server is older than any `capfd`
    assert status == 0, printed
    assert "Warning" not in printed


def _short(command: Command, request: pytest.FixtureRequest) -> list[str]:
    """What is typed for a command: with a run of this machine, its files, few steps; or the plan of it."""
    arguments = [text for text in command.arguments if not LEFT_OUT.fullmatch(text)]
    if any(A_RUN.search(text) or "CHECKPOINT" in text for text in arguments):
        run = str(request.getfixturevalue("run_dir"))
        arguments = [A_RUN.sub(run, text).replace("=CHECKPOINT", f"={run}") for text in arguments]
        arguments = [text.replace("CHECKPOINT", "last") for text in arguments]
    (job,) = {text.removeprefix("job=") for text in arguments if text.startswith("job=")} or {"train"}
    if any(text.startswith("recipe=mnist") for text in arguments):
        if os.environ.get(DATA_VARIABLE):
            arguments.append(f"data.root={request.getfixturevalue('data_root')}")
        else:
            job = "plan"
    if any(NEEDS_MORE.fullmatch(text) for text in arguments):
        job = "plan"
    if job == "plan":
        return ["job=plan", *(text for text in arguments if not text.startswith("job="))]
    if not any(text.startswith("trainer.gpus=") for text in arguments):
        arguments.append("trainer.gpus=0")
    if any(text.startswith("resume=") and text != "resume=auto" for text in arguments):
        return [*arguments, "trainer.max_steps=null"]
    return [*arguments, *SHORT.get(job, ())]
