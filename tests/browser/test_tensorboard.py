"""What a user sees who opens TensorBoard beside two runs: their curves, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers import results, tensorboard
from tests.helpers.browser import Page, need_chromium, opened_page

CHARTS = ("train/loss", "val/loss", "val/accuracy", "train/lr")
SHORT = (
    "recipe=digits",
    "scheduler=none",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=30",
    "trainer.log_every_n_steps=5",
    # The page hides outliers; with few points that is almost all of them.
    "trainer.val_check_interval=5",
    "trainer.limit_test_batches=0",
)
LEARNING_RATES = (0.05, 0.01)
SHOWN_S = 15.0
"""How long the page may take for a chart: its data are fetched and drawn once it is in sight."""
# The table shows four digits after the decimal point.
ROUNDED = 5.1e-5
WORDS = {
    "custom_scalars": ["validation", "learning rate", "gradient norm", "samples per second", "shares of a step"],
    # The key that differs comes first.
    "hparams": ["Hyperparameters *optimizer.lr ", "val/accuracy/best", "0.050000", "0.010000"],
}
"""What is on two other pages."""
LISTED_RUNS = """
[...document.querySelectorAll("runs-data-table tb-data-table-content-row .table-column-run")]
  .map(cell => cell.innerText.trim()).sort()
"""
CHART = """
(tag => {
  const card = document.querySelector(`scalar-card [title="${tag}"]`)?.closest("scalar-card");
  card?.scrollIntoView();
  const rows = [...card?.querySelectorAll("tb-data-table-content-row") ?? []];
  if (!card?.querySelector(".series-view canvas") || rows.length < %d) return null;
  return rows.map(row => {
    const [, run, value, step] = [...row.querySelectorAll("tb-data-table-content-cell")].map(cell => cell.innerText);
    return {run: run.trim(), value: Number(value), step: Number(step)};
  });
})(%s)
"""
"""A chart's lines as the table below it shows them: each run's last value."""


def shown_lines(page: Page, tag: str) -> list[dict[str, Any]]:
    script = CHART % (len(LEARNING_RATES), json.dumps(tag))
    return sorted(page.wait_for(script, timeout=SHOWN_S), key=lambda line: line["run"])


def find_words(address: str, name: str, *, program: str) -> None:
    with opened_page(tensorboard.dashboard(address, name), program=program, width=1400, height=2000) as page:
        found = f"({tensorboard.WORDS_OF_PAGE.strip()}).join(' ')"
        missing = f"{json.dumps(WORDS[name])}.filter(words => !({found}).includes(words))"
        page.wait_for(f"{missing}.length === 0", timeout=SHOWN_S)


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.usefixtures("own_state")
def test_tensorboard_shows_the_curves_of_two_runs(train, tmp_path):
    program = need_chromium()
    runs = {}
    for rate in LEARNING_RATES:
        run_dir = train(*SHORT, f"optimizer.lr={rate}")
        runs[str(run_dir.relative_to(tmp_path / "outputs"))] = run_dir
    with tensorboard.served(tmp_path, num_runs=len(runs)) as address:
        url = tensorboard.time_series(address, tagFilter="loss|accuracy|lr", smoothing="0")
        with opened_page(url, program=program, width=1400, height=900) as page:
            page.wait_for(f"{LISTED_RUNS.strip()}.length >= {len(runs)}", timeout=SHOWN_S)
            assert page.evaluate(LISTED_RUNS) == sorted(runs)
            charts = {tag: shown_lines(page, tag) for tag in CHARTS}
        for name in WORDS:
            find_words(address, name, program=program)
    for tag, lines in charts.items():
        curves = {run: results.curve(run_dir, tag) for run, run_dir in sorted(runs.items())}
        last_steps = [(run, max(curve)) for run, curve in curves.items()]
        assert [(line["run"], line["step"]) for line in lines] == last_steps
        last = [curve[max(curve)] for curve in curves.values()]
        assert [line["value"] for line in lines] == pytest.approx(last, abs=ROUNDED), tag
