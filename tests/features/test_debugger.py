"""A breakpoint under `launcher=in_process`: a plain terminal, Python's own Ctrl-C, and a quiet end."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.command import ROOT

PROMPT = b"(Pdb) "
MODEL = """
from recipes.toy import ToyModel
class Stopping(ToyModel):
    def forward(self, inputs):
        if self.training: breakpoint()
        return super().forward(inputs)
"""


def read_until(terminal: int, end: bytes, *, timeout_s: float = 60.0) -> bytes:
    """What is written to the terminal up to `end`; up to when nobody writes any more if that is empty."""
    output = b""
    deadline = time.monotonic() + timeout_s
    while not (end and output.endswith(end)):
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], output.decode()
        try:
            output += os.read(terminal, 65536)
        except OSError:
            # A terminal reports in this way that nobody has it open any more.
            break
    return output


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread sleeps: a signal between a prompt and its `read` would wait for the next line."""
    deadline = time.monotonic() + 60.0
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.exhaustive
def test_a_debugger_gets_a_plain_terminal(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    words = ("recipe=toy", "model._target_=mine.Stopping", "launcher=in_process", "trainer.gpus=0")
    terminal, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "framework", *words],
        cwd=tmp_path,
        env=environment,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
    ) as process:
        os.close(other_end)
        try:
            output = read_until(terminal, PROMPT)
            os.write(terminal, b"p inputs.shape\n")
            answer = read_until(terminal, PROMPT)
            wait_until_asleep(process.pid)
            process.send_signal(signal.SIGINT)
            interrupted = read_until(terminal, PROMPT)
            os.write(terminal, b"q\n")
            end = read_until(terminal, b"")
            assert process.wait(timeout=10) == 130
        finally:
            process.kill()
            os.close(terminal)
    assert b"\x1b" not in output + answer + interrupted + end, "no bar, and the cursor stays"
    assert output.endswith(b"-> return super().forward(inputs)\r\n(Pdb) ")
    assert answer == b"p inputs.shape\r\ntorch.Size([20, 10])\r\n(Pdb) "
    assert interrupted.endswith(b"--KeyboardInterrupt--\r\n(Pdb) ")
    assert b"saving" not in interrupted
    assert b"Traceback" not in end
    assert b"Interrupted; every process has ended." in end
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    assert results.run_file(run_dir)["status"] == "interrupted"
