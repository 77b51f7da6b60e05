"""Commands that are answered without torch, all in one process in which it can't be imported, with 8 GPUs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.helpers.source import ROOT

ANSWERING = """
import io, json, os, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
sys.modules.update(dict.fromkeys(("torch", "numpy", "rich")))  # to import them fails
from tests.helpers.internals import Gpu, compose, hardware_module
hardware_module.visible_gpus = lambda: [Gpu(f"GPU {i}", f"GPU-{i}") for i in range(8)]
answers = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = compose.main(arguments)
        except BaseException:
            status = -1
            traceback.print_exc()
    answers.append([status, out.getvalue(), err.getvalue(), os.listdir()])
print(json.dumps(answers))
"""


class Answer(NamedTuple):
    status: int
    out: str
    err: str
    left: list[str]


def run_all(commands: list[str], folder: Path) -> dict[str, Answer]:
    """What each command answers in a folder, in which it leaves files."""
    result = subprocess.run(
        [sys.executable, "-c", ANSWERING],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps([shlex.split(command) for command in commands]),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = json.loads(result.stdout.splitlines()[-1])
    return {command: Answer(*answer) for command, answer in zip(commands, found, strict=True)}


def assert_refused(answer: Answer, facts: list[str]) -> None:
    """The command is refused with all these facts, without a traceback, and leaves nothing."""
    assert [fact for fact in facts if fact not in answer.err] == [], answer.err
    assert (answer.status, answer.out, answer.left) == (2, "", []), answer.err
    assert "Traceback" not in answer.err
