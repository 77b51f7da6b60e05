"""`framework.train` in a real Jupyter kernel, and in a script: models and data are those of cells and `__main__`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.command import run_python
from tests.helpers.notebooks import run_notebook, started_notebook, write_notebook

pytestmark = pytest.mark.multiproc

DEFINITIONS = """\
import os, signal, threading, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import framework

class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, inputs):
        return self.layers(inputs)

def slow(output, target):
    time.sleep(0.02)
    return nn.functional.cross_entropy(output, target)

def fails_on_one(output, target):
    if torch.distributed.get_rank() == 1:
        raise ValueError("unhappy")
    return slow(output, target)

inputs = torch.randn(200, 4)
labels = (inputs[:, :2] > 0).sum(dim=1)
train_loader = DataLoader(TensorDataset(inputs[:160], labels[:160]), batch_size=10, shuffle=True)
val_loader = DataLoader(TensorDataset(inputs[160:], labels[160:]), batch_size=40)
settings = dict(
    model=Net(),
    data=(train_loader, val_loader),
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    topology={"procs_per_node": 2},
)
"""
TRAIN = """\
run = framework.train(loss=nn.CrossEntropyLoss(), trainer={"gpus": 0, "max_epochs": 2}, **settings)
print(run.status, sorted(run.metrics), isinstance(run.best_model(), Net))
"""
STOP = """\
def interrupt():
    while not list(Path("outputs/stopped").glob("*/metrics.jsonl")):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
run = framework.train(loss=slow, trainer={"gpus": 0, "max_epochs": 10_000}, name="stopped", **settings)
print(run.status, run.record["results"]["steps"] > 0, (run.directory / "checkpoints" / "last").exists())
"""
FAIL = """\
framework.train(loss=fails_on_one, trainer={"gpus": 0, "max_epochs": 2}, **settings)
"""


def test_cells_train_fail_and_are_interrupted(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "cells.ipynb", [DEFINITIONS, TRAIN, FAIL, STOP])
    _, trained, failed, stopped = run_notebook(notebook, cwd=tmp_path)
    assert "Training interactive: 2 processes, CPU" in trained
    # Rank 0 prints this line.
    assert "epoch 0  step 8  val/loss" in trained
    assert "finished ['val/loss'] True" in trained
    assert "RunFailedError" in failed
    assert "Rank 1 of 2" in failed
    assert "ValueError: unhappy" in failed
    assert "stopped True True" in stopped


@pytest.mark.exhaustive
def test_no_process_outlives_the_kernel(tmp_path: Path) -> None:
    train = 'framework.train(loss=slow, trainer={"gpus": 0, "max_epochs": 10_000}, **settings)'
    notebook = write_notebook(tmp_path / "killed.ipynb", [DEFINITIONS, train])
    with started_notebook(notebook, cwd=tmp_path) as started:
        started.wait_for_output("epoch 0  step 8", timeout=60)
        (kernel,) = (each for each in started.processes() if "ipykernel_launcher" in each.cmdline())
        kernel.send_signal(signal.SIGKILL)
        started.wait(timeout=60)
        started.assert_all_gone()


def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(DEFINITIONS + TRAIN + "print(run.directory.parent.name)\n")
    done = run_python("digits.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "finished ['val/loss'] True\ndigits" in done.stdout


def test_a_thread_of_a_program_can_train(tmp_path: Path) -> None:
    in_thread = (
        'settings |= {"loss": nn.CrossEntropyLoss(), "trainer": {"gpus": 0, "max_epochs": 1}}\n'
        "thread = threading.Thread(target=lambda: print(framework.train(**settings).status))\n"
        "thread.start(); thread.join()\n"
    )
    (tmp_path / "threads.py").write_text(DEFINITIONS + in_thread)
    done = run_python("threads.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("finished")
