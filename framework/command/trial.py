"""The process of one trial of a sweep: it does what a command does for one run, with its output in a log.

It is forked from the warm fork server, and has its ranks forked from there, too. No torch is imported for its sake.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from framework.command.job import load_job
from framework.command.request import Request
from framework.command.slots import Slot
from framework.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_STOPPED, FrameworkError, StoppedBySignalError
from framework.launch.child import Child
from framework.launch.fork_server import ForkServer
from framework.launch.plan import RunProgress
from framework.launch.run_server import RunServer
from framework.system.signals import interrupting

# How often a worker is told of steps; it is told of a validation at once.
_EVERY_S = 1.0


def start_trial(
    request: Request, *, slot: Slot, log: Path, parent: RunServer, fork_server: ForkServer
) -> tuple[str, Progress]:
    """Have a process forked that runs this request; return the key of the child, and its progress.

    Args:
        log: for what the process prints.
        parent: forks the process.
        fork_server: what the trial's ranks are forked from.
    """
    with fork_server.share() as connection:
        reading_end, writing_end = os.pipe()
        child = Child(
            "framework.command.trial:run_trial",
            {"request": replace(request, fork_server=None), "defaults": dict(fork_server.defaults)},
            environment=slot.environment,
            cores=slot.cores or None,
            log=log,
        )
        parent.spawn(child, fds=[connection.fileno(), writing_end])
    os.close(writing_end)
    return child.key, Progress(reading_end)


@final
class Progress:
    """What a trial has told of its progress, by its end of a pipe. Call `close` once the trial has ended."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""
        self.is_open = True
        self.latest: RunProgress | None = None

    def fileno(self) -> int:
        return self._fd

    def take(self) -> bool:
        """Read what has arrived, once there is something; return True if there is a new validation among it."""
        text = os.read(self._fd, 65_536)
        if not text:
            # The trial has ended.
            self.is_open = False
            return False
        *lines, self._text = (self._text + text).split(b"\n")
        validations_before = self.latest.validations if self.latest else 0
        for line in lines:
            self.latest = RunProgress(*json.loads(line))
        return self.latest is not None and self.latest.validations != validations_before

    def close(self) -> None:
        self.is_open = False
        os.close(self._fd)


# In the process of the trial


def run_trial(arguments: Mapping[str, Any], server_fd: int, progress_fd: int) -> int:
    """Run the trial and return its exit status. Errors are printed."""
    teller = _Teller(progress_fd)
    with closing(ForkServer(Connection(server_fd), defaults=arguments["defaults"])) as fork_server:
        request: Request = replace(arguments["request"], fork_server=fork_server, on_progress=teller.tell)
        try:
            with interrupting():
                return load_job(request.config.job).run(request).status
        except FrameworkError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        except StoppedBySignalError as stop:
            print(f"Stopped by {stop} before training began", file=sys.stderr)
            return EXIT_STOPPED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Exception:
            traceback.print_exc()
            return EXIT_RUN_FAILED


@final
class _Teller:
    """Writes the trial's progress to the worker's pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # A worker that is suspended doesn't hold up the trial.
        os.set_blocking(fd, False)
        self._told = RunProgress(0, 0, 0, 0.0)
        self._told_at = 0.0

    def tell(self, progress: RunProgress) -> None:
        """Write progress if there is a new validation, or if it has changed and some time has passed."""
        now = time.monotonic()
        is_new_validation = progress.validations != self._told.validations
        is_due = progress != self._told and now - self._told_at >= _EVERY_S
        if not is_new_validation and not is_due:
            return
        self._told = progress
        self._told_at = now
        # The pipe may be full. Without a worker, the kernel ends this process, too.
        with suppress(OSError):
            os.write(self._fd, f"{json.dumps(progress)}\n".encode())
