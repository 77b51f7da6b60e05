"""TensorBoard as a user starts it, and the addresses of its page."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.command import started_python

_START_S = 30.0
_POLL_S = 0.1


@contextmanager
def served(folder: Path, *, num_runs: int) -> Iterator[str]:
    """`tensorboard --logdir outputs` in this folder, on a port of its own choice; gives the address of its page.

    Fails unless it has found that many runs soon: the page itself asks for them only once in a while.
    """
    arguments = ("--logdir", "outputs", "--host", "127.0.0.1", "--port", "0")
    with started_python("-m", "tensorboard.main", *arguments, cwd=folder) as started:
        started.wait_for_output("Press CTRL+C", timeout=_START_S)
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", started.printed())
        deadline = time.monotonic() + _START_S
        while len(found := _runs(address)) != num_runs:
            assert time.monotonic() < deadline, f"{num_runs} runs wanted, found {found}\n{started.printed()}"
            time.sleep(_POLL_S)
        yield address


def time_series(address: str, **settings: str) -> str:
    """The dashboard with all charts. settings: what the page keeps in its address, such as smoothing, tagFilter."""
    return f"{address}?{urllib.parse.urlencode(settings)}#timeseries"


def dashboard(address: str, name: str) -> str:
    """Another page: custom_scalars, hparams, graphs, histograms."""
    return f"{address}#{name}"


WORDS_OF_PAGE = """
(() => {
  const words = node => node.nodeType === Node.TEXT_NODE
    ? node.textContent.trim().split(/\\s+/)
    : ["STYLE", "SCRIPT"].includes(node.nodeName) ? []
    : [...node.shadowRoot?.childNodes ?? [], ...node.childNodes].flatMap(words);
  return document.body ? words(document.body).filter(Boolean) : [];
})()
"""
"""A script that gives all words of such a page, whose parts are in shadow roots."""


def pinned(*tags: str) -> str:
    """The setting `pinnedCards`: these charts at the top of the page, in this order."""
    return json.dumps([{"plugin": "scalars", "tag": tag} for tag in tags])


def _runs(address: str) -> list[str]:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{address}data/runs", timeout=10) as answer:
        return list(json.load(answer))
