"""Running `python -m MODULE` where the libraries that it imports are loaded already."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.helpers.internals import ForkServer


def run_module(fork_server: ForkServer, module: str, *arguments: str, folder: Path) -> None:
    """Run a module in a process that is forked from a server; fail the test if it fails.

    Args:
        folder: gets what is printed.
    """
    from tests.helpers.internals import Child

    fork_server.load([module])
    log = folder / f"{module}.log"
    with closing(fork_server.fork()) as server:
        entry = f"{__name__}:_main"
        server.spawn(Child(entry, {"module": module, "arguments": arguments}, log=log))
        event = server.next_event()
        server.await_end()
    assert event["status"] == 0, log.read_text()


def _main(request: Mapping[str, Any]) -> int:
    sys.argv[1:] = request["arguments"]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0
