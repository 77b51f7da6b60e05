"""A recipe in which one rank misbehaves, for instance kills itself, in one phase of one step.

`deed.json` says how; just before, the rank writes `done.json`: its rank and PID, the phase, step and time.
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

DEED = json.loads(Path("deed.json").read_text())
steps = 0  # that this rank has begun

def enter(phase, step):
    """Do the deed if this is the place for it."""
    if (phase, step, int(os.environ["RANK"])) == (DEED["phase"], DEED["step"], DEED["rank"]):
        done = {"rank": DEED["rank"], "pid": os.getpid(), "phase": phase, "step": step, "time": time.time()}
        if Path("done.json").exists():
            return
        Path("done.tmp").write_text(json.dumps(done))
        Path("done.tmp").rename("done.json")
        do(DEED["what"])

def do(what):
    if what in ("SIGKILL", "SIGSEGV", "SIGSTOP"): os.kill(os.getpid(), getattr(signal, what))
    if what == "raise": raise ValueError("the deed was done")
    if what == "sys.exit": sys.exit(3)
    if what == "os._exit": os._exit(0)
    if what in ("sleep", "delay"): time.sleep(DEED["seconds"])

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
        time.sleep(DEED["pause"])
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
class Deed:
    """What happens to one rank. step: which optimizer step it happens in, from 1; evaluations and checkpoints belong to
    the step they follow, so they need a multiple of `EVERY`.

    what: SIGKILL, SIGSEGV, SIGSTOP, raise, sys.exit, os._exit, sleep, delay, or nothing. seconds: of sleep and delay.
    pause: seconds that every step of every rank takes longer.
    """

    what: str = "nothing"
    rank: int = 0
    phase: str = "forward"
    step: int = 3
    seconds: float = 600.0
    pause: float = 0.0


def write_recipe(folder: Path, deed: Deed) -> None:
    """Make `recipe=trouble` in a user's folder."""
    (folder / "recipes").mkdir(exist_ok=True)
    (folder / "recipes" / "trouble.py").write_text(RECIPE)
    (folder / "conf" / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "recipe" / "trouble.yaml").write_text(YAML)
    (folder / "deed.json").write_text(json.dumps(asdict(deed)))


def done(folder: Path) -> dict[str, Any] | None:
    """What the rank has written before its deed: rank, pid, phase, step, time; None where it hasn't come to it."""
    file = folder / "done.json"
    if not file.exists():
        return None
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def wait_until_done(folder: Path, started: Started, *, timeout: float) -> dict[str, Any]:
    """The same, once it has happened. Fails the test if the command ends before, or it takes longer."""
    deadline = time.monotonic() + timeout
    while (content := done(folder)) is None:
        assert started.process.poll() is None, started.printed()
        assert time.monotonic() < deadline, started.printed()
        time.sleep(0.02)
    return content


def run_dir(folder: Path) -> Path:
    """The one run there is. Fails the test where there are more or none."""
    (found,) = folder.glob("outputs/trouble/*")
    return found
