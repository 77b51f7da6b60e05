"""`job=runs`: list the trainings in `path.outputs`, or in the folders that `runs=` names. No torch here.

`format=json` (or `runs.format=json`) prints a list of objects with these keys, `runs.format=csv` a column for each, and
further ones for the metrics:

    run        its directory
    recipe
    status     finished, stopped, failed, interrupted, running, or crashed
    monitor    checkpoint.monitor, the metric that `best` and `last` are values of
    best, last its best and last value
    seconds    how long it ran, over all its starts
    started    ISO 8601, with the time zone
    overrides  what was typed
    metrics    of the best validation (the last one if none is best) and of the test
    branch_of  null, or of a branch (job=branch) the `run` that it branches off, and after which `step`

`runs.filter` is one or several conditions, separated by spaces: a name, one of = != < <= > >=, and a value. The name is
a column (all of the above but `metrics`), a metric or a key of the configuration. `*` in a text value matches anything.
A run without that metric or key doesn't match. `runs.sort` takes the same names; runs without a value come last.

In the order of `started`, the branches of a run are below it.

Below the list of a sweep whose trials differ only in `sweep.over`, as seeds do, a table has a row for each setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.errors import ConfigError
from framework.remote.place import is_url
from framework.runs.find import find_runs, local_runs, named_place, named_runs
from framework.runs.listing import csv_text, list_text, matching, ordered, plain
from framework.runs.record import print_left_out
from framework.sweeps.find import is_sweep
from framework.sweeps.folder import SweepFolder, SweepPlan
from framework.sweeps.ranking import ranked_rows
from framework.sweeps.results import read_results
from framework.sweeps.table import table_text
from framework.system.formatting import display_path, terminal_width
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
        as_json = self.answers_json(request)
        paths, outputs = local_runs(request.config)
        if paths is None:
            found = find_runs(outputs)
            where = display_path(outputs)
            if is_url(request.config.path.outputs):
                where = request.config.path.outputs
        else:
            found = named_runs(paths, outputs=outputs)
            where = ", ".join(settings.paths or ())

        listed = ordered(matching(found.records, settings.filter), settings.sort)
        if settings.format == "csv":
            answer(csv_text(listed))
        elif not as_json:
            text = list_text(
                listed,
                num_found=len(found.records),
                num_damaged=found.num_damaged,
                where=where,
                # Another order is more important than which run is a branch of which.
                as_tree=settings.sort == "started",
            )
            tables = _tables_of_sweeps(paths or (), outputs=outputs)
            answer(shown("\n\n".join([text, *tables])))
        # It reads the metrics of all of them.
        return JobResult(0, results=[plain(record) for record in listed] if as_json else None)

    def answers_json(self, request: Request) -> bool:
        return answers_json(request)

    def document(self, request: Request, result: JobResult) -> Any:
        return result.results


def answers_json(request: Request) -> bool:
    """Return True if a job on runs is to answer in JSON. Raises ConfigError if CSV is, too."""
    format_ = request.config.runs.format
    if request.as_json and format_ == "csv":
        raise ConfigError("format=json can't go with runs.format=csv. Leave one of them out.")
    return request.as_json or format_ == "json"


def _tables_of_sweeps(paths: Sequence[str], *, outputs: Path) -> list[str]:
    """Return the table of each sweep among the paths in which rows have several trials. The list shows the others."""
    tables = []
    for text in paths:
        folder = SweepFolder(named_place(text, outputs=outputs))
        if not is_sweep(folder.path):
            continue
        try:
            plan = SweepPlan.read(folder)
        except ConfigError as error:
            # Its runs are listed all the same.
            print_left_out(str(error))
            continue
        rows = ranked_rows(read_results(folder, plan.trials), over=plan.over, monitor=plan.monitor, mode=plan.mode)
        if plan.job == "train" and any(len(row.trials) > 1 for row in rows):
            table = table_text(rows, monitor=plan.monitor, over=plan.over, width=terminal_width())
            tables.append(f"{display_path(folder.path)}\n{table}")
    return tables
