"""What a sweep of evaluations gave: one table with a row for each model, and a column for each metric of each part."""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from framework.config.overrides import key_of
from framework.runs.listing import csv_cell
from framework.runs.record import DamagedRunError, read_run
from framework.sweeps.results import FINISHED, TrialResult
from framework.sweeps.table import distinguishing
from framework.system.columns import NOTHING, fitted_table
from framework.system.formatting import display_path, format_count, format_metric
from framework.system.shown_text import printable


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model, and what its evaluations gave."""

    # Of its checkpoint; None if no evaluation of it has begun.
    checkpoint: Path | None
    # Those of its training and of its evaluation, without the part.
    overrides: tuple[str, ...]
    # Name → value, of all parts.
    metrics: Mapping[str, float]
    # Of each evaluation, with the cause if it failed.
    statuses: tuple[str, ...]
    # The numbers of the evaluations.
    trials: tuple[int, ...]

    @property
    def is_evaluated(self) -> bool:
        return all(status == FINISHED for status in self.statuses)


def read_evaluations(results: Sequence[TrialResult]) -> list[EvaluatedModel]:
    """Return the models that a sweep evaluates. Evaluations of a model that differ in the part only are one of them."""
    of_models: dict[tuple[str, ...], list[TrialResult]] = {}
    for result in results:
        without_part = tuple(text for text in result.overrides if key_of(text) != "eval.part")
        of_models.setdefault(without_part, []).append(result)
    return [_model(overrides, evaluations) for overrides, evaluations in of_models.items()]


def _model(overrides: Sequence[str], evaluations: Sequence[TrialResult]) -> EvaluatedModel:
    """Return one model. overrides: those that its evaluations have in common."""
    checkpoint = None
    metrics: dict[str, float] = {}
    statuses = []
    for evaluation in evaluations:
        recorded_checkpoint, values = _evaluated(evaluation.run)
        checkpoint = checkpoint or recorded_checkpoint
        metrics |= values
        status = evaluation.status
        if evaluation.cause:
            status = f"{status}: {evaluation.cause}"
        statuses.append(status)
    return EvaluatedModel(
        checkpoint=checkpoint,
        overrides=tuple(text for text in overrides if key_of(text) != "checkpoint.path"),
        metrics=metrics,
        statuses=tuple(statuses),
        trials=tuple(evaluation.number for evaluation in evaluations),
    )


def _evaluated(run: Path) -> tuple[Path | None, Mapping[str, float]]:
    """Return the checkpoint and the metrics of an evaluation; None and nothing if it has recorded none."""
    try:
        record = read_run(run)
        if record is None:
            return None, {}
        checkpoint = record.config["checkpoint"]["path"]
    except (DamagedRunError, OSError, KeyError, TypeError, ValueError):
        return None, {}
    results = record.facts.get("results") or {}
    return Path(checkpoint) if checkpoint else None, results.get("metrics") or {}


def evaluations_text(models: Sequence[EvaluatedModel], *, monitor: str | None, mode: str, width: int) -> str:
    """Return the table, best model first, and the number of evaluations by status.

    Args:
        monitor, mode: what the models were selected by in training. The same metric of an evaluated part decides.
        width: of the terminal. Columns that don't fit go on lines below.
    """
    metrics = _metric_names(models)
    decisive = _decisive(metrics, monitor=monitor)
    ordered = _ordered(models, by=decisive, mode=mode)
    labels = distinguishing([model.overrides for model in ordered])
    places = _short_places([model.checkpoint for model in ordered])

    header: dict[str, str] = {name: name for name in ("model", "overrides", *metrics, "status")}
    cells = [header]
    for model, place, label in zip(ordered, places, labels, strict=True):
        row = {"model": printable(place), "overrides": printable(label)}
        for name in metrics:
            row[name] = format_metric(model.metrics.get(name))
        # Only what hasn't gone well is said.
        row["status"] = "" if model.is_evaluated else printable(_summary(model.statuses))
        cells.append(row)
    if all(model.is_evaluated for model in models):
        for row in cells:
            del row["status"]
    # Of a single model, nothing distinguishes it.
    if len(models) == 1 or not any(labels):
        for row in cells:
            del row["overrides"]

    below: dict[str, str] = {name: "{}" for name in ("status", "overrides") if name in header}
    lines = fitted_table(cells, below=below, right=metrics, width=width)
    statuses = Counter(status.partition(":")[0] for model in models for status in model.statuses)
    counts = ", ".join(f"{count:,} {printable(status)}" for status, count in statuses.most_common())
    total = format_count(sum(statuses.values()), "evaluation")
    notes = [f"{total} of {format_count(len(models), 'model')}: {counts}"]
    if decisive is not None and len(models) > 1:
        notes.insert(0, f"sorted by {printable(decisive)}")
    lines.append("")
    for note in notes:
        lines += textwrap.wrap(note, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def evaluations_csv(models: Sequence[EvaluatedModel]) -> str:
    """Return the content of results.csv: a line for each model."""
    metrics = _metric_names(models)
    labels = distinguishing([model.overrides for model in models])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([printable(name) for name in ("checkpoint", "overrides", "status", *metrics)])
    for model, label in zip(models, labels, strict=True):
        place = "" if model.checkpoint is None else display_path(model.checkpoint)
        cells = [place, label, _summary(model.statuses), *(model.metrics.get(name) for name in metrics)]
        writer.writerow([csv_cell(cell) for cell in cells])
    return text.getvalue()


def _metric_names(models: Iterable[EvaluatedModel]) -> list[str]:
    names: dict[str, None] = {}
    for model in models:
        names |= dict.fromkeys(model.metrics)
    return list(names)


def _decisive(metrics: Sequence[str], *, monitor: str | None) -> str | None:
    """Return the metric that models are sorted by: the monitored one, or its namesake of another part."""
    if monitor is None:
        return None
    if monitor in metrics:
        return monitor
    name = monitor.partition("/")[2]
    namesakes = [metric for metric in metrics if metric.partition("/")[2] == name]
    return namesakes[0] if namesakes else None


def _ordered(models: Sequence[EvaluatedModel], *, by: str | None, mode: str) -> list[EvaluatedModel]:
    """Return the models, those with the best value first, and those without one last."""
    if by is None:
        return list(models)
    known = [model for model in models if by in model.metrics]
    unknown = [model for model in models if by not in model.metrics]
    known.sort(key=lambda model: model.metrics[by], reverse=mode == "max")
    return [*known, *unknown]


def _summary(statuses: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(statuses))


def _short_places(checkpoints: Sequence[Path | None]) -> list[str]:
    """Return the paths of checkpoints from the folder that all are in, without what all have in common."""
    known = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if len(known) < 2:
        return [NOTHING if checkpoint is None else display_path(checkpoint) for checkpoint in checkpoints]
    common = os.path.commonpath([str(checkpoint.parent) for checkpoint in known])
    return [NOTHING if checkpoint is None else os.path.relpath(checkpoint, common) for checkpoint in checkpoints]
