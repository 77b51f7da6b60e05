"""Run tests/gpu, then benchmarks.on_gpu, and write the outcome to benchmarks/GPU.md.

    python -m benchmarks.prove_gpu [--wheels FOLDER] [--seconds 540] [--report FILE] [--only tests,benchmarks]

Needs Python and torch, no network and no installation: packages that are missing come from a folder of wheels (`make
gpu-wheels`), into a folder that is removed at the end. The report is written line by line, so that an interrupted run
keeps what it has. Without a GPU the tests are skipped with the reason, and their stand-ins run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from benchmarks.arguments import some_of
from benchmarks.record import HEAD

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "GPU.md"
SECONDS = 540.0
PARTS = ("tests", "benchmarks")
_SHARES = {"tests": 0.62, "benchmarks": 1.0}  # of the seconds that are left
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
_OUTCOME = re.compile(r"(tests/gpu/\S+?::.+?) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?(?: +\[ *\d+%\])?")
_END_TIMEOUT_S = 15.0
_SHOWN_OF_FAILURES = 20_000  # characters


class Report:
    """A Markdown file that is complete after each line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.write_text("")

    def add(self, *lines: str) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        print(*lines, sep="\n", flush=True)


def main() -> int:
    """Exit status 1 where a test or a contestant failed, 2 where torch is missing."""
    asked = _arguments()
    ends = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory(prefix="prove_gpu_") as site:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "240"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), site, os.environ.get("PYTHONPATH")]))
        installed = install_missing(asked.wheels, Path(site))
        read = subprocess.run(
            [sys.executable, "-c", _FACTS], env=environment, capture_output=True, text=True, check=False
        )
        if read.returncode != 0:
            print(f"{sys.executable} can't import torch:\n{read.stderr}", file=sys.stderr)
            return 2
        facts = json.loads(read.stdout)
        report = Report(asked.report)
        report.add(*head(facts, installed))
        failed = False
        for part in asked.only:
            limit_s = (ends - time.monotonic()) * (_SHARES[part] if len(asked.only) > 1 and facts["GPUs"] else 0.95)
            if part == "tests":
                failed |= not tests(report, environment, limit_s=limit_s, has_gpu=facts["GPUs"] > 0)
            else:
                failed |= not benchmarks(report, environment, limit_s=limit_s)
    return int(failed)


def install_missing(wheels: Path | None, site: Path) -> list[str]:
    """Install the wheels of packages that are missing into `site`, without a network; return their names."""
    files = [] if wheels is None else sorted(wheels.glob("*.whl"))
    missing = [file for file in files if not _is_installed(file.name.partition("-")[0])]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, *options, *map(str, missing)], check=True)
    return ["-".join(file.name.split("-")[:2]) for file in missing]


def head(facts: Mapping[str, object], installed: list[str]) -> list[str]:
    """Return the lines above the first test."""
    title = "What was run on a GPU" if facts["GPUs"] else "No GPU was there: nothing below was run on one"
    lines = [f"# {title}", ""]
    lines += [f"`make gpu`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    return [*lines, f"- from wheels: {', '.join(installed) or 'nothing'}"]


def tests(report: Report, environment: Mapping[str, str], *, limit_s: float, has_gpu: bool) -> bool:
    """Report each test of tests/gpu, then pytest's output on failures; return whether all passed."""
    report.add("", "## tests/gpu", "", "| test | outcome | seconds |", "|---|---|---|")
    chosen = ["-m", "gpu"] if has_gpu else ["--exhaustive"]
    # The versions are those of the machine: their warnings are shown and aren't errors.
    options = ["-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-W", "default"]
    command = ["-m", "pytest", "tests/gpu", *chosen, *options]
    counts: dict[str, int] = {}
    failures: list[str] = []
    is_after = False
    began = first = time.monotonic()
    for line in _lines([sys.executable, *command], environment, limit_s=limit_s):
        outcome = _OUTCOME.fullmatch(line.rstrip())
        if outcome is not None:
            name, result, reason = outcome.groups()
            now = time.monotonic()
            shown = result.lower() if reason is None else f"{result.lower()}: {reason}"
            report.add(f"| {name.removeprefix('tests/gpu/')} | {shown} | {now - began:.1f} |")
            counts[result] = counts.get(result, 0) + 1
            began = now
        heading = re.fullmatch(r"=+ (.+) =+", line)
        if heading is not None:
            is_after = heading[1] in ("ERRORS", "FAILURES", "short test summary info")
        if is_after or (not counts and "rror" in line):
            failures.append(line)
    summary = ", ".join(f"{number} {result.lower()}" for result, number in counts.items()) or "no test was run"
    cut = "; interrupted there, during the next test" if time.monotonic() - first > limit_s - _END_TIMEOUT_S else ""
    report.add("", f"{summary}, in at most {limit_s:.0f} s{cut}")
    if failures:
        report.add("", "```text", "\n".join(failures)[:_SHOWN_OF_FAILURES], "```")
    return bool(counts) and not failures and not counts.keys() & {"FAILED", "ERROR"}


def benchmarks(report: Report, environment: Mapping[str, str], *, limit_s: float) -> bool:
    """Report each ratio; return whether all contestants finished."""
    report.add("", "## benchmarks.on_gpu", "", "ours ÷ theirs in interleaved runs, medians and ranges", "")
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--seconds", f"{limit_s:.0f}"]
    rows: list[str] = []
    others: list[str] = []
    for line in _lines(command, environment, limit_s=limit_s):
        if line.startswith("|"):
            report.add(line)
            rows.append(line)
        else:
            print(line, flush=True)
            others = [*others[-40:], line]
    is_well = len(rows) > len(HEAD) and not any("| failed |" in row for row in rows)
    if not is_well:
        report.add("", "```text", *others, "```")
    return is_well


def _lines(command: list[str], environment: Mapping[str, str], *, limit_s: float) -> Iterator[str]:
    """Yield what a command prints, line by line. After `limit_s` it is interrupted as by Ctrl-C, then killed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def end() -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
                return

    watchdog = threading.Timer(max(1.0, limit_s - _END_TIMEOUT_S), end)
    watchdog.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
        process.wait()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            end()
        process.stdout.close()


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prove_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, default=None, help="a folder made by make gpu-wheels")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--only", type=some_of(PARTS), default=list(PARTS), help=f"some of {','.join(PARTS)}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
