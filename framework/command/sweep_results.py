"""What a sweep prints at its end, and results.csv, which is kept up to date while trials run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, final

from framework.command.job import load_job
from framework.command.messages import tensorboard_command
from framework.command.trials import needs_work
from framework.config.saved import resume_argument
from framework.config.secrets import masked_override
from framework.sweeps.evaluations import EvaluatedModel, evaluations_csv, evaluations_text, read_evaluations
from framework.sweeps.folder import SweepFolder, SweepPlan
from framework.sweeps.ranking import Row, best_trial, ranked_rows
from framework.sweeps.results import TrialResult, read_results
from framework.sweeps.table import best_text, csv_text, table_text
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import write_atomically

# results.csv is written so often at most.
_RESULTS_EVERY_S = 10.0


def print_results(folder: SweepFolder, plan: SweepPlan) -> None:
    """Print the table and what can be done next; write results.csv."""
    results = read_results(folder, plan.trials)
    rows = ranked_rows(results, over=plan.over, monitor=plan.monitor, mode=plan.mode)
    width = shutil.get_terminal_size().columns
    if plan.job == "eval":
        models = read_evaluations(results)
        table = evaluations_text(models, monitor=plan.monitor, mode=plan.mode, width=width)
    else:
        table = table_text(rows, monitor=plan.monitor, over=plan.over, width=width)
    print(f"\n{table}")
    _write_results(folder, plan, results)
    facts = [("results", display_path(folder.results_file))]
    if any(folder.trial(result.number).event_files for result in results):
        facts.append(("curves", tensorboard_command(folder.path)))
    if any(needs_work(result, retries_failed=False) for result in results):
        facts.append(("resume", f"python -m framework -m {resume_argument(display_path(folder.path))}"))
    print("")
    if load_job(plan.job).trains:
        best = best_text(rows, mode=plan.mode)
        if best:
            print(best)
    print(format_facts(facts), flush=True)


def results_document(folder: SweepFolder, plan: SweepPlan) -> dict[str, Any]:
    """Return what `format=json` prints as the results of a sweep: its trials, and what the table says of them."""
    results = read_results(folder, plan.trials)
    content: dict[str, Any] = {"monitor": plan.monitor, "mode": plan.mode, "over": list(plan.over), "best": None}
    content["trials"] = [_trial(result) for result in results]
    if plan.job == "eval":
        content["models"] = [_model(model) for model in read_evaluations(results)]
        return content

    rows = ranked_rows(results, over=plan.over, monitor=plan.monitor, mode=plan.mode)
    best = best_trial(rows, mode=plan.mode)
    if best is not None:
        content["best"] = best.number
    content["rows"] = [_row(row) for row in rows]
    return content


def _trial(result: TrialResult) -> dict[str, Any]:
    facts = asdict(result)
    del facts["number"]
    overrides = [masked_override(text) for text in result.overrides]
    return {"trial": result.number, **facts, "run": display_path(result.run), "overrides": overrides}


def _row(row: Row) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "trials": [trial.number for trial in row.trials],
        "overrides": [masked_override(text) for text in row.overrides],
        "n": row.n,
        "mean": row.mean,
        "half_width": row.half_width,
        "is_tied": row.is_tied,
    }


def _model(model: EvaluatedModel) -> dict[str, Any]:
    return {
        "checkpoint": None if model.checkpoint is None else display_path(model.checkpoint),
        "trials": list(model.trials),
        "overrides": [masked_override(text) for text in model.overrides],
        "metrics": dict(model.metrics),
    }


def _write_results(folder: SweepFolder, plan: SweepPlan, results: Sequence[TrialResult]) -> None:
    """Write results.csv. A full disk, say, ends no sweep: it can be written again from the trials."""
    if plan.job == "eval":
        content = evaluations_csv(read_evaluations(results))
    else:
        content = csv_text(results, monitor=plan.monitor)
    with suppress(OSError):
        write_atomically(folder.results_file, content)


@final
class ResultsFile:
    """Keeps results.csv up to date while trials run, at most every few seconds: many trials take time to read."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._next_s = 0.0

    def write_if_due(self) -> None:
        if time.monotonic() < self._next_s:
            return
        plan = SweepPlan.read(self._folder)
        _write_results(self._folder, plan, read_results(self._folder, plan.trials))
        self._next_s = time.monotonic() + _RESULTS_EVERY_S
