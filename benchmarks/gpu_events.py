"""A plugin of pytest for `benchmarks.prove_gpu`: a line of JSON when a test begins, and one with its outcome.

    {"begins": "tests/gpu/test_failures.py::test_out_of_memory[gpu]"}
    {"ends": "tests/gpu/…", "outcome": "failed", "seconds": 3.2, "text": "the whole traceback, what was captured"}

Of a file that can't be imported there is only the second line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

# `prove_gpu` imports the prefix on a machine that may not have pytest.
if TYPE_CHECKING:
    import pytest

PREFIX = "prove_gpu event: "

# The worst outcome of its phases is a test's outcome.
_FROM_BEST_TO_WORST = ("passed", "skipped", "failed", "error")

# The reports on the phases of the test that is running.
_reports: list[pytest.TestReport] = []


def pytest_runtest_logstart(nodeid: str) -> None:
    _reports.clear()
    _tell(begins=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    outcomes = [_outcome(report) for report in _reports]
    outcome = max(outcomes, key=_FROM_BEST_TO_WORST.index, default="error")
    texts = [_text(report) for report in _reports if not report.passed]
    seconds = sum(report.duration for report in _reports)
    _tell(ends=nodeid, outcome=outcome, seconds=seconds, text="\n".join(texts))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(ends=report.nodeid, outcome="error", seconds=0.0, text=report.longreprtext)


def pytest_internalerror(excrepr: object) -> None:
    _tell(ends="pytest", outcome="error", seconds=0.0, text=str(excrepr))


def _outcome(report: pytest.TestReport) -> str:
    if report.failed and report.when != "call":
        return "error"
    return report.outcome


def _text(report: pytest.TestReport) -> str:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return reason.removeprefix("Skipped: ")
    sections = [f"--- {name}\n{content}" for name, content in report.sections]
    return "\n".join([report.longreprtext, *sections])


def _tell(**event: Any) -> None:
    # Between tests nothing is captured. Dots of pytest may stand before it.
    print(f"{PREFIX}{json.dumps(event)}", flush=True)
