"""What a report says of failures that are hard to report: where a hook was, odd exceptions, files that are gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

CASES = __name__
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_epochs=1", "trainer.limit_test_batches=0")
exhaustive = pytest.mark.exhaustive


def first_failure(run_dir: Path) -> dict[str, Any]:
    first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
    return first


class Raises:
    """Raises in one of its hooks."""

    def __init__(self, hook):
        setattr(self, hook, self._raise)

    def _raise(self, *_):
        raise ValueError("unhappy")


@pytest.mark.parametrize(
    "hook",
    [
        "on_fit_start",
        "on_fit_end",
        *(
            pytest.param(hook, marks=exhaustive)
            for hook in (
                "on_train_epoch_start",
                "on_train_step_end",
                "on_validation_start",
                "on_validation_end",
                "on_train_epoch_end",
            )
        ),
    ],
)
def test_a_hook_that_raises_was_in_phase_logging(train, hook):
    callback = (f"+callbacks.raises._target_={CASES}.Raises", f"+callbacks.raises.hook={hook}")
    first = first_failure(train(*SHORT, *callback, status=1))
    assert (first["exception"], first["phase"]) == ("ValueError: unhappy", "logging")


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
    """Moves the run directory away, or deletes it."""

    def __init__(self, to):
        self.to = to

    def on_train_step_end(self, info):
        if info.step != 3:
            return
        (run_dir,) = Path("outputs/toy").iterdir()
        if self.to is None:
            shutil.rmtree(run_dir)
        else:
            run_dir.rename(self.to)


@pytest.mark.parametrize("to", ["elsewhere", pytest.param("null", marks=exhaustive)])
def test_a_run_directory_that_is_gone_is_named(train, tmp_path, capfd, to):
    remover = (f"+callbacks.remover._target_={CASES}.Remover", f"+callbacks.remover.to={to}")
    try:
        train(*SHORT, *remover, status=1)
    except ValueError:
        # The fixture finds no run directory.
        assert not list(tmp_path.glob("outputs/toy/*/logs"))
    printed = capfd.readouterr()
    assert "was deleted or moved while rank 0 was using it" in printed.err
    assert "Traceback" not in printed.err
    assert "resume=" not in printed.out


class FullMemory:
    """Fails as a write to a full /dev/shm does."""

    def on_train_step_end(self, info):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/torch_1_2")


def test_full_shared_memory_is_named(train):
    first = first_failure(train(*SHORT, f"+callbacks.full._target_={CASES}.FullMemory", status=1))
    assert "/dev/shm, the memory that data workers send batches through, is full." in first["exception"]
    assert "Make room for" not in first["exception"]
