"""The table in RESULTS.md that a command writes: between two comments, line by line, whatever else the file says."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

from benchmarks.contest import Row

RESULTS = Path(__file__).resolve().with_name("RESULTS.md")
BEGIN = "<!-- written by python -m benchmarks -->"
END = "<!-- up to here -->"
HEAD = ("| part | claim | ours | theirs | ratio (range) | target | reached |", "|---|---|---|---|---|---|---|")
_PACKAGES = ("torch", "torchvision", "lightning", "accelerate")


@dataclass(frozen=True)
class Part:
    """What one part measured. provenance: a line that says when, where and how."""

    name: str
    rows: tuple[Row, ...]
    provenance: str


def provenance(name: str, *, rounds: int) -> str:
    """`- **steps**: …`: the command, the day, the machine, how busy it was of late, and the versions."""
    machine = f"{len(os.sched_getaffinity(0))} cores of {_processor()}"
    versions = ", ".join([f"Python {platform.python_version()}", *map(_version, _PACKAGES)])
    command = f"`python -m benchmarks --only {name} --rounds {rounds}`"
    load = f"load average {os.getloadavg()[1]:.1f}"
    return f"- **{name}**: {command}, {date.today().isoformat()}, {machine}, {load}, {versions}"


def with_parts(text: str, parts: Sequence[Part], *, order: Sequence[str]) -> str:
    """`text` with the lines of `parts` put in; parts that aren't among them keep theirs, in `order`.

    Raises ValueError where `text` hasn't both comments.
    """
    before, begin, rest = text.partition(f"{BEGIN}\n")
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{RESULTS} has no lines {BEGIN!r} and {END!r} to write between.")
    lines = inside.splitlines()
    new = {part.name: part for part in parts}
    rows: list[str] = []
    notes: list[str] = []
    for name in order:
        if name in new:
            rows += map(str, new[name].rows)
            notes.append(new[name].provenance)
        else:
            rows += _beginning(lines, f"| {name} |")
            notes += _beginning(lines, f"- **{name}**:")
    block = "\n".join(["", *HEAD, *rows, "", *notes, ""])
    return f"{before}{begin}{block}\n{end}{after}"


def _beginning(lines: Iterable[str], text: str) -> list[str]:
    return [line for line in lines if line.startswith(text)]


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def _processor() -> str:
    """The kernel's name of the processor, without what manufacturers add."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].replace("(R)", "").strip()
    return platform.machine()
