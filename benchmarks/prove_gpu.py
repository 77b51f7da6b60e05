"""Run tests/gpu and benchmarks.on_gpu, and write the outcome to benchmarks/GPU.md.

    python -m benchmarks.prove_gpu [--wheels FOLDER] [--only tests,benchmarks] [--seconds 585] [--report FILE]
    python -m benchmarks.prove_gpu --join TESTS.md BENCHMARKS.md

Needs Python and torch, no network and no installation: packages that are missing come from a folder of wheels (`make
gpu-wheels`), into a folder that is removed at the end. The report is complete after every test and every row: a run
that is cut, even by SIGKILL, leaves what it has and names the test it was in. Without a GPU the tests are skipped with
the reason, and their stand-ins run on the CPU.

Exit status 0: all passed; 1: a test or contestant failed; 2: torch is missing; 3: it was cut, by its own limit
(`--seconds`) or by a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from benchmarks.arguments import some_of
from benchmarks.gpu_events import PREFIX as EVENT
from benchmarks.on_gpu import PLANNED
from benchmarks.record import HEAD

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "GPU.md"

SECONDS = 585.0
"""Of each part. A machine that is lent for ten minutes is given back before they are over."""

PARTS = ("tests", "benchmarks")
TITLE = "# What was run on a GPU"
NO_GPU = "# No GPU was there: nothing below was run on one"
EXIT_FAILED = 1
EXIT_NO_TORCH = 2
EXIT_CUT = 3
# No traceback has so many backticks.
_FENCE = "`````"
_SHARE_OF_TESTS = 0.55
# An environment variable that all processes inherit.
_MARK = "PROVE_GPU_MARK"
# For ending, and for output that is still on its way.
_END_S = 3.0
_FACTS = """
import importlib.metadata as metadata, json, os, platform, torch
found = {"torch": torch.__version__, "Python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
found |= {"CUDA of torch": torch.version.cuda, "GPUs": torch.cuda.device_count()}
for index in range(torch.cuda.device_count()):
    found[f"GPU {index}"] = str(torch.cuda.get_device_properties(index))
try:
    import pynvml
    pynvml.nvmlInit()
    found["driver"] = pynvml.nvmlSystemGetDriverVersion()
except Exception as error:
    found["driver"] = f"none ({error})"
for name in ("torchvision", "numpy", "scikit-learn", "tensorboard", "lightning", "accelerate"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = "missing"
print(json.dumps(found))
"""


# The report


@dataclass
class Section:
    """A part of the report: a title, how far it is, a table, and texts in full below it."""

    title: str
    # The head of the table.
    head: Sequence[str]
    # How far it is.
    note: str = ""
    # The rows of the table, by what they are about.
    rows: dict[str, str] = field(default_factory=dict)
    # Texts in full, by their titles.
    texts: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        yield from ("", f"## {self.title}", "", self.note, "")
        yield from (*self.head, *self.rows.values())
        for title, text in self.texts.items():
            yield from ("", f"### {title}", "", f"{_FENCE}text", text.rstrip("\n"), _FENCE)


class Report:
    """A Markdown file that is complete after each change."""

    def __init__(self, path: Path, head: Sequence[str]) -> None:
        self._path = path
        self._head = head
        self._sections: list[Section] = []
        print(*head, sep="\n", flush=True)
        self.write()

    def begin(self, title: str, head: Sequence[str]) -> Section:
        section = Section(title, head)
        self._sections.append(section)
        print("", f"## {title}", "", *head, sep="\n", flush=True)
        return section

    def write(self) -> None:
        """Replace the file: it is never half written, whenever this process ends."""
        lines = [*self._head]
        for section in self._sections:
            lines += section.lines()
        unfinished = self._path.with_name(f".{self._path.name}.unfinished")
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(self._path)


def join(paths: Sequence[Path], report: Path) -> None:
    """Write the sections of several reports into one. Facts that differ from the first one's stand in the section."""
    heads: list[list[str]] = []
    lines: list[str] = []
    for path in paths:
        head, *sections = read_sections(path.read_text())
        heads.append(head)
        facts = [line for line in head if line.startswith("- ") and line not in heads[0]]
        for title, *section in sections:
            lines += [title, *(["", "Here:", "", *facts] if facts else []), *section]
    if any(TITLE in head for head in heads):
        heads[0][0] = TITLE
    report.write_text("\n".join([*heads[0], *lines]) + "\n")


def read_sections(text: str) -> list[list[str]]:
    """Return the lines of the head, and those of each section, which begin with its title."""
    found: list[list[str]] = [[]]
    is_quoted = False
    for line in text.splitlines():
        if line.startswith(_FENCE):
            is_quoted = not is_quoted
        elif line.startswith("## ") and not is_quoted:
            found.append([])
        found[-1].append(line)
    return found


# The parts


@dataclass
class Outcome:
    """How a part ended."""

    is_well: bool
    was_cut: bool


def tests(report: Report, environment: Mapping[str, str], *, limit_s: float, has_gpu: bool) -> Outcome:
    """Report each test of tests/gpu, and of those that failed everything that pytest knows."""
    section = report.begin("tests/gpu", ["| test | outcome | seconds |", "|---|---|---|"])
    chosen = ["-m", "gpu"] if has_gpu else ["--exhaustive"]
    # The versions are those of the machine: their warnings are shown and aren't errors.
    options = ["-q", "--no-header", "--no-summary", "--color=no", "-p", "no:cacheprovider", "-W", "default"]
    # Values that differ aren't cut.
    options += ["-o", "verbosity_assertions=2"]
    command = Command(
        ["-m", "pytest", "tests/gpu", *chosen, *options, "-p", "benchmarks.gpu_events"], environment, limit_s=limit_s
    )
    counts: Counter[str] = Counter()
    running = None
    others: list[str] = []
    for line in command.lines():
        before, found, event = line.partition(EVENT)
        if not found:
            others.append(before)
            print(before, flush=True)
            continue
        told = json.loads(event)
        if "begins" in told:
            running = _short(told["begins"])
            section.note = f"Running: `{running}`"
        else:
            name = _short(told["ends"])
            outcome = told["outcome"]
            text = told["text"]
            running = None
            counts[outcome] += 1
            shown = f"skipped: {_in_a_row(text)}" if outcome == "skipped" else outcome
            section.rows[name] = f"| {name} | {shown} | {told['seconds']:.1f} |"
            print(section.rows[name], flush=True)
            if outcome in ("failed", "error"):
                section.texts[f"{name} {outcome}"] = text
                print(text, flush=True)
        report.write()
    if command.was_cut and running is not None:
        section.rows[running] = f"| {running} | cut | – |"
    ended = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "no test was run"
    where = "after the last test" if running is None else f"during `{running}`"
    cut = f"Cut {where}. " if command.was_cut else ""
    section.note = f"{cut}{ended}, in {command.seconds():.0f} s ({_now()})"
    is_well = bool(counts) and command.status == 0
    if not is_well and not command.was_cut and not section.texts:
        section.texts["pytest"] = "\n".join(others)
    _finish(report, section)
    return Outcome(is_well, command.was_cut)


def benchmarks(report: Report, environment: Mapping[str, str], *, limit_s: float, has_gpu: bool) -> Outcome:
    """Report each row as soon as there is one. What isn't measured stays in the table as missing."""
    section = report.begin("benchmarks.on_gpu", HEAD)
    section.note = "ours ÷ theirs in interleaved runs, medians and ranges"
    if not has_gpu:
        section.note = "a few steps on the CPU, to try the code: these figures mean nothing"
    seconds = str(round(max(1.0, limit_s - _END_S)))
    arguments = ["-m", "benchmarks.on_gpu", "--seconds", seconds, "--device", "cuda" if has_gpu else "cpu"]
    command = Command(arguments, environment, limit_s=limit_s)
    missing: set[str] = set()
    others: list[str] = []
    for line in command.lines():
        print(line, flush=True)
        _, planned, claim = line.partition(PLANNED)
        if planned:
            missing.add(claim)
            section.rows[claim] = f"| on_gpu | {claim} | missing | missing | – | – | – |"
        elif line.startswith("| on_gpu |"):
            claim = line.split(" | ")[1]
            missing.discard(claim)
            section.rows[claim] = line
        elif line not in HEAD:
            others.append(line)
        report.write()
    has_failed = command.status != 0 or not section.rows
    if command.was_cut or missing:
        section.note = f"Cut: {len(missing)} of {len(section.rows)} rows are missing. {section.note}"
    section.note += f"; {command.seconds():.0f} s ({_now()})"
    if has_failed:
        section.texts["What the contestants said"] = "\n".join(others)
    _finish(report, section)
    return Outcome(not has_failed, command.was_cut)


def _finish(report: Report, section: Section) -> None:
    report.write()
    print("", section.note, sep="\n", flush=True)


class Command:
    """A Python command, whose output is read line by line until it ends, or is cut after `limit_s` or by a signal.

    Its attributes was_cut and status are known once `lines` has ended.
    """

    # A signal to this process has asked for it.
    is_asked_to_end = False

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], *, limit_s: float) -> None:
        self.was_cut = False
        self.status: int | None = None
        self._began = time.monotonic()
        self._ends = self._began + limit_s - _END_S
        self._mark = secrets.token_hex(8)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**environment, _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def seconds(self) -> float:
        return time.monotonic() - self._began

    def lines(self) -> Iterator[str]:
        """Yield what the command prints."""
        read: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(read,), daemon=True).start()
        last_line_at = None
        while True:
            if not self.was_cut and (Command.is_asked_to_end or time.monotonic() > self._ends):
                self.was_cut = True
                self._kill()
            try:
                line = read.get(timeout=0.1)
            except queue.Empty:
                # A process that has outlived the command may keep its output open.
                if self._process.poll() is not None:
                    last_line_at = last_line_at or time.monotonic()
                    if time.monotonic() - last_line_at > _END_S:
                        break
                continue
            if line is None:
                break
            yield line.rstrip("\n")
        self.status = self._process.wait()

    def _read(self, read: queue.Queue[str | None]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                read.put(line)
        read.put(None)

    def _kill(self) -> None:
        """Kill the command and all that it has started, in whatever session: nothing may occupy the GPU."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        wanted = f"{_MARK}={self._mark}".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            # It may have ended, or be another user's.
            with suppress(OSError):
                if wanted in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)


# The machine


def install_missing(wheels: Path | None, site: Path) -> list[str]:
    """Install the wheels of packages that are missing or too old into `site`, without a network; return their names."""
    files = [] if wheels is None else sorted(wheels.glob("*.whl"))
    if not files:
        return []
    # Imported here, because it needs pip.
    from benchmarks.gpu_wheels import is_satisfied, read_requirements

    requirements = read_requirements()
    missing = [file for file in files if not is_satisfied(_name(file), _installed(_name(file)), requirements)]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, *options, *map(str, missing)], check=True)
    return ["-".join(file.name.split("-")[:2]) for file in missing]


def read_facts(environment: Mapping[str, str]) -> dict[str, object] | None:
    """Return what the report says of the machine; None, with a message, if it has no torch."""
    command = [sys.executable, "-c", _FACTS]
    read = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if read.returncode != 0:
        print(f"{sys.executable} can't import torch:\n{read.stderr}", file=sys.stderr)
        return None
    facts: dict[str, object] = json.loads(read.stdout)
    return facts


def head(facts: Mapping[str, object], installed: Sequence[str]) -> list[str]:
    """Return the lines above the first section."""
    lines = [TITLE if facts["GPUs"] else NO_GPU, ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    return [*lines, f"- from wheels: {', '.join(installed) or 'nothing'}"]


def main() -> int:
    asked = _arguments()
    if asked.join:
        join(asked.join, asked.report)
        print(f"{asked.report} has the sections of {' and '.join(map(str, asked.join))}")
        return 0
    seconds = asked.seconds or SECONDS * len(asked.only)
    ends = time.monotonic() + seconds
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ask_to_end)
    has_failed = False
    was_cut = False
    with tempfile.TemporaryDirectory(prefix="prove_gpu_") as site:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "240"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), site, os.environ.get("PYTHONPATH")]))
        installed = install_missing(asked.wheels, Path(site))
        facts = read_facts(environment)
        if facts is None:
            return EXIT_NO_TORCH
        report = Report(asked.report, head(facts, installed))
        for part in asked.only:
            limit_s = ends - time.monotonic()
            has_gpu = facts["GPUs"] != 0
            if part == "tests":
                share = _SHARE_OF_TESTS if len(asked.only) > 1 else 1.0
                outcome = tests(report, environment, limit_s=limit_s * share, has_gpu=has_gpu)
            else:
                outcome = benchmarks(report, environment, limit_s=limit_s, has_gpu=has_gpu)
            has_failed |= not outcome.is_well
            was_cut |= outcome.was_cut
            if Command.is_asked_to_end:
                break
    if was_cut:
        return EXIT_CUT
    return EXIT_FAILED if has_failed else 0


def _ask_to_end(*_: object) -> None:
    Command.is_asked_to_end = True


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _name(wheel: Path) -> str:
    return wheel.name.partition("-")[0]


def _short(nodeid: str) -> str:
    return nodeid.removeprefix("tests/gpu/")


def _in_a_row(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prove_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=None, help="a folder made by make gpu-wheels")
    parser.add_argument(
        "--seconds", type=float, default=None, help=f"for all of it; by default {SECONDS:g} for each part"
    )
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="reports to write into one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
