"""`job=runs`: list the trainings in `path.outputs`, or in the folders that `runs=` names. No torch here.

`runs.format=json` prints a list of objects with these keys, `csv` a column for each, and further ones for the metrics:

    run        its directory
    recipe
    status     finished, stopped, failed, interrupted, running, or crashed
    monitor    checkpoint.monitor, the metric that `best` and `last` are values of
    best, last its best and last value
    seconds    how long it ran, over all its starts
    started    ISO 8601, with the time zone
    overrides  what was typed
    metrics    of the best validation (the last one if none is best) and of the test

`runs.filter` is one or several conditions, separated by spaces: a name, one of = != < <= > >=, and a value. The name is
a column (all of the above but `metrics`), a metric or a key of the configuration. `*` in a text value matches anything.
A run without that metric or key doesn't match. `runs.sort` takes the same names; runs without a value come last.
"""

from __future__ import annotations

from pathlib import Path

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.runs.find import find_runs, named_runs
from framework.runs.listing import csv_text, json_text, list_text, matching, ordered, plain
from framework.system.formatting import display_path
from framework.system.output import answer
from framework.system.shown_text import shown


class Runs(Job):
    """Print the list of runs, chosen by `runs.filter` and sorted by `runs.sort`."""

    needs_ranks = False
    sweepable = False
    sections = ("runs",)

    def run(self, request: Request) -> JobResult:
        """Print the list. Raises ConfigError for a wrong condition, name or path."""
        settings = request.config.runs
        if settings.paths is None:
            folder = Path(request.config.path.outputs).absolute()
            found = find_runs(folder)
            where = display_path(folder)
        else:
            found = named_runs(settings.paths)
            where = ", ".join(settings.paths)

        listed = ordered(matching(found.records, settings.filter), settings.sort)
        if settings.format == "json":
            answer(json_text([plain(record) for record in listed]))
        elif settings.format == "csv":
            answer(csv_text(listed))
        else:
            answer(shown(list_text(listed, num_found=len(found.records), num_damaged=found.num_damaged, where=where)))
        return JobResult(0)
