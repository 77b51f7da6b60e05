"""The HTML page of a report: one self-contained file for desktop, phone and printer.

Everything that comes from a run is escaped. Images and tables are those that `JsonlLogger` keeps in `media/`.
"""

from __future__ import annotations

import base64
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from framework.jobs.compare import Section, cell, compare, metrics
from framework.jobs.report import curves
from framework.jobs.report.curves import Curve, chart, color, thinned
from framework.jobs.run_records import RunRecord, metric_names, read_rows, read_run
from framework.jobs.runs import format_duration, format_metric
from framework.jobs.summary import display_path
from framework.monitoring.report import FailureReport, render
from framework.system.formatting import format_count
from framework.system.run_dir import read_object

_FIRST = ("val", "test", "train")  # sections of curves; the others follow by name
_MAX_ROWS = 200  # of a table in a .csv file
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def make_page(records: Sequence[RunRecord]) -> str:
    """Return the page of one or several runs."""
    recipes = ", ".join(dict.fromkeys(record.recipe for record in records))
    title = f"{recipes}: {records[0].run_dir.path.name if len(records) == 1 else format_count(len(records), 'run')}"
    found = compare(records)
    charts, single = _curves(records)
    sections = {
        "Runs": [_cards(records)],
        "Failures": _failures(records),
        "Results": [_table(records, {**metrics(records), **single})],
        "Curves": [_figures(charts)],
        "Tables": _texts(records),
        "Evaluations": _evaluations(records),
        "Media": _media(records),
        "Differences": [_differences(records, found)] if len(records) > 1 else [],
        "Environment": [_environments(records)],
        "Configuration": list(_configurations(records)),
    }
    body = [f"<section><h2>{name}</h2>{''.join(parts)}</section>" for name, parts in sections.items() if any(parts)]
    here = Path(__file__).parent
    style, script = ((here / name).read_text() for name in ("style.css", "script.js"))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{style}</style></head>
<body><h1>{escape(title)}</h1><p class="dim">Made {datetime.now():%Y-%m-%d %H:%M}</p>
{"".join(body)}
<script type="application/json" id="curves">{_data(charts)}</script>
<script>{script}</script></body></html>
"""


# Runs


def _cards(records: Sequence[RunRecord]) -> str:
    return _grid(_card(number, record) for number, record in enumerate(records))


def _card(number: int, record: RunRecord) -> str:
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
    status = f'<span class="status {record.status}">{record.status}</span>'
    return f'<div class="card"><h3>{_label(number, record)}</h3>{status}{_facts(facts)}</div>'


def _label(number: int, record: RunRecord) -> str:
    return f"{_swatch(number)}{escape(record.run)}"


def _swatch(number: int) -> str:
    return f'<span class="swatch {color(number)}">{number + 1}</span>'


def _facts(facts: Mapping[str, Any]) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in facts.items() if text)
    return f"<dl>{''.join(rows)}</dl>"


def _failures(records: Sequence[RunRecord]) -> list[str]:
    parts = []
    for number, record in enumerate(records):
        for file in sorted(record.run_dir.path.glob("failure*.json")):
            plain = read_object(file)
            if plain is not None:
                parts.append(
                    f"<h3>{_label(number, record)}</h3><pre>{escape(render(FailureReport.from_plain(plain)))}</pre>"
                )
    return parts


# Numbers


def _table(records: Sequence[RunRecord], section: Section) -> str:
    """Return a table with a row for each name and a column for each run."""
    if not section:
        return ""
    head = "".join(f"<th>{_swatch(number)}</th>" for number in range(len(records)))
    rows = (
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell(value))}</td>' for value in row)}</tr>"
        for name, row in section.items()
    )
    return _scrolled(f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>")


def _differences(records: Sequence[RunRecord], found: Mapping[str, Section]) -> str:
    sections = {name: section for name, section in found.items() if name not in ("run", "metrics")}
    return "".join(
        f"<h3>{name.capitalize()}</h3>{_table(records, section) or '<p class=dim>The same, or not known</p>'}"
        for name, section in sections.items()
    )


# Curves


def _curves(records: Sequence[RunRecord]) -> tuple[dict[str, list[Curve | None]], Section]:
    """Return each metric's curve in each run, and as a table the metrics that were logged only once."""
    found: list[dict[str, Curve]] = []
    for record in records:
        own: dict[str, Curve] = defaultdict(list)
        for row in read_rows(record.run_dir):
            for name in metric_names(row):
                own[name].append((row["step"], row[name]))
        found.append(own)
    names = sorted({name for own in found for name in own}, key=_order)
    charts = {name: [thinned(own[name]) if name in own else None for own in found] for name in names}
    single = {name for name, lines in charts.items() if all(line is None or len(line) < 2 for line in lines)}
    return (
        {name: lines for name, lines in charts.items() if name not in single},
        {name: [line[0][1] if line else None for line in charts[name]] for name in sorted(single)},
    )


def _order(name: str) -> tuple[int, str]:
    part = name.partition("/")[0]
    return _FIRST.index(part) if part in _FIRST else len(_FIRST), name


def _figures(charts: Mapping[str, Sequence[Curve | None]]) -> str:
    parts: dict[str, list[str]] = defaultdict(list)
    for number, (name, lines) in enumerate(charts.items()):
        ends = [(run, line[-1]) for run, line in enumerate(lines) if line]
        values = "".join(f'<span class="{color(run)}">{escape(_value(value))}</span>' for run, (_, value) in ends)
        parts[name.partition("/")[0]].append(
            f'<figure data-chart="{number}"><figcaption>{escape(name)}</figcaption>'
            f"{chart(lines, name=name)}<output>last{values}</output></figure>"
        )
    return "".join(f"<h3>{escape(part)}</h3>{_grid(each)}" for part, each in parts.items())


def _value(value: float | None) -> str:
    return "not finite" if value is None else format_metric(value)


def _data(charts: Mapping[str, Sequence[Curve | None]]) -> str:
    """Return the points for script.js, as JSON that is safe in a script element."""
    area = {
        "left": curves.LEFT,
        "right": curves.RIGHT,
        "top": curves.TOP,
        "bottom": curves.BOTTOM,
        "width": curves.WIDTH,
    }
    data = {"area": area, "colors": curves.NUM_COLORS, "curves": list(charts.values())}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# Tables, evaluations, media


def _texts(records: Sequence[RunRecord]) -> list[str]:
    """Return the tables of the last validation and of the test; tables of the same name are neighbours."""
    names = dict.fromkeys(name for record in records for name in record.texts)
    cards = [
        f'<div class="card"><h3>{_swatch(number)}{escape(name)}</h3>{_markdown(record.texts[name])}</div>'
        for name in names
        for number, record in enumerate(records)
        if name in record.texts
    ]
    return [_grid(cards)] if cards else []


def _evaluations(records: Sequence[RunRecord]) -> list[str]:
    cards = []
    for number, record in enumerate(records):
        for place in sorted(record.run_dir.path.glob("eval/*")):
            found = read_run(place)
            if found is None:
                continue
            values = {name: format_metric(value) for name, value in found.test_metrics.items()}
            texts = "".join(f"<h3>{escape(name)}</h3>{_markdown(text)}" for name, text in found.texts.items())
            facts = {
                "checkpoint": display_path(Path(found.config["checkpoint"]["path"])),
                "status": found.status,
                **values,
            }
            title = f"{_swatch(number)}{escape(found.run)}"
            cards.append(f'<div class="card"><h3>{title}</h3>{_facts(facts)}{texts}</div>')
    return [_grid(cards)] if cards else []


def _media(records: Sequence[RunRecord]) -> list[str]:
    """Return the images and tables by name, several images of one name side by side."""
    parts = []
    for number, record in enumerate(records):
        by_name: dict[str, list[str]] = defaultdict(list)
        for file in sorted(record.run_dir.media.glob("*_*.*")):
            name, _, step = file.stem.rpartition("_")
            if file.suffix in (".png", ".csv") and step.isdecimal():
                name = re.sub(r"__\d+$", "", name).replace("__", "/")
                if name in record.texts:  # a confusion matrix is among the tables already
                    continue
                by_name[f"{name}, step {int(step):,}"].append(_medium(file, name))
        for name, shown in by_name.items():
            content = shown[0] if len(shown) == 1 else f'<div class="gallery">{"".join(shown)}</div>'
            parts.append(f"<h3>{_label(number, record)}: {escape(name)}</h3>{content}")
    return parts


def _medium(file: Path, name: str) -> str:
    if file.suffix == ".png":
        content = base64.b64encode(file.read_bytes()).decode()
        with Image.open(file) as image:
            caption = escape(image.info.get("Description", ""))
        picture = f'<img alt="{escape(name)}" src="data:image/png;base64,{content}">'
        return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"
    rows = list(csv.reader(file.read_text().splitlines()))
    more = len(rows) - 1 - _MAX_ROWS
    return _plain_table(rows[: _MAX_ROWS + 1]) + (f'<p class="dim">and {more:,} more rows</p>' if more > 0 else "")


def _markdown(text: str) -> str:
    """Return a text as HTML: Markdown tables as tables, a confusion matrix with colors, the rest as it is."""
    parts, lines = [], text.splitlines()
    while lines:
        is_table = lines[0].startswith("|")
        count = next((at for at, line in enumerate(lines) if line.startswith("|") is not is_table), len(lines))
        block, lines = lines[:count], lines[count:]
        if is_table:
            rows = [[each.strip() for each in line.strip().strip("|").split("|")] for line in block]
            rows = [row for row in rows if set("".join(row)) - set("-: ") or not "".join(row)]
            is_matrix = rows[0][0] == "target \\ predicted"
            parts.append(_matrix(rows) if is_matrix else _plain_table(rows))
        elif any(map(str.strip, block)):
            parts.append(f"<pre>{escape(chr(10).join(block))}</pre>")
    return "".join(parts)


def _plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row is the header."""
    head, *body = ([escape(each) for each in row] for row in rows or [[]])
    lines = (f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in body)
    return _scrolled(f"<thead><tr><th>{'</th><th>'.join(head)}</th></tr></thead><tbody>{''.join(lines)}</tbody>")


def _scrolled(table: str, kind: str = "") -> str:
    """Return a table that scrolls sideways if it is wider than the page."""
    return f'<div class="scroll"><table class="{kind}">{table}</table></div>'


def _matrix(rows: Sequence[Sequence[str]]) -> str:
    """Return a confusion matrix, shaded by shares of the row; mistakes relative to the largest share of mistakes."""
    counts = [[int(each) for each in row[1:]] for row in rows[1:]]
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    wrong = max((share for r, row in enumerate(shares) for c, share in enumerate(row) if r != c), default=0) or 1
    head = "".join(f"<th>{escape(label)}</th>" for label in rows[0][1:])
    body = []
    for r, row in enumerate(shares):
        cells = [f"<tr><th>{escape(rows[r + 1][0])}</th>"]
        for c, share in enumerate(row):
            kind, shade = (' class="on"', share) if r == c else ("", share / wrong)
            cells.append(f'<td{kind} style="--share:{shade:.3f}">{counts[r][c]}</td>')
        body.append("".join([*cells, "</tr>"]))
    table = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<p class="dim">Rows: target. Columns: predicted.</p>{_scrolled(table, "matrix")}'


# Where and how it ran


def _environments(records: Sequence[RunRecord]) -> str:
    cards = []
    for number, record in enumerate(records):
        facts = record.facts
        git, hardware, topology = facts.get("git") or {}, facts["hardware"], facts["topology"]
        shown = {
            "command": facts["command"],
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
        diff = _folded("uncommitted changes", git["diff"]) if git.get("diff") else ""
        cards.append(f'<div class="card"><h3>{_label(number, record)}</h3>{_facts(shown)}{diff}</div>')
    return _grid(cards)


def _configurations(records: Iterable[RunRecord]) -> Iterator[str]:
    for number, record in enumerate(records):
        typed = escape(" ".join(record.overrides)) or "nothing"
        config = _folded("config.yaml", record.run_dir.config_file.read_text())
        yield f"<h3>{_label(number, record)}</h3><p>Typed: {typed}</p>{config}"


def _grid(cells: Iterable[str]) -> str:
    return f'<div class="grid-of">{"".join(cells)}</div>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
