"""What someone sees who opens a report: on a phone and a desktop, by day and by night, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.browser import Page, need_chromium, opened_page
from tests.helpers.internals import compose

SHOWN_S = 15.0
IN_SIGHT = "document.readyState === 'complete' && document.querySelectorAll('figure svg').length > 0"
PLACE = """
(() => {
  const box = document.querySelector('figure svg').getBoundingClientRect();
  return [box.left + box.width / 2, box.top + box.height / 2];
})()
"""


def dark(page: Page, *, is_dark: bool) -> str:
    """The page's background with that preference."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    page.ask("Emulation.setEmulatedMedia", features=[scheme])
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.usefixtures("own_state")
def test_a_report_fits_a_phone_and_a_desktop(train, tmp_path: Path) -> None:
    program = need_chromium()
    short = ("recipe=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=20", "trainer.log_every_n_steps=5")
    runs = [train(*short, f"optimizer.lr={rate}") for rate in (0.05, 0.01)]
    (runs[0] / "media").mkdir(exist_ok=True)
    (runs[0] / "media" / "wide_1.csv").write_text(",".join(f"column_{i}" for i in range(60)) + "\n")
    (runs[0] / "media" / "long_1.csv").write_text("x" * 2000 + "\n")
    output = tmp_path / "report.html"
    assert compose.main(["job=report", "runs=outputs/digits", f"report.output={output}"]) == 0
    for width in (390, 1280):
        with opened_page(output.as_uri(), program=program, width=width, height=900) as page:
            page.wait_for(IN_SIGHT, timeout=SHOWN_S)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("performance.getEntriesByType('resource').length") == 0
            assert page.evaluate("document.querySelector('figure svg').getBoundingClientRect().width") > 250
            assert dark(page, is_dark=True) != dark(page, is_dark=False)
            page.evaluate("document.querySelector('figure').scrollIntoView()")
            x, y = page.evaluate(PLACE)
            page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            shown = page.wait_for("document.querySelector('figure output').innerText", timeout=SHOWN_S)
            assert shown.startswith("step ")
            assert page.evaluate("document.querySelectorAll('figure:first-of-type output span').length") >= len(runs)
