"""`job=upload runs=RUN` or `runs=[a,b]`: upload what isn't at the URL of a run, as after a failure. No torch here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from framework.command.job import Job
from framework.command.mirroring import mirroring
from framework.command.request import JobResult, Request
from framework.config.find_run import is_run
from framework.errors import EXIT_RUN_FAILED, ConfigError
from framework.remote.place import RemotePlace, outputs_folder
from framework.runs.find import named_place
from framework.sweeps.find import is_sweep
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir, locked
from framework.system.shown_text import shown


class Upload(Job):
    """Upload the rest of the runs that `runs` names."""

    needs_ranks = False
    needs_runs = True
    sweepable = False
    sections = ("runs",)

    def run(self, request: Request) -> JobResult:
        """Upload them. Exit status 1 if something is left.

        Raises ConfigError for what is no run and no sweep or has no URL, RequestError for a run that is being trained,
        or that another machine has resumed since.
        """
        outputs = outputs_folder(request.config.path)
        directories = [_directory(text, outputs=outputs) for text in request.config.runs.paths or ()]
        uploaded = []
        left = []
        for directory in directories:
            if _upload(directory):
                uploaded.append(display_path(directory))
            else:
                left.append(display_path(directory))
        status = EXIT_RUN_FAILED if left else 0
        return JobResult(status, results={"uploaded": uploaded, "left": left})


def _directory(text: str, *, outputs: Path) -> Path:
    """Return the directory of the run or sweep that a path or a name is of."""
    path = named_place(text, outputs=outputs)
    if not is_run(path) and not is_sweep(path):
        raise ConfigError(f"runs={text}: neither a run nor a sweep on this machine. job=runs lists the runs.")
    if RemotePlace.of_local(path) is None:
        raise ConfigError(
            f"runs={text}: it has no URL. Only runs that were started with path.outputs=URL, which lie in path.cache, "
            "are uploaded."
        )
    return path


def _upload(directory: Path) -> bool:
    """Upload a run or sweep; return True if all of it is at its URL."""
    # Workers of a sweep may run.
    lock = nullcontext() if is_sweep(directory) else locked(RunDir(directory))
    with lock, mirroring(directory) as mirror:
        assert mirror is not None
    if mirror.is_complete:
        print(shown(f"All of {display_path(directory)} is at {mirror.url}"), flush=True)
    return mirror.is_complete
