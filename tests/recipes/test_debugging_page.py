"""The page from a spike to its cause: its commands, run in their order, find what it says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.documents import commands, write_shown_files
from tests.helpers.internals import compose
from tests.helpers.source import ROOT

PAGE = ROOT / "docs/debugging.md"
STEP = 37
SAMPLE = 589
"""The machine whose sensor is broken, and the step that trains it."""


def answer(folder: Path, job: str) -> dict[str, Any]:
    """Return the newest answer of job=why or job=replay."""
    file = max(folder.glob(f"outputs/readings/{job}/*/{job}.json"))
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.fixture
def run(fork_server, tmp_path, monkeypatch) -> Callable[..., Path]:
    """Run the page's next command with these runs in place of RUN; return the run that it made, else the folder."""
    write_shown_files(tmp_path, pages=[PAGE])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [command.arguments for command in commands(PAGE.read_text(), place=PAGE.name)]

    def run_next(job: str, *runs: Path, status: int = 0) -> Path:
        arguments = lines.pop(0)
        named = next((text.removeprefix("job=") for text in arguments if text.startswith("job=")), "train")
        assert named == job
        text = "\n".join(arguments)
        for path in runs:
            text = text.replace("outputs/readings/RUN", str(path.relative_to(tmp_path)), 1)
        before = set(tmp_path.glob("outputs/readings/*/run.json"))
        assert compose.main(["trainer.gpus=0", *text.split("\n")], fork_server=fork_server) == status
        made = set(tmp_path.glob("outputs/readings/*/run.json")) - before
        return made.pop().parent if made else tmp_path

    return run_next


def assert_cause(folder: Path) -> None:
    fault = answer(folder, "why")["fault"]
    assert (fault["step"], fault["cause"]) == (STEP, "sample")
    assert [sample["index"] for sample in fault["samples"]] == [SAMPLE]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_state")
def test_the_page_leads_from_a_spike_to_a_run_without_it(run, tmp_path, monkeypatch, capfd):
    spiky = run("train")
    curve = results.curve(spiky, "train/loss")
    assert curve[40] > 10 * max(curve[30], curve[35])

    run("why", spiky)
    assert_cause(tmp_path)
    run("replay", spiky)
    content = answer(tmp_path, "replay")
    assert SAMPLE in content["steps"][0]["micro_batches"][0]["indices"]
    assert content["check"]["same_place"]

    # As a reader who puts a breakpoint into the model.
    file = tmp_path / "recipes/readings.py"
    text = file.read_text()
    line = "        if sensors.max() > 50: breakpoint()\n"
    assert line.strip() in PAGE.read_text()
    file.write_text(text.replace("        return", f"{line}        return", 1))
    monkeypatch.delitem(sys.modules, "recipes.readings", raising=False)
    largest: list[float] = []
    # The frame of the forward is the one that calls the hook.
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: largest.append(sys._getframe(1).f_locals["sensors"].max().item())
    )
    run("replay", spiky)
    assert largest == [100.0]
    file.write_text(text)
    monkeypatch.delitem(sys.modules, "recipes.readings", raising=False)

    branch = run("branch", spiky)
    assert results.run_file(branch)["branch_of"]["step"] == STEP - 1
    assert max(results.curve(branch, "train/loss").values()) < 0.1 < curve[48]
    capfd.readouterr()
    run("compare", spiky, branch)
    assert re.search(rf"branch of .*1 after step {STEP - 1}", capfd.readouterr().out)

    guarded = run("train")
    (spike,) = results.run_file(guarded)["spikes"]
    assert spike["step"] == STEP
    assert SAMPLE in spike["samples"]
    assert results.curve(guarded, "train/loss")[48] < 0.1

    failed = run("train", status=1)
    assert f"nan_guard: step {STEP}, " in results.failure(failed)["cause"]
    run("why", failed)
    assert_cause(tmp_path)
    rescued = run("branch", failed)
    assert results.run_file(rescued)["branch_of"]["step"] == STEP - 1
    # Its epoch has 48.
    assert results.results(rescued)["steps"] == 47
