"""The documentation's site: complete without a network, and usable on a phone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import framework
from tests.helpers.browser import Page, need_chromium, opened_page
from tests.helpers.internals import known_keys
from tests.helpers.source import ROOT

# Building takes 15 s of CPU time; it is waited for longer on a busy machine.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]

SHOWN_S = 15.0
NOTE_ERRORS = """
window.noted = [];
addEventListener('error', event => noted.push(event.message || event.target.src), true);
addEventListener('unhandledrejection', event => noted.push(String(event.reason)));
for (const kind of ['error', 'warn']) {
  const print = console[kind];
  console[kind] = (...words) => { noted.push(words.join(' ')); print(...words); };
}
"""
# Elements that reach beyond the window, outside of boxes that scroll by themselves.
CUT_OFF = """
[...document.querySelectorAll('article *')].filter(element => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let box = element; box.tagName !== 'ARTICLE'; box = box.parentElement) {
    const overflow = getComputedStyle(box).overflowX;
    if (overflow === 'auto' || overflow === 'scroll') return false;
  }
  return true;
}).map(element => element.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; without a network, where that can be taken away."""
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    command = [*sphinx, "-d", str(folder / "doctrees"), "-c", "docs/site", ".", str(folder / "html")]
    apart = ["unshare", "--net"]
    if os.geteuid() == 0 and shutil.which("unshare") and subprocess.run([*apart, "true"]).returncode == 0:
        command = [*apart, *command]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


class Html(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(page.read_text())

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loaded.append(values["href"])
        self.loaded += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]
        if "url(" in values.get("style", ""):
            self.loaded.append(values["style"])


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = {page: Html(page) for page in site.rglob("*.html") if "_static" not in page.parts}
    assert len(pages) > 35
    broken = []
    for page, html in pages.items():
        for link in [*html.links, *html.loaded]:
            address = urlsplit(link)
            if address.scheme == "https" and link in html.links:
                continue
            target = (page.parent / unquote(address.path)).resolve() if address.path else page
            is_there = not address.scheme and target.is_file()
            if is_there and address.fragment:
                is_there = unquote(address.fragment) in pages[target].anchors
            if not is_there:
                broken.append((page.name, link))
    assert broken == []


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert [link for link in Html(page).loaded if urlsplit(link).netloc] == [], page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text().replace(" ", "")
        assert "@import" not in text, sheet
        assert not any(start in text for start in ("url(http", "url(//", "url('http", 'url("http')), sheet


def test_the_references_have_all_keys_and_names(site: Path) -> None:
    keys = Html(site / "docs/keys.html").anchors
    sections = {key.rpartition(".")[0] for key in known_keys()}
    assert {f"confval-{key}" for key in known_keys() if key not in sections} <= keys
    names = Html(site / "docs/api.html").anchors
    assert {f"framework.{name}" for name in framework.__all__ if name not in ("samplers", "transforms")} <= names
    assert {"framework.samplers.BalancedSampler", "framework.Callback.on_fit_start", "framework.StepInfo.loss"} <= names
    text = " ".join(Html(site / "docs/api.html").text.split())
    assert "step: int Optimizer steps done, this one included." in text.replace("¶", "")
    assert "The datasets that are there: train, val, test; val/NAME for one of several." in text
    assert "Returns: The run, finished or stopped on request." in text
    # What stands before a colon in `Returns:` would be taken for a type, which signatures have already.
    assert "Return type:" not in text


def opened(page: Page, address: str) -> None:
    page.ask("Page.navigate", url=address)
    page.wait_for(f"location.href === {address!r} && document.readyState === 'complete'", timeout=SHOWN_S)


def test_a_phone_searches_and_reads_by_night(site: Path) -> None:
    program = need_chromium()
    with opened_page("about:blank", program=program, width=390, height=844) as page:
        page.ask("Page.enable")
        page.ask("Page.addScriptToEvaluateOnNewDocument", source=NOTE_ERRORS)

        for file in sorted(site.rglob("*.html")):
            if file.name == "index.html" or "_static" in file.parts:
                continue
            opened(page, file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, file
            assert page.evaluate(CUT_OFF) == [], file
            assert page.evaluate("noted") == [], file
            resources = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
            assert [name for name in resources if not name.startswith("file://")] == [], file

        page.ask("Page.navigate", url=(site / "index.html").as_uri())
        page.wait_for(
            "location.pathname.endsWith('README.html') && document.readyState === 'complete'", timeout=SHOWN_S
        )
        page.evaluate("document.querySelector('.sidebar-search').value = 'accumulate_grad_batches'")
        page.evaluate("document.querySelector('.sidebar-search-container').submit()")
        first = "document.querySelector('#search-results li a')"
        assert "accumulate_grad_batches" in page.wait_for(f"{first}?.innerText", timeout=SHOWN_S)
        assert page.evaluate("noted") == []
        page.evaluate(f"{first}.click()")
        page.wait_for(
            "location.pathname.endsWith('docs/keys.html') && document.readyState === 'complete'", timeout=SHOWN_S
        )

        background = "getComputedStyle(document.body).backgroundColor"
        seen = set()
        for _ in range(3):
            seen.add(page.evaluate(f"document.body.dataset.theme + ' ' + {background}"))
            page.evaluate("document.querySelector('.theme-toggle').click()")
        assert {theme.split()[0] for theme in seen} == {"auto", "light", "dark"}
        assert len({theme.partition(" ")[2] for theme in seen}) == 2
        assert page.evaluate("noted") == []
