"""Links of the Markdown lead somewhere, as GitHub shows the pages; messages and docstrings name pages that exist."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers.documents import MARKDOWN, links
from tests.helpers.source import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings: small letters, no punctuation, numbered where one repeats."""
    parsed = MARKDOWN.parse(text)
    headings = [parsed[i + 1] for i, token in enumerate(parsed) if token.type == "heading_open"]
    seen: Counter[str] = Counter()
    names = set()
    for heading in headings:
        parts = [part.content for part in heading.children or () if part.type in ("text", "code_inline")]
        name = re.sub(r"[^\w\- ]", "", "".join(parts).lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text())


def mistake(link: str, page: Path) -> str | None:
    """What is wrong with a link of a page."""
    address = urlsplit(link)
    if address.scheme:
        is_web = address.scheme == "https" and "." in address.netloc and not re.search(r"\s", link)
        return None if is_web else "not the form of a web address"
    target = page
    if address.path:
        target = (page.parent / unquote(address.path)).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return "no such file"
    if address.fragment and address.fragment not in anchors_of(target):
        return f"no such heading; there are {sorted(anchors_of(target))}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    mistakes = {link: mistake(link, page) for link in links(page.read_text())}
    assert {link: why for link, why in mistakes.items() if why} == {}


def test_wrong_links_are_seen(tmp_path: Path) -> None:
    page = ROOT / "docs" / "page.md"
    text = "[a](absent.md) ![b](pictures/no.png) [c](../README.md#no-heading) [d](http://x) [e][1]\n\n[1]: gone.md\n"
    assert [bool(mistake(link, page)) for link in links(text)] == [True] * 5
    assert mistake("../README.md#why-switch", page) is None
    assert anchors("# A `b_c`: d!\n\n## Twice\n\n## Twice\n") == {"a-b_c-d", "twice", "twice-1"}


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.partition("\n## Documentation\n")[2].partition("\n## ")[0]
    linked = {ROOT / link for link in links(section)}
    assert [str(page) for page in PAGES if page not in {*linked, ROOT / "README.md"}] == []


def test_code_names_pages_that_exist() -> None:
    files = [file for folder in ("framework", "conf", "recipes", "examples") for file in (ROOT / folder).rglob("*.*")]
    named = []
    for file in files:
        if file.suffix in (".py", ".yaml"):
            named += [
                (file.name, *match) for match in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", file.read_text())
            ]
    assert len(named) > 5
    absent = [(file, page) for file, page, _ in named if not (ROOT / page).exists()]
    assert absent == []
    assert [(file, page, name) for file, page, name in named if name and name not in anchors_of(ROOT / page)] == []
