"""`job=compare runs=[a,b]`: what differs between runs, and their metrics. No torch here.

`format=json` (or `runs.format=json`) prints one object: `runs`, a list of directories, and for each of these sections a
mapping from a name to a list with the value in each run, null for none. `runs.format=csv` has a row for each name.

    run            status, time, steps, and if one is a branch of another run, which one, and after which step
    metrics        of the best and the last validation and of the test, also those that are equal
    configuration  keys of config.yaml
    code           the git revision, and the files with uncommitted changes: lines added and removed
    versions       of Python and of packages
    machine        hardware and topology
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.errors import ConfigError
from framework.jobs.runs import answers_json
from framework.runs.compare import Section, compare, render
from framework.runs.find import local_runs, named_runs
from framework.runs.listing import csv_cell
from framework.runs.record import RunRecord
from framework.system.output import answer
from framework.system.shown_text import shown


class Compare(Job):
    """Print what differs between the runs that `runs` names."""

    needs_ranks = False
    needs_runs = True
    sweepable = False
    sections = ("runs",)

    def run(self, request: Request) -> JobResult:
        """Print what differs. Raises ConfigError for a path that is no run, or fewer than two runs."""
        settings = request.config.runs
        as_json = self.answers_json(request)
        paths, outputs = local_runs(request.config)
        records = named_runs(paths or (), outputs=outputs).records
        if len(records) < 2:
            named = ",".join(settings.paths or ())
            raise ConfigError(f"job=compare needs two or more runs, and {named} is one. Use runs=[RUN,RUN].")

        sections = compare(records)
        if settings.format == "csv":
            answer(_csv_text(records, sections))
        elif not as_json:
            answer(shown(render(records, sections)))
        runs = [record.run for record in records]
        return JobResult(0, results={"runs": runs, **sections})

    def answers_json(self, request: Request) -> bool:
        return answers_json(request)

    def document(self, request: Request, result: JobResult) -> Any:
        return result.results


def _csv_text(records: Sequence[RunRecord], sections: Mapping[str, Section]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    runs = [csv_cell(record.run) for record in records]
    writer.writerow(["section", "name", *runs])
    for section, rows in sections.items():
        for name, values in rows.items():
            cells = [csv_cell(value) for value in values]
            writer.writerow([section, csv_cell(name), *cells])
    return text.getvalue().removesuffix("\n")
