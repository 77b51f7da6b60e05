"""Completion of the command line: what it offers, and in real shells, typed with Tab."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.command import ROOT, run_framework
from tests.helpers.internals import completions
from tests.helpers.requirements import missing

RUNS = ("outputs/toy/one", "outputs/digits/two", "outputs/multirun/three")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with runs, a sweep and an option of the user's."""
    for run in RUNS:
        (tmp_path / run).mkdir(parents=True)
        record = "sweep.json" if "multirun" in run else "run.json"
        (tmp_path / run / record).write_text("{}")
    (tmp_path / "conf/optimizer").mkdir(parents=True)
    (tmp_path / "conf/optimizer/slow.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.0001\n")
    (tmp_path / "file.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("framework optimizer=sl", ["optimizer=slow"]),
        ("framework recipe=toy_", ["recipe=toy_model_parallel"]),
        ("framework recipe=toy,dig", ["recipe=toy,digits"]),
        ("framework callbacks=[ema,ea", ["callbacks=[ema,early_stopping"]),
        ("framework +callb", ["+callbacks.", "+callbacks="]),
        ("framework trainer.max_ep", ["trainer.max_epochs="]),
        ("framework -m ++trainer.gp", ["++trainer.gpus="]),
        ("framework train", ["trainer.", "trainer="]),
        ("framework recipe=toy optimizer=adam optimizer.b", ["optimizer.betas="]),
        ("framework recipe=toy model.", ["model._target_="]),
        ("framework recipe=none_such trainer.see", []),
        ("framework recipe=none_such optimizer.l", ["optimizer.lr="]),
        ("framework job=pre", ["job=predict", "job=preflight"]),
        ("framework trainer.precision=bf16-", ["trainer.precision=bf16-mixed", "trainer.precision=bf16-true"]),
        ("framework trainer.deterministic=t", ["trainer.deterministic=true"]),
        ("framework format=", ["format=json", "format=text"]),
        ("framework recipe=toy optimizer.lr=", ["optimizer.lr=0.001"]),
        ("framework resume=", ["resume=auto", *sorted(f"resume={run}" for run in RUNS)]),
        ("framework runs=[outputs/toy/one,outputs/d", ["runs=[outputs/toy/one,outputs/digits/two"]),
        ("framework checkpoint.path=conf/opt", ["checkpoint.path=conf/optimizer/"]),
        ("framework path.outputs=none/", []),
        ("framework --mu", ["--multirun"]),
        ("framework --cfg j", ["job"]),
        ("framework nothing.", []),
        ("framework =", []),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_word_has_these_completions(line: str, offered: list[str]) -> None:
    assert completions(line) == offered


@pytest.mark.usefixtures("folder")
def test_options_of_other_folders_are_offered(tmp_path: Path) -> None:
    (tmp_path / "other/optimizer").mkdir(parents=True)
    (tmp_path / "other/optimizer/fast.yaml").touch()
    for typed in ("--config-dir other", "--config-dir=other", "hydra.searchpath=[file://other,pkg://none]"):
        assert completions(f"framework {typed} optimizer=fa") == ["optimizer=fast"]


@pytest.mark.parametrize("arguments", [["-sc", "install=tcsh"], ["-sc"], ["--shell-completion", "bash"]])
def test_an_unknown_shell_is_refused(arguments: list[str], tmp_path: Path) -> None:
    refused = run_framework(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert "-sc install=bash" in refused.stderr or "bash, zsh, fish" in refused.stderr


# Real shells


class Shell(NamedTuple):
    """An interactive shell, and how completion is set up and removed in it."""

    command: tuple[str, ...]
    install: str
    uninstall: str


SHELLS = {
    "bash": Shell(
        ("bash", "--noprofile", "--norc", "-i"),
        'eval "$(framework -sc install=bash)"',
        'eval "$(framework -sc uninstall=bash)"',
    ),
    "zsh": Shell(("zsh", "-f", "-i"), 'eval "$(framework -sc install=zsh)"', 'eval "$(framework -sc uninstall=zsh)"'),
    "fish": Shell(
        ("fish", "--no-config", "-i"), "framework -sc install=fish | source", "framework -sc uninstall=fish | source"
    ),
}
# What is typed before Tab, and the arguments that the program then gets.
TYPED = [
    ("framework recipe=toy_mo", "recipe=toy_model_parallel"),
    ("framework recipe=toy,dig", "recipe=toy,digits"),
    ("framework job=pref", "job=preflight"),
    ("framework recipe=toy trainer.max_ep", "recipe=toy|trainer.max_epochs="),
    ("framework resume=outputs/t", "resume=outputs/toy/one"),
    ("framework --mult", "--multirun"),
    ("python -m framework trainer.precision=bf16-m", "-m|framework|trainer.precision=bf16-mixed"),
    ("python fil", "file.py"),
]
PROGRAM = """#!/bin/sh
for argument in "$@"; do
    if [ "$argument" = -sc ]; then exec "$PYTHON" {module} "$@"; fi
done
IFS='|'
printf 'ran<%s>\\n' "$*"
"""


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = b""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str) -> None:
        """Return once the shell has shown a text. Fails the test if it takes a minute."""
        deadline = time.monotonic() + 60
        while text.encode() not in self._shown:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in:\n{self._shown.decode(errors='replace')}"
            try:
                self._shown += os.read(self._descriptor, 65536)
            except OSError:
                pytest.fail(f"the shell has ended, without {text!r} in:\n{self._shown.decode(errors='replace')}")
        self._shown = self._shown.partition(text.encode())[2]


@contextmanager
def terminal(shell: Shell, folder: Path) -> Iterator[Terminal]:
    """The shell, in which `framework` and `python` only complete, and print their arguments."""
    programs = folder / "bin"
    programs.mkdir()
    for name, module in (("framework", "-m framework"), ("python", "")):
        (programs / name).write_text(PROGRAM.format(module=module))
        (programs / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "HOME": str(folder),
        "TERM": "xterm",
    }
    outer, inner = pty.openpty()
    # Fish wants a terminal that controls it.
    command = ["setsid", "--ctty", *shell.command]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, cwd=folder, env=env)
    os.close(inner)
    try:
        yield Terminal(outer)
    finally:
        process.kill()
        process.wait()
        os.close(outer)


@pytest.mark.parametrize("name", SHELLS)
def test_tab_completes_in_a_real_shell(name: str, folder: Path) -> None:
    if shutil.which(name) is None:
        missing(name, f"{name} isn't installed")
    shell = SHELLS[name]
    with terminal(shell, folder) as shown:
        # It can't be mistaken for the echo of what is typed.
        ready = "printf 'rea%s\\n' dy\n"
        shown.type(f"{shell.install}\n{ready}")
        shown.wait_for("ready")
        for line, arguments in TYPED:
            shown.type(f"{line}\t\n")
            shown.wait_for(f"ran<{arguments}>")
        shown.type(f"{shell.uninstall}\n{ready}")
        shown.wait_for("ready")
        shown.type("framework recipe=toy_mo\t\n")
        shown.wait_for("ran<recipe=toy_mo>")
