"""A recipe in which one rank fails, for instance kills itself, in one phase of one step.

`fault.json` says how. Just before, the rank writes `done.json`: its rank and PID, the phase, step and time.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from tests.helpers.command import Started

PHASES = ("data", "forward", "backward", "optimizer", "evaluate", "checkpoint")
EVERY = 4
"""Optimizer steps from one evaluation and checkpoint to the next."""

RECIPE = '''
"""A recipe of the user's own, in a folder of the user's own."""
import json, os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import Dataset
from framework import Datasets, StepOutput

FAULT = json.loads(Path("fault.json").read_text())
steps = 0  # that this rank has begun

def enter(phase, step):
    """Cause the fault if this is the place for it."""
    if (phase, step, int(os.environ["RANK"])) == (FAULT["phase"], FAULT["step"], FAULT["rank"]):
        done = {"rank": FAULT["rank"], "pid": os.getpid(), "phase": phase, "step": step, "time": time.time()}
        if Path("done.json").exists():
            return
        Path("done.tmp").write_text(json.dumps(done))
        Path("done.tmp").rename("done.json")
        do(FAULT["what"])

def do(what):
    if what in ("SIGKILL", "SIGSEGV", "SIGSTOP"): os.kill(os.getpid(), getattr(signal, what))
    if what == "raise": raise ValueError("the fault was raised")
    if what == "sys.exit": sys.exit(3)
    if what == "os._exit": os._exit(0)
    if what in ("sleep", "delay"): time.sleep(FAULT["seconds"])

class Samples(Dataset):
    def __init__(self, size, part):
        self.size, self.part, self.taken = size, part, 0
    def __len__(self): return self.size
    def __getitem__(self, index):
        if self.part == "train":
            self.taken += 1
            enter("data", (self.taken - 1) // 4 + 1)
        return torch.full((4,), index % 7 / 7), torch.full((1,), index % 3 / 3)

def samples(): return Datasets(train=Samples(3360, "train"), val=Samples(64, "val"))

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss): return loss.clone()
    @staticmethod
    def backward(ctx, gradient):
        enter("backward", steps)
        return gradient

class Task:
    def training_step(self, model, batch):
        global steps
        steps += 1
        time.sleep(FAULT["pause"])
        enter("forward", steps)
        inputs, targets = batch
        loss = Backward.apply(((model(inputs) - targets) ** 2).mean())
        return StepOutput(loss=loss, num_samples=len(inputs))
    def validation_step(self, model, batch):
        enter("evaluate", steps)
        inputs, targets = batch
        return StepOutput(loss=((model(inputs) - targets) ** 2).mean(), num_samples=len(inputs))

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        enter("optimizer", steps)
        return super().step(closure)

class Saved:
    def on_fit_end(self): pass
    def state_dict(self):
        enter("checkpoint", steps)
        return {}
'''
YAML = f"""# @package _global_
model: {{_target_: torch.nn.Linear, in_features: 4, out_features: 1}}
data: {{datasets: {{_target_: recipes.trouble.samples}}, batch_size: 4, eval_batch_size: 4, num_workers: 0}}
task: {{_target_: recipes.trouble.Task}}
optimizer: {{_target_: recipes.trouble.Optimizer, lr: 0.01}}
callbacks: {{saved: {{_target_: recipes.trouble.Saved}}}}
trainer:
  gpus: 0
  max_steps: {3 * EVERY}
  val_check_interval: {EVERY}
checkpoint: {{every_n_steps: {EVERY}, every_n_epochs: null}}
"""


@final
@dataclass(frozen=True)
class Fault:
    """What happens to one rank."""

    # SIGKILL, SIGSEGV, SIGSTOP, raise, sys.exit, os._exit, sleep, delay, or nothing.
    what: str = "nothing"
    rank: int = 0
    phase: str = "forward"
    # The optimizer step in which it happens, from 1. Evaluations and checkpoints belong to the step that they follow,
    # so they need a multiple of `EVERY`.
    step: int = 3
    # The length of sleep and delay.
    seconds: float = 600.0
    # Seconds that every step of every rank takes longer.
    pause: float = 0.0


def write_recipe(folder: Path, fault: Fault) -> None:
    """Make `recipe=trouble` in a user's folder."""
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "recipes" / "trouble.py").write_text(RECIPE)
    (folder / "conf" / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "recipe" / "trouble.yaml").write_text(YAML)
    (folder / "fault.json").write_text(json.dumps(asdict(fault)))


def done(folder: Path) -> dict[str, Any] | None:
    """Return what the rank wrote before its fault: rank, pid, phase, step, time. None if it hasn't yet."""
    file = folder / "done.json"
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def wait_until_done(folder: Path, started: Started, *, timeout: float) -> dict[str, Any]:
    """Return the same once the fault has happened. Fail the test if the command ends before, or it takes longer."""
    deadline = time.monotonic() + timeout
    while (content := done(folder)) is None:
        assert started.process.poll() is None, started.printed()
        assert time.monotonic() < deadline, started.printed()
        time.sleep(0.02)
    return content


def run_dir(folder: Path) -> Path:
    """Return the directory of the only run. Fail the test if there are several or none."""
    (found,) = folder.glob("outputs/trouble/*")
    return found
