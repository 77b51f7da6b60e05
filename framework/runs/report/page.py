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
import re
import shlex
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from framework.config.saved import dump_yaml
from framework.config.secrets import masked_arguments
from framework.errors import ConfigError
from framework.monitoring.report import FailureReport, render
from framework.runs.compare import Section, cell, compare, metrics
from framework.runs.record import RunRecord, metric_names, read_rows, read_run
from framework.runs.report import curves
from framework.runs.report.curves import Chart, Curve, chart, color, thinned
from framework.system.files import parse_json, read_bytes
from framework.system.formatting import display_path, format_count, format_duration, format_metric
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

_HERE = Path(__file__).parent
_FIRST = ("val", "test", "train")  # sections of curves; the others follow by name
_MAX_ROWS = 200  # of a table in a .csv file
_MAX_PIXELS = 2**26  # of an image: a browser takes four bytes for each
_STATUSES = ("finished", "stopped", "failed", "interrupted", "running", "crashed")
_NUM_SHADES = 20  # .s0 to .s20 in style.css: the policy allows no style attributes
_PNG_HEADER = struct.Struct(">8sI4sII")


def make_page(records: Sequence[RunRecord]) -> str:
    """Return the page of one or several runs. Raises ConfigError if the records of a run lie outside of it."""
    for record in records:
        _check_records(record.run_dir)
    recipes = ", ".join(dict.fromkeys(record.recipe for record in records))
    name = records[0].run_dir.path.name if len(records) == 1 else format_count(len(records), "run")
    charts, single = _curves(records)
    style = (_HERE / "style.css").read_text()
    script = (_HERE / "script.js").read_text()
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, finalize=_finalized
    )
    environment.filters["color"] = color
    return environment.get_template("page.html").render(
        title=f"{recipes}: {name}",
        made=f"{datetime.now():%Y-%m-%d %H:%M}",
        policy=_policy(style=style, script=script),
        style=Markup(style),
        script=Markup(script),
        area=_AREA,
        points={"area": _AREA, "colors": curves.NUM_COLORS, "curves": list(charts.values())},
        runs=[_run(number, record) for number, record in enumerate(records)],
        failures=list(_failures(records)),
        results=_rows({**metrics(records), **single}),
        charts=_figures(charts),
        tables=list(_tables(records)),
        evaluations=list(_evaluations(records)),
        media=list(_media(records)),
        differences=_differences(records) if len(records) > 1 else [],
    )


_AREA = {
    "left": curves.LEFT,
    "right": curves.RIGHT,
    "top": curves.TOP,
    "bottom": curves.BOTTOM,
    "width": curves.WIDTH,
    "height": curves.HEIGHT,
}


def _policy(*, style: str, script: str) -> str:
    """Return a content security policy under which only this style and this script have an effect."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _finalized(value: Any) -> Any:
    """Return a value of the template as text that is safe to show; escaping comes afterwards."""
    return value if isinstance(value, Markup) else shown(str(value))


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
    results = record.facts.get("results") or {}
    facts = {
        "recipe": record.recipe,
        "best": "" if record.best is None else f"{record.monitor} {format_metric(record.best)}",
        "last": "" if record.last is None else f"{record.monitor} {format_metric(record.last)}",
        "steps": f"{results['steps']:,} ({results['ended_by']})" if "steps" in results else "",
        "time": format_duration(record.seconds),
        "started": f"{record.started:%Y-%m-%d %H:%M}",
        "typed": " ".join(record.overrides),
        "rerun of": record.facts.get("rerun_of", ""),
        "resumed": format_count(len(record.facts["earlier"]), "time") if "earlier" in record.facts else "",
    }
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
    git = facts.get("git") or {}
    hardware = facts["hardware"]
    topology = facts["topology"]
    return {
        "command": _command(facts["command"]),
        "started": facts["started"],
        "ended": facts.get("ended"),
        "revision": git.get("revision", "not in a git repository"),
        "host": hardware["host"],
        "platform": hardware["platform"],
        "CPU cores": hardware["cpu_cores"],
        "GPUs": ", ".join(hardware["gpus"]) or "none",
        "processes": f"{topology['world_size']} on {format_count(topology['nnodes'], 'node')}",
        "restarts": len(facts.get("restarts", [])),
        **facts["versions"],
    }


def _command(command: str) -> str:
    """Return the command that a run was started with; earlier versions recorded its passwords."""
    try:
        return shlex.join(masked_arguments(shlex.split(command)))
    except ValueError:  # a quote that isn't closed
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
    except (TypeError, ValueError, KeyError, AttributeError):  # edited, or of another version
        return json.dumps(plain, indent=2)


# Numbers


def _rows(section: Section) -> list[tuple[str, list[str]]]:
    return [(name, [cell(value) for value in row]) for name, row in section.items()]


def _differences(records: Sequence[RunRecord]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    sections = compare(records)
    return [(name.capitalize(), _rows(section)) for name, section in sections.items() if name not in ("run", "metrics")]


# Curves


def _curves(records: Sequence[RunRecord]) -> tuple[dict[str, list[Curve | None]], Section]:
    """Return each metric's curve in each run, and as a table the metrics that were logged only once."""
    curves_of_runs = [_curves_of(record) for record in records]
    names = sorted({name for found in curves_of_runs for name in found}, key=_order)
    charts = {name: [thinned(found[name]) if name in found else None for found in curves_of_runs] for name in names}
    single = {name for name, lines in charts.items() if all(line is None or len(line) < 2 for line in lines)}
    return (
        {name: lines for name, lines in charts.items() if name not in single},
        {name: [line[0][1] if line else None for line in charts[name]] for name in sorted(single)},
    )


def _curves_of(record: RunRecord) -> dict[str, Curve]:
    found: dict[str, Curve] = defaultdict(list)
    for row in read_rows(record.run_dir):
        for name in metric_names(row):
            if row[name] is None or type(row[name]) in (int, float):
                found[name].append((row["step"], row[name]))
    return found


def _order(name: str) -> tuple[int, str]:
    part = name.partition("/")[0]
    return _FIRST.index(part) if part in _FIRST else len(_FIRST), name


@dataclass(frozen=True)
class _Figure:
    number: int
    chart: Chart
    last: list[tuple[str, str]]  # the color and the last value of each run


def _figures(charts: Mapping[str, Sequence[Curve | None]]) -> list[tuple[str, list[_Figure]]]:
    """Return the figures by the part of their names before the slash."""
    parts: dict[str, list[_Figure]] = defaultdict(list)
    for number, (name, lines) in enumerate(charts.items()):
        last = [(color(run), _value(line[-1][1])) for run, line in enumerate(lines) if line]
        parts[name.partition("/")[0]].append(_Figure(number, chart(lines, name=name), last))
    return list(parts.items())


def _value(value: float | None) -> str:
    return "not finite" if value is None else format_metric(value)


# Tables and evaluations


class _Block(NamedTuple):
    """A part of a text: a `table` of rows, a confusion `matrix`, or `text`."""

    kind: str
    content: Any


@dataclass(frozen=True)
class _Share:
    """A cell of a confusion matrix."""

    count: int
    classes: str


def _tables(records: Sequence[RunRecord]) -> Iterator[tuple[_Label, str, list[_Block]]]:
    """Yield the tables of the last validation and of the test; tables of the same name are neighbours."""
    for name in dict.fromkeys(name for record in records for name in record.texts):
        for number, record in enumerate(records):
            if name in record.texts:
                yield _label(number, record), name, _blocks(record.texts[name])


def _evaluations(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    for number, record in enumerate(records):
        for place in sorted(record.run_dir.path.glob("eval/*")):
            if not _is_inside(place, record.run_dir):
                continue
            found = read_run(place)
            if found is None:
                continue
            _check_records(found.run_dir)
            values = {name: format_metric(value) for name, value in found.test_metrics.items()}
            checkpoint = display_path(Path(found.config["checkpoint"]["path"]))
            facts = {"checkpoint": checkpoint, "status": found.status, **values}
            texts = [(name, _blocks(text)) for name, text in found.texts.items()]
            yield {**_label(number, found)._asdict(), "facts": _pairs(facts), "texts": texts}


def _blocks(text: str) -> list[_Block]:
    """Return the parts of a text: Markdown tables, confusion matrices among them, and the rest as it is."""
    blocks = []
    lines = text.splitlines()
    while lines:
        is_table = lines[0].startswith("|")
        count = next((at for at, line in enumerate(lines) if line.startswith("|") is not is_table), len(lines))
        part = lines[:count]
        lines = lines[count:]
        if is_table:
            blocks.append(_table(part))
        elif any(map(str.strip, part)):
            blocks.append(_Block("text", "\n".join(part)))
    return blocks


def _table(lines: Sequence[str]) -> _Block:
    rows = [[each.strip() for each in line.strip().strip("|").split("|")] for line in lines]
    rows = [row for row in rows if set("".join(row)) - set("-: ") or not "".join(row)]
    if rows and rows[0][0] == "target \\ predicted":
        try:
            return _Block("matrix", _matrix(rows))
        except ValueError:  # its cells are no numbers
            pass
    return _Block("table", rows or [[]])


def _matrix(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a confusion matrix, shaded by shares of the row; mistakes relative to the largest share of mistakes."""
    counts = [[int(each) for each in row[1:]] for row in rows[1:]]
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    mistakes = [share for r, row in enumerate(shares) for c, share in enumerate(row) if r != c]
    largest = max(mistakes, default=0) or 1
    body = []
    for r, row in enumerate(shares):
        cells = []
        for c, share in enumerate(row):
            shade = share if r == c else share / largest
            number = min(max(round(shade * _NUM_SHADES), 0), _NUM_SHADES)
            cells.append(_Share(counts[r][c], f"on s{number}" if r == c else f"s{number}"))
        body.append((rows[r + 1][0], cells))
    return {"head": rows[0][1:], "rows": body}


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
        by_name: dict[str, list[_Medium]] = defaultdict(list)
        for file in sorted(record.run_dir.media.glob("*_*.*")):
            name, _, step = file.stem.rpartition("_")
            if file.suffix in (".png", ".csv") and step.isdecimal():
                name = re.sub(r"__\d+$", "", name).replace("__", "/")
                if name in record.texts:  # a confusion matrix is among the tables already
                    continue
                by_name[f"{name}, step {int(step):,}"].append(_medium(file, name, record.run_dir))
        for title, media in by_name.items():
            yield _label(number, record), title, media


def _medium(file: Path, name: str, run_dir: RunDir) -> _Medium:
    try:
        content = _read(file, run_dir)
        return _picture(content, name) if file.suffix == ".png" else _csv_table(content, name)
    except (OSError, ValueError, SyntaxError, csv.Error, Image.DecompressionBombError) as error:
        return _Medium(name, problem=f"{file.name} can't be shown: {error}")


def _picture(content: bytes, name: str) -> _Medium:
    """Raises ValueError, OSError or SyntaxError if it isn't a PNG file, or is too large for a browser."""
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
