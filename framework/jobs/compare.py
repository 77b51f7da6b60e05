"""`job=compare runs=[a,b]`: what differs between runs, and their metrics. No torch here.

`runs.format=json` prints one object: `runs`, a list of directories, and for each of these sections a mapping from a
name to a list with the value in each run, null for none. `csv` has a row for each name.

    run            status, time, steps
    metrics        of the best and the last validation and of the test, also those that are equal
    configuration  keys of config.yaml
    code           the git revision, and the files with uncommitted changes: lines added and removed
    versions       of Python and of packages
    machine        hardware and topology
"""

from __future__ import annotations

import csv
import sys

from framework.command.request import JobResult, Request
from framework.errors import ConfigError
from framework.runs.compare import compare, render
from framework.runs.listing import csv_cell, json_text
from framework.runs.record import named_runs
from framework.system.shown_text import shown


def main(request: Request) -> JobResult:
    """Print what differs. Raises ConfigError for a path that is no run, or fewer than two runs."""
    settings = request.config.runs
    records = named_runs(settings.paths or ())
    if len(records) < 2:
        raise ConfigError(
            f"job=compare needs two or more runs, and {','.join(settings.paths or ())} is one. Use runs=[RUN,RUN]."
        )
    found = compare(records)
    if settings.format == "json":
        print(json_text({"runs": [record.run for record in records], **found}), flush=True)
    elif settings.format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["section", "name", *(csv_cell(record.run) for record in records)])
        for section, rows in found.items():
            for name, row in rows.items():
                writer.writerow([section, *map(csv_cell, (name, *row))])
        sys.stdout.flush()
    else:
        print(shown(render(records, found)), flush=True)
    return JobResult(0)


# The text for the terminal
