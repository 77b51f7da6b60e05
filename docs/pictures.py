"""The pictures of TensorBoard and of reports in README and docs, taken from real runs: `make pictures`.

In headless Chromium: three runs of the default recipe with different learning rates in TensorBoard's time series and
its "Custom Scalars", and the upper part of their report; the upper part of the report of the run of docs/debugging.md
and its branch. The runs are removed afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers import tensorboard
from tests.helpers.browser import NAMES, Page, find_chromium, opened_page
from tests.helpers.documents import write_shown_files

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
LEARNING_RATES = ("0.02", "0.1", "0.004")  # the first is the recipe's own
TAGS = ("train/loss", "val/accuracy", "train/lr")

_WIDTH = 1400
_HEIGHT = 500
_CHARTS_HEIGHT = 1080
_REPORT_HEIGHT = 1000
_SPIKE_HEIGHT = 850
_PAGE_S = 30.0

# Whole curves, no table below each chart, no pane of settings beside them: more room for what is to be seen.
_MAKE_ROOM = """
for (const box of document.querySelectorAll("mat-checkbox"))
  if (/^(Enable step selection|Ignore outliers)/.test(box.innerText.trim())) box.querySelector("input").click();
document.querySelector('[aria-label="Toggle settings side pane"]').click();
"""
_ALL_DRAWN = f"""
[...document.querySelectorAll("metrics-pinned-view scalar-card")].filter(
  card => card.querySelectorAll("tb-data-table-content-row").length === {len(LEARNING_RATES)}
).length === {len(TAGS)}
"""


def main() -> None:
    browser = find_chromium()
    if browser is None:
        sys.exit(f"No browser found ({', '.join(NAMES)}). On Debian and Ubuntu: sudo apt install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rate in LEARNING_RATES:
            framework(f"optimizer.lr={rate}", cwd=folder)
        with tensorboard.served(folder, num_runs=len(LEARNING_RATES)) as address:
            (PICTURES / "tensorboard.png").write_bytes(time_series(address, browser=browser))
            (PICTURES / "custom_scalars.png").write_bytes(custom_scalars(address, browser=browser))
        picture = report(folder / "outputs/digits", browser=browser, height=_REPORT_HEIGHT)
        (PICTURES / "report.png").write_bytes(picture)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shown_files(folder, pages=[DOCS / "debugging.md"])
        framework("recipe=readings", "trainer.log_every_n_steps=1", cwd=folder)
        (run,) = folder.glob("outputs/readings/*")
        framework("job=branch", f"run={run}", "step=36", "skip=[37]", cwd=folder)
        picture = report(folder / "outputs/readings", browser=browser, height=_SPIKE_HEIGHT)
        (PICTURES / "spike.png").write_bytes(picture)


def framework(*arguments: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", "framework", *arguments], cwd=cwd, check=True)


def report(runs: Path, *, browser: str, height: int) -> bytes:
    """A PNG of the upper part of the report of these runs."""
    framework("job=report", f"runs={runs}", "report.output=report.html", cwd=runs)
    url = (runs / "report.html").as_uri()
    with opened_page(url, program=browser, width=_WIDTH, height=height) as page:
        return when_still(page, height=height)


def time_series(address: str, *, browser: str) -> bytes:
    """A PNG of the page with the charts of TAGS at the top, beside each other."""
    url = tensorboard.time_series(address, pinnedCards=tensorboard.pinned(*TAGS), smoothing="0")
    # Charts are drawn once they are in sight: three rows of them are, as long as the settings take their room.
    with opened_page(url, program=browser, width=_WIDTH, height=3 * _HEIGHT) as page:
        page.wait_for(_ALL_DRAWN, timeout=_PAGE_S)
        page.evaluate(_MAKE_ROOM)
        return when_still(page, height=_HEIGHT)


def custom_scalars(address: str, *, browser: str) -> bytes:
    """A PNG of the page with the charts that the logger has laid out."""
    url = tensorboard.dashboard(address, "custom_scalars")
    with opened_page(url, program=browser, width=_WIDTH, height=_CHARTS_HEIGHT) as page:
        page.wait_for(f"{tensorboard.WORDS_OF_PAGE.strip()}.includes('Matches')", timeout=_PAGE_S)
        return when_still(page, height=_CHARTS_HEIGHT)


def when_still(page: Page, *, height: int) -> bytes:
    """The page's upper part once it has looked the same for a second: nothing on it says that a chart is drawn."""
    deadline = time.monotonic() + _PAGE_S
    picture = page.screenshot(height=height)
    since = time.monotonic()
    while time.monotonic() - since < 1.0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page still changes after {_PAGE_S} s")
        if (newer := page.screenshot(height=height)) != picture:
            picture = newer
            since = time.monotonic()
    return picture


if __name__ == "__main__":
    main()
