"""What a report says of failures that are hard to report: where a hook was, odd exceptions, files that are gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from framework import Logger, StepOutput

CASES = __name__
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=1", "trainer.limit_test_batches=0")
exhaustive = pytest.mark.exhaustive


def first_failure(run_dir: Path) -> dict[str, Any]:
    first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
    return first


HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_train_epoch_start",
    "on_before_optimizer_step",
    "on_train_step_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
    "evaluation_weights",
    "state_dict",
)


class Raises:
    """Raises in one of its hooks."""

    def __init__(self, hook):
        self.hook = hook

    def is_unhappy(self, *_):
        name = sys._getframe(1).f_code.co_name
        if name == self.hook:
            raise ValueError("unhappy")

    def on_fit_start(self, info):
        self.is_unhappy()

    def on_fit_end(self):
        self.is_unhappy()

    def on_train_epoch_start(self, info):
        self.is_unhappy()

    def on_before_optimizer_step(self, optimizer):
        self.is_unhappy()

    def on_train_step_end(self, info):
        self.is_unhappy()

    def on_validation_start(self, info):
        self.is_unhappy()

    def on_validation_end(self, info):
        self.is_unhappy()

    def on_train_epoch_end(self, info):
        self.is_unhappy()

    def evaluation_weights(self, model):
        self.is_unhappy()
        return nullcontext()

    def state_dict(self):
        self.is_unhappy()
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("hook", [*HOOKS[:2], *(pytest.param(hook, marks=exhaustive) for hook in HOOKS[2:])])
def test_the_callback_and_hook_that_raised_are_named(train, capfd, hook):
    callback = (f"+callbacks.raises._target_={CASES}.Raises", f"+callbacks.raises.hook={hook}")
    first = first_failure(train(*SHORT, *callback, status=1))
    phases = {"on_before_optimizer_step": "optimizer", "evaluation_weights": "evaluate", "state_dict": "checkpoint"}
    assert first["exception"] == "ValueError: unhappy"
    assert first["phase"] == phases.get(hook, "logging")
    assert first["hook"] == f"Raises.{hook}"
    assert f"in Raises.{hook}\n" in capfd.readouterr().err


class RaisingLogger(Logger):
    def log(self, values, *, step, epoch):
        if "train/loss" in values:
            raise OSError("no tracker")


class RaisingTask:
    def __init__(self, **_):
        pass

    def training_step(self, model, batch):
        inputs, targets = batch
        return StepOutput((model(inputs) - targets).square().mean(), len(targets))

    validation_step = training_step

    def on_evaluation_end(self):
        raise ValueError("no end")


@pytest.mark.parametrize(
    ("override", "hook"),
    [
        (f"+logger.own._target_={CASES}.RaisingLogger", "RaisingLogger.log"),
        (f"task._target_={CASES}.RaisingTask", "RaisingTask.on_evaluation_end"),
    ],
)
def test_the_hook_of_a_logger_or_task_is_named(train, override, hook):
    first = first_failure(train(*SHORT, override, "trainer.num_sanity_val_steps=0", status=1))
    assert first["hook"] == hook


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self):
        raise RuntimeError("no pickle")


class ExitingError(Exception):
    """Ends the program where its text is asked for, as a signal's handler might."""

    def __str__(self):
        raise SystemExit(3)


class NoClassError(Exception):
    @property  # type: ignore[misc]
    def __class__(self):
        raise RuntimeError("no class")


class Odd:
    def __init__(self, kind):
        self.kind = kind

    def on_train_step_end(self, info):
        if info.step == 3:
            raise {"text": NoTextError, "exit": ExitingError, "class": NoClassError}[self.kind]()


@pytest.mark.parametrize(
    ("kind", "exception"),
    [
        ("text", "NoTextError: (no text: its __str__ raises RuntimeError)"),
        ("exit", "ExitingError: (no text: its __str__ raises SystemExit)"),
        ("class", "RuntimeError: An exception of the class NoClassError, which can't be described"),
    ],
)
def test_an_exception_that_raises_when_asked_is_reported(train, kind, exception):
    odd = (f"+callbacks.odd._target_={CASES}.Odd", f"+callbacks.odd.kind={kind}")
    first = first_failure(train(*SHORT, *odd, status=1))
    assert first["kind"] == "exception"
    assert first["exception"].startswith(exception)
    assert "in on_train_step_end" in first["traceback"]
    assert first["step"] == 3


class Remover:
    """Moves the run directory away after three steps, or deletes it. Fails if training continues after `last_step`."""

    def __init__(self, to, last_step):
        self.to = to
        self.last_step = last_step

    def on_train_step_end(self, info):
        assert info.step <= self.last_step, "the run directory has been gone for too long"
        if info.step != 3 or os.environ.get("RANK", "0") != "0":
            return
        (run_dir,) = Path("outputs/toy").iterdir()
        if self.to is None:
            shutil.rmtree(run_dir)
        else:
            run_dir.rename(self.to)


# What first looks at the run directory, as overrides, and after which step. An epoch has 80 steps.
BY_SAVE = (("trainer.log_every_n_steps=1000", "checkpoint.every_n_steps=10", "checkpoint.asynchronous=true"), 10)
BY_LOG = (("trainer.log_every_n_steps=20", "checkpoint=none"), 20)
BY_VALIDATION = (("trainer.log_every_n_steps=1000", "checkpoint=none"), 80)
LOGGERS = "logger=[jsonl,tensorboard,console]"
EVERY_LOGGER = "logger=[jsonl,tensorboard,mlflow,wandb]"
TWO = ("topology.procs_per_node=2", "strategy=fsdp", "data.batch_size=10")


@pytest.mark.parametrize(
    ("to", "noticed", "further"),
    [
        ("elsewhere", BY_SAVE, (LOGGERS,)),
        ("null", BY_LOG, (LOGGERS, "launcher=elastic", "launcher.max_restarts=1")),
        pytest.param("null", BY_VALIDATION, (LOGGERS,), marks=exhaustive),
        pytest.param("null", BY_SAVE, (EVERY_LOGGER,), marks=exhaustive),
        pytest.param("elsewhere", BY_SAVE, (LOGGERS, *TWO), marks=(exhaustive, pytest.mark.multiproc)),
        pytest.param("null", BY_LOG, (LOGGERS, "trainer.profiler=pytorch", "launcher=in_process"), marks=exhaustive),
    ],
)
def test_a_lost_run_directory_ends_the_run(train, tmp_path, capfd, to, noticed, further):
    overrides, last_step = noticed
    remover = {"_target_": f"{CASES}.Remover", "to": to, "last_step": last_step}
    callback = [f"+callbacks.remover.{key}={value}" for key, value in remover.items()]
    # The command ends with this status. The fixture finds no run directory then.
    with pytest.raises(ValueError, match="not enough values"):
        train("recipe=toy", "trainer.max_epochs=3", *overrides, *further, *callback, status=1)
    assert list(tmp_path.glob("outputs/toy/*")) == [], "it was made again"
    printed = capfd.readouterr()
    assert printed.err.count("was deleted or moved while rank 0 was using it") == 1
    assert "resume the run from its new place" in printed.err
    for unwanted in ("Traceback", "can't be written", "Restart 1", "is off", "lacks"):
        assert unwanted not in printed.err + printed.out
    assert "resume=outputs" not in printed.out
    if to != "null":
        assert (tmp_path / to / "config.yaml").exists()


def test_a_moved_run_is_resumed_from_its_new_place(train, tmp_path):
    remover = (f"+callbacks.remover._target_={CASES}.Remover", "+callbacks.remover.last_step=80")
    with pytest.raises(ValueError, match="not enough values"):
        train(*SHORT, *remover, "+callbacks.remover.to=elsewhere", "checkpoint.every_n_steps=2", status=1)
    run = train(f"resume={tmp_path / 'elsewhere'}", "~callbacks.remover")
    assert json.loads((run / "run.json").read_text())["results"]["steps"] == 80


class FullMemory:
    """Fails as a write to a full /dev/shm does."""

    def on_train_step_end(self, info):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/torch_1_2")


def test_full_shared_memory_is_named(train):
    first = first_failure(train(*SHORT, f"+callbacks.full._target_={CASES}.FullMemory", status=1))
    assert "/dev/shm, the memory that data workers send batches through, is full." in first["exception"]
    assert "Make room for" not in first["exception"]
