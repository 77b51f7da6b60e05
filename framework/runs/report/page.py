"""The HTML page of a report: one self-contained file for desktop, phone and printer.

This module collects what is shown; `page.html` is the only place that makes HTML. It escapes everything that is filled
in, and shows control characters as text. Images and tables are those that `JsonlLogger` keeps in `media/`. Only regular
files inside the run directory are shown: a symlink could name any file of whoever makes the page.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
import shlex
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from framework.config.secrets import masked_arguments
from framework.config.yaml_files import dump_yaml
from framework.errors import ConfigError
from framework.monitoring.report import FailureReport, render
from framework.remote.place import display_place
from framework.runs.compare import Section, cell, compare, metrics
from framework.runs.profile import ProfileTables, profile_tables
from framework.runs.record import DamagedRunError, RunRecord, metric_names, read_run
from framework.runs.report import curves
from framework.runs.report.curves import Chart, Curve, chart, color, thinned
from framework.system.files import parse_json, read_bytes
from framework.system.formatting import display_path, format_count, format_duration, format_metric
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

_HERE = Path(__file__).parent
# Sections of curves that come first; the others follow by name.
_FIRST = ("val", "test", "train")
# Rows of a table in a .csv file.
_MAX_ROWS = 200
# Pixels of an image: a browser takes four bytes for each.
_MAX_PIXELS = 2**26
_STATUSES = ("finished", "stopped", "failed", "interrupted", "running", "crashed")
# The classes .s0 to .s20 in style.css: the policy allows no style attributes.
_NUM_SHADES = 20
_PNG_HEADER = struct.Struct(">8sI4sII")
# Where curves are drawn in a chart.
_AREA = {
    "left": curves.LEFT,
    "right": curves.RIGHT,
    "top": curves.TOP,
    "bottom": curves.BOTTOM,
    "width": curves.WIDTH,
    "height": curves.HEIGHT,
}


def make_page(records: Sequence[RunRecord], *, importances: Mapping[str, Mapping[str, float]]) -> str:
    """Return the page of one or several runs. Raises ConfigError if the records of a run lie outside of it.

    importances: of searches, by their names: the share of each key in what made the results differ.
    """
    for record in records:
        _check_records(record.run_dir)
    recipes = ", ".join(dict.fromkeys(record.recipe for record in records))
    if len(records) == 1:
        title = f"{recipes}: {records[0].run_dir.path.name}"
        differences = []
    else:
        title = f"{recipes}: {format_count(len(records), 'run')}"
        differences = _differences(records)
    runs = [_run(number, record) for number, record in enumerate(records)]
    charts, logged_once = _curves(records)

    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = (_HERE / "script.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, finalize=_finalized
    )
    environment.filters["color"] = color
    return environment.get_template("page.html").render(
        title=title,
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        policy=_policy(style=style, script=script),
        style=Markup(style),
        script=Markup(script),
        area=_AREA,
        points={"area": _AREA, "colors": curves.NUM_COLORS, "curves": list(charts.values())},
        runs=runs,
        failures=list(_failures(records)),
        results=_rows(metrics(records) | logged_once, better=_better(records)),
        charts=_figures(charts, records=records),
        profiles=list(_profiles(records)),
        tables=list(_tables(records)),
        evaluations=list(_evaluations(records)),
        media=list(_media(records)),
        differences=differences,
        importances={name: _importance_rows(shares) for name, shares in importances.items()},
    )


def _importance_rows(shares: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the header of a table and a row for each key."""
    return [("key", "share"), *((key, f"{share:.0%}") for key, share in shares.items())]


def _policy(*, style: str, script: str) -> str:
    """Return a content security policy under which only this style and this script have an effect."""
    return (
        f"default-src 'none'; style-src '{_source_hash(style)}'; script-src '{_source_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _source_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _finalized(value: Any) -> Any:
    """Return a value of the template as text that is safe to show; escaping comes afterwards."""
    if isinstance(value, Markup):
        return value
    return shown(str(value))


# Files of a run


def _check_records(run_dir: RunDir) -> None:
    for path in (run_dir.config_file, run_dir.overrides_file, run_dir.run_file, run_dir.metrics_file):
        if path.exists() and not _is_inside(path, run_dir):
            raise ConfigError(
                f"{path} is a symlink or lies outside of the run, so it isn't shown. Replace it by the file itself."
            )


def _is_inside(path: Path, run_dir: RunDir) -> bool:
    return not path.is_symlink() and path.resolve().is_relative_to(run_dir.path.resolve())


def _read(path: Path, run_dir: RunDir) -> bytes:
    """Return the content of a regular file inside the run. Raises OSError for anything else."""
    if not _is_inside(path, run_dir):
        raise OSError("it is a symlink, or lies outside of the run")
    return read_bytes(path)


# Runs


class _Label(NamedTuple):
    """Which run something belongs to."""

    number: int
    name: str


def _label(number: int, record: RunRecord) -> _Label:
    return _Label(number, record.run)


def _run(number: int, record: RunRecord) -> dict[str, Any]:
    facts = {"recipe": record.recipe}
    if record.best is not None:
        facts["best"] = f"{record.monitor} {format_metric(record.best)}"
    if record.last is not None:
        facts["last"] = f"{record.monitor} {format_metric(record.last)}"
    results = record.facts.get("results") or {}
    if "steps" in results:
        facts["steps"] = f"{results['steps'] or 0:,} ({results.get('ended_by')})"
    facts["time"] = format_duration(record.seconds)
    facts["started"] = f"{record.started:%Y-%m-%d %H:%M}"
    facts["typed"] = " ".join(record.overrides)
    facts["rerun of"] = record.facts.get("rerun_of", "")
    point = record.branch_point
    if point is not None:
        facts["branch of"] = f"{display_place(point.run)} after step {point.step:,}"
    if "earlier" in record.facts:
        facts["resumed"] = format_count(len(record.facts["earlier"] or []), "time")
    return {
        **_label(number, record)._asdict(),
        "status": record.status,
        "status_class": record.status if record.status in _STATUSES else "",
        "facts": _pairs(facts),
        "environment": _pairs(_environment(record)),
        "changes": (record.facts.get("git") or {}).get("diff"),
        "typed": " ".join(record.overrides),
        "config": dump_yaml(record.config),
    }


def _environment(record: RunRecord) -> dict[str, Any]:
    facts = record.facts
    # Somebody may have edited run.json, so any of these may be missing.
    git = facts.get("git") or {}
    hardware = facts.get("hardware") or {}
    topology = facts.get("topology") or {}
    return {
        "command": _command(facts.get("command") or ""),
        "started": facts["started"],
        "ended": facts.get("ended"),
        "revision": git.get("revision", "not in a git repository"),
        "host": hardware.get("host"),
        "platform": hardware.get("platform"),
        "CPU cores": hardware.get("cpu_cores"),
        "GPUs": ", ".join(map(str, hardware.get("gpus") or [])) or "none",
        "processes": _processes(topology),
        "restarts": len(facts.get("restarts") or []),
        **(facts.get("versions") or {}),
    }


def _processes(topology: Mapping[str, Any]) -> str:
    nnodes = topology.get("nnodes")
    nodes = format_count(nnodes, "node") if isinstance(nnodes, int) else "unknown nodes"
    return f"{topology.get('world_size')} on {nodes}"


def _command(command: str) -> str:
    """Return the command that a run was started with; earlier versions recorded its passwords."""
    try:
        return shlex.join(masked_arguments(shlex.split(command)))
    except ValueError:
        # A quote that isn't closed.
        return command


def _pairs(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in facts.items() if value]


def _failures(records: Sequence[RunRecord]) -> Iterator[tuple[_Label, str]]:
    for number, record in enumerate(records):
        for file in sorted(record.run_dir.path.glob("failure*.json")):
            yield _label(number, record), _failure(file, record.run_dir)


def _failure(file: Path, run_dir: RunDir) -> str:
    try:
        plain = parse_json(_read(file, run_dir))
    except (OSError, ValueError) as error:
        return f"{file.name} can't be shown: {error}"
    try:
        return render(FailureReport.from_plain(plain))
    except (TypeError, ValueError, KeyError, AttributeError):
        # Somebody edited it, or it is of another version.
        return json.dumps(plain, indent=2)


def _profiles(records: Sequence[RunRecord]) -> Iterator[tuple[_Label, ProfileTables]]:
    """Yield where the time of profiled runs went."""
    for number, record in enumerate(records):
        profile = record.facts.get("profile")
        if profile is None:
            continue
        try:
            tables = profile_tables(profile)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            # Somebody edited it, or it is of another version.
            tables = ProfileTables("The profile in run.json can't be shown.", [], [], [], [])
        yield _label(number, record), tables


# Numbers


class _Cell(NamedTuple):
    text: str
    # If it is the best value of its row.
    is_best: bool = False


_Row = tuple[str, list[_Cell]]


def _rows(section: Section, *, better: Mapping[str, str] | None = None) -> list[_Row]:
    """Return the rows of a table.

    Args:
        better: `min` or `max`, by the names of the rows whose best value is marked.
    """
    rows = []
    for name, values in section.items():
        best = None
        if better is not None and name in better:
            best = _best(values, mode=better[name])
        rows.append((name, [_Cell(cell(value), best is not None and value == best) for value in values]))
    return rows


def _best(values: Sequence[Any], *, mode: str) -> float | None:
    """Return the best of several values; None without a finite one, and for a single value."""
    finite = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    if len(values) == 1 or not finite:
        return None
    if mode == "min":
        return min(finite)
    return max(finite)


def _better(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return for the row of the monitored metric which value is better, `min` or `max`; empty if runs disagree."""
    names = {record.monitor for record in records}
    modes = {record.mode for record in records}
    if len(names) != 1 or len(modes) != 1 or None in names:
        return {}
    return {f"{names.pop()} (best)": modes.pop()}


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[_Row]]]:
    sections = compare(records)
    # These are shown elsewhere on the page.
    del sections["run"], sections["metrics"]
    return [(name.capitalize(), _rows(section)) for name, section in sections.items()]


# Curves


def _curves(records: Sequence[RunRecord]) -> tuple[dict[str, list[Curve | None]], Section]:
    """Return each metric's curve in each run, and as a table the metrics that were logged only once."""
    curves_of_runs = [_curves_of(record) for record in records]
    names: set[str] = set()
    for curve_by_name in curves_of_runs:
        names.update(curve_by_name)

    charts: dict[str, list[Curve | None]] = {}
    logged_once: Section = {}
    for name in sorted(names, key=_order):
        # None for a run without this metric.
        lines = [curve_by_name.get(name) for curve_by_name in curves_of_runs]
        longest = max(len(line) for line in lines if line is not None)
        if longest < 2:
            logged_once[name] = [_only_value(line) for line in lines]
        else:
            charts[name] = [None if line is None else thinned(line) for line in lines]
    return charts, dict(sorted(logged_once.items()))


def _only_value(curve: Curve | None) -> float | None:
    if not curve:
        return None
    _, value = curve[0]
    return value


def _curves_of(record: RunRecord) -> dict[str, Curve]:
    curve_by_name: dict[str, Curve] = defaultdict(list)
    for row in record.rows():
        for name in metric_names(row):
            # A bool is no number here.
            if row[name] is None or type(row[name]) in (int, float):
                curve_by_name[name].append((row["step"], row[name]))
    return curve_by_name


def _order(name: str) -> tuple[int, str]:
    part = name.partition("/")[0]
    if part in _FIRST:
        return _FIRST.index(part), name
    return len(_FIRST), name


@dataclass(frozen=True)
class _Figure:
    number: int
    chart: Chart
    # The last value of each run.
    last: list[tuple[_Label, str]]


def _figures(
    charts: Mapping[str, Sequence[Curve | None]], *, records: Sequence[RunRecord]
) -> list[tuple[str, list[_Figure]]]:
    """Return the figures by the part of their names before the slash."""
    modes = {record.monitor: record.mode for record in records}
    parts: dict[str, list[_Figure]] = defaultdict(list)
    for number, (name, lines) in enumerate(charts.items()):
        last = []
        # `run` is the number of a run, `number` that of a figure.
        for run, (record, line) in enumerate(zip(records, lines, strict=True)):
            if line:
                _, value = line[-1]
                last.append((_label(run, record), _value(value)))
        figure = _Figure(number, chart(lines, name=name, mode=modes.get(name)), last)
        parts[name.partition("/")[0]].append(figure)
    return list(parts.items())


def _value(value: float | None) -> str:
    if value is None:
        return "not finite"
    return format_metric(value)


# Tables and evaluations


class _Block(NamedTuple):
    """A part of a text: a `table` of rows, a confusion `matrix`, or `text`."""

    kind: str
    content: Any


@dataclass(frozen=True)
class _MatrixCell:
    """A cell of a confusion matrix."""

    count: int
    # In the style sheet: `s0` to `s20`, and `on` for the diagonal.
    classes: str


def _tables(records: Sequence[RunRecord]) -> Iterator[tuple[_Label, str, list[_Block]]]:
    """Yield the tables of the last validation and of the test; tables of the same name are neighbours."""
    # A dict keeps the names in order.
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record.texts)
    for name in names:
        for number, record in enumerate(records):
            if name in record.texts:
                yield _label(number, record), name, _blocks(record.texts[name])


def _evaluations(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    for number, record in enumerate(records):
        for place in sorted(record.run_dir.path.glob("eval/*")):
            if not _is_inside(place, record.run_dir):
                continue
            try:
                evaluation = read_run(place)
            except DamagedRunError as error:
                yield {"number": number, "name": display_path(place), "facts": [("damaged", str(error))], "texts": []}
                continue
            if evaluation is None:
                continue
            _check_records(evaluation.run_dir)
            facts = {
                "checkpoint": _checkpoint_of(evaluation),
                "status": evaluation.status,
            }
            facts |= {name: format_metric(value) for name, value in evaluation.test_metrics.items()}
            texts = [(name, _blocks(text)) for name, text in evaluation.texts.items()]
            yield {**_label(number, evaluation)._asdict(), "facts": _pairs(facts), "texts": texts}


def _checkpoint_of(evaluation: RunRecord) -> str:
    """Return the checkpoint that was evaluated; empty if the configuration doesn't say so any more."""
    path = evaluation.value("checkpoint.path")
    return display_path(Path(path)) if isinstance(path, str) else ""


def _blocks(text: str) -> list[_Block]:
    """Return the parts of a text: Markdown tables, confusion matrices among them, and the rest as it is."""
    blocks = []
    for is_table, group in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        lines = list(group)
        if is_table:
            blocks.append(_table(lines))
        elif any(map(str.strip, lines)):
            blocks.append(_Block("text", "\n".join(lines)))
    return blocks


def _table(lines: Sequence[str]) -> _Block:
    rows = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not _is_rule("".join(cells)):
            rows.append(cells)
    if rows and rows[0][0] == "target \\ predicted":
        try:
            return _Block("matrix", _matrix(rows))
        except ValueError:
            # Its cells are no numbers: it is shown as any other table.
            return _Block("table", rows)
    return _Block("table", rows or [[]])


def _is_rule(text: str) -> bool:
    """Return True for the line of Markdown below a table's header."""
    return bool(text) and set(text) <= set("-: ")


def _matrix(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a confusion matrix, shaded by shares of the row; mistakes relative to the largest share of mistakes."""
    classes = []
    counts = []
    for name, *cells in rows[1:]:
        classes.append(name)
        counts.append([int(cell) for cell in cells])
    shares = [_shares(row) for row in counts]
    largest_mistake = 0.0
    for target, row in enumerate(shares):
        for predicted, share in enumerate(row):
            if predicted != target:
                largest_mistake = max(largest_mistake, share)

    body = []
    for target, row in enumerate(shares):
        shaded_row = []
        for predicted, share in enumerate(row):
            count = counts[target][predicted]
            if target == predicted:
                shaded_row.append(_MatrixCell(count, f"on s{_shade(share)}"))
            else:
                relative = share / (largest_mistake or 1)
                shaded_row.append(_MatrixCell(count, f"s{_shade(relative)}"))
        body.append((classes[target], shaded_row))
    return {"head": rows[0][1:], "rows": body}


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]


def _shade(share: float) -> int:
    return min(max(round(share * _NUM_SHADES), 0), _NUM_SHADES)


# Media


@dataclass(frozen=True)
class _Medium:
    """An image, a table, or why a file can't be shown."""

    name: str
    png: str = ""
    caption: str = ""
    rows: Sequence[Sequence[str]] = ((),)
    more: int = 0
    problem: str = ""


def _media(records: Sequence[RunRecord]) -> Iterator[tuple[_Label, str, list[_Medium]]]:
    """Yield the images and tables by name, several images of one name together."""
    for number, record in enumerate(records):
        media_by_title: dict[str, list[_Medium]] = defaultdict(list)
        for file in sorted(record.run_dir.media.glob("*_*.*")):
            name, _, step = file.stem.rpartition("_")
            if file.suffix not in (".png", ".csv") or not step.isdecimal():
                continue
            # `/` is written `__`. Of several images of a name, each has a number at the end: `NAME__0`.
            name = re.sub(r"__\d+$", "", name).replace("__", "/")
            # A confusion matrix is among the tables already.
            if name in record.texts:
                continue
            media_by_title[f"{name}, step {int(step):,}"].append(_medium(file, name, record.run_dir))
        for title, media in media_by_title.items():
            yield _label(number, record), title, media


def _medium(file: Path, name: str, run_dir: RunDir) -> _Medium:
    try:
        content = _read(file, run_dir)
        if file.suffix == ".png":
            return _picture(content, name)
        return _csv_table(content, name)
    except (OSError, ValueError, SyntaxError, csv.Error, Image.DecompressionBombError) as error:
        return _Medium(name, problem=f"{file.name} can't be shown: {error}")


def _picture(content: bytes, name: str) -> _Medium:
    """Return a PNG file as it is. Raises ValueError, OSError or SyntaxError for another, or one too large to show."""
    if len(content) < _PNG_HEADER.size:
        raise ValueError("it is no PNG file")
    *_, width, height = _PNG_HEADER.unpack_from(content)
    if width * height > _MAX_PIXELS:
        raise ValueError(f"it has {width:,} x {height:,} pixels")
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        caption = str(image.info.get("Description", ""))
    return _Medium(name, png=base64.b64encode(content).decode(), caption=caption)


def _csv_table(content: bytes, name: str) -> _Medium:
    rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
    shown_rows = rows[: _MAX_ROWS + 1] or [[]]
    return _Medium(name, rows=shown_rows, more=len(rows) - len(shown_rows))
