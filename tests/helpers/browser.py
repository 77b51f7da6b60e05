"""Driving headless Chromium through the DevTools protocol, over a pair of pipes: no port, no driver, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import psutil

from tests.helpers import processes
from tests.helpers.requirements import missing

NAMES = ("chromium", "chromium-browser", "google-chrome")

# The time for one command; the first waits for the browser to start.
_ANSWER_S = 30.0
_POLL_S = 0.1
# The browser reads from descriptor 3 and writes to 4, so its pipes begin beyond these.
_PIPE_FROM = 10
_FLAGS = (
    "--headless",
    # As root, the browser refuses to run with its sandbox. Only local pages are opened.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-breakpad",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def need_chromium() -> str:
    """The program. Without it the test is skipped, or fails where FRAMEWORK_TEST_REQUIRE names chromium."""
    program = find_chromium()
    if program is None:
        missing("chromium", f"no browser found ({', '.join(NAMES)}). On Debian: apt-get install chromium")
    return program


@contextmanager
def opened_page(url: str, *, program: str, width: int, height: int) -> Iterator[Page]:
    """The page in a browser of its own, with a new profile; at the end the browser and all its helpers are gone.

    width, height: of the page in CSS pixels, each of which is one pixel of a picture.
    """
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        pid, to_browser, from_browser = _start([program, *_FLAGS, f"--user-data-dir={profile}"], home=profile)
        try:
            connection = _Connection(to_browser, from_browser)
            target = connection.ask("Target.createTarget", url="about:blank")["targetId"]
            session = connection.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            page = Page(connection, session)
            size = {"width": width, "height": height}
            page.ask("Emulation.setDeviceMetricsOverride", mobile=False, deviceScaleFactor=1, **size)
            page.ask("Page.navigate", url=url)
            yield page
        finally:
            os.close(to_browser)
            os.close(from_browser)
            _end(pid)


@final
class Page:
    """One page. Every method waits for its answer and fails with AssertionError if none comes in time."""

    def __init__(self, connection: _Connection, session: str) -> None:
        self._connection = connection
        self._session = session

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of https://chromedevtools.github.io/devtools-protocol/."""
        return self._connection.ask(method, session=self._session, **parameters)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}\n{answer['exceptionDetails']}")
        return answer["result"].get("value")

    def _evaluated_here(self, script: str) -> Any:
        """The value of an expression; None if the page is being left for another one."""
        try:
            return self.evaluate(script)
        except AssertionError as error:
            if "Inspected target navigated" not in str(error):
                raise
            return None

    def wait_for(self, script: str, *, timeout: float) -> Any:
        """The first value of the expression that is true. Fails with what the page shows if none is in time."""
        deadline = time.monotonic() + timeout
        while not (value := self._evaluated_here(script)):
            if time.monotonic() > deadline:
                raise AssertionError(f"not true within {timeout} s: {script}\nThe page shows:\n{self.text()}")
            time.sleep(_POLL_S)
        return value

    def text(self) -> str:
        """What can be read on the page."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def screenshot(self, *, height: int) -> bytes:
        """The page's upper part, so many CSS pixels of it, as PNG."""
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": height, "scale": 1}
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", clip=clip)["data"])


@final
class _Connection:
    """Messages are JSON, each ended by a zero byte; answers carry the number of their question. Events are ignored."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._number = 0

    def ask(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        question = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            question["sessionId"] = session
        message = json.dumps(question).encode() + b"\0"
        while message:
            message = message[os.write(self._to_browser, message) :]
        deadline = time.monotonic() + _ANSWER_S
        while (answer := self._next(deadline, method)).get("id") != self._number:
            continue
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from_browser], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise AssertionError(f"the browser didn't answer {method} within {_ANSWER_S} s")
            part = os.read(self._from_browser, 1 << 20)
            if not part:
                raise AssertionError(f"the browser ended at {method}")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


def _start(command: list[str], *, home: str) -> tuple[int, int, int]:
    """Start it in a process group of its own; gives its pid and the pipes to and from it. What it prints is lost."""
    its_input, to_browser = _pipe()
    from_browser, its_output = _pipe()
    actions = [
        (os.POSIX_SPAWN_DUP2, its_input, 3),
        (os.POSIX_SPAWN_DUP2, its_output, 4),
        *((os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in (0, 1, 2)),
    ]
    # Nothing is read from the user's own folders or left there.
    environment = {**os.environ, "HOME": home}
    try:
        pid = os.posix_spawn(command[0], command, environment, file_actions=actions, setpgroup=0)
    except OSError:
        os.close(to_browser)
        os.close(from_browser)
        raise
    finally:
        os.close(its_input)
        os.close(its_output)
    return pid, to_browser, from_browser


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _PIPE_FROM) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def _end(pid: int) -> None:
    """Kill the browser and its helpers: the whole group, and those that have left it."""
    browser = psutil.Process(pid)
    everyone = [*browser.children(recursive=True), browser]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    processes.kill_all(everyone)
