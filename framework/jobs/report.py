"""`job=report runs=RUN` or `runs=[a,b]`: write a report of the runs as one HTML file. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.runs.find import local_runs, named_place, named_runs
from framework.runs.report.page import make_page
from framework.sweeps.folder import SweepFolder
from framework.sweeps.search import importances
from framework.system.files import atomic_output, checked_output
from framework.system.formatting import display_path, format_bytes, format_count
from framework.system.shown_text import shown

_KEY = "report.output"


class Report(Job):
    """Write the page of the runs that `runs` names."""

    needs_ranks = False
    needs_runs = True
    sweepable = False
    sections = ("runs", "report")

    def run(self, request: Request) -> JobResult:
        """Write the page. Raises ConfigError for a path that is no run, or an output that can't be written."""
        output = checked_output(request.config.report.output, key=_KEY, suffixes=(".html",))
        paths, outputs = local_runs(request.config)
        paths = paths or []
        records = named_runs(paths, outputs=outputs).records
        with atomic_output(output, key=_KEY) as path:
            path.write_text(make_page(records, importances=_importances(paths, outputs=outputs)), encoding="utf-8")

        size = format_bytes(output.stat().st_size)
        print(shown(f"Report of {format_count(len(records), 'run')}: {display_path(output)} ({size})"), flush=True)
        results = {
            "output": display_path(output),
            "size_bytes": output.stat().st_size,
            "runs": [record.run for record in records],
        }
        return JobResult(0, results=results)


def _importances(paths: Sequence[str], *, outputs: Path) -> dict[str, dict[str, float]]:
    """Return by the name of each search among the paths how much each of its keys mattered, if Optuna can tell."""
    found = {}
    for text in paths:
        folder = SweepFolder(named_place(text, outputs=outputs))
        shares = importances(folder.study_file)
        if shares:
            found[folder.path.name] = shares
    return found
