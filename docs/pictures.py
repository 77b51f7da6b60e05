"""The README's pictures, taken from real runs: `make pictures`, or `python -m docs.pictures`.

terminal.svg: what a terminal shows after `python -m framework` was typed in a shell, redrawn progress line included.
tensorboard.png: TensorBoard over that run and one more for each of the other learning rates, in headless Chromium.
The runs are made in a folder that is removed afterwards.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.helpers import tensorboard
from tests.helpers.browser import NAMES, Page, find_chromium, opened_page

PICTURES = Path(__file__).resolve().parent / "pictures"
COMMAND = "python -m framework"
LEARNING_RATES = ("0.1", "0.004")  # of the runs beside the first, which has the recipe's own
TAGS = ("train/loss", "val/accuracy", "train/lr")

_COLUMNS, _LINES = 108, 60  # more lines than the run prints: nothing may scroll away
_PROMPT = "$ "
_RUN_S = 300.0  # more than any run here takes
_WIDTH, _HEIGHT = 1400, 500
_PAGE_S = 30.0
_COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's names for what everyone else calls yellow

# Whole curves, no table below each chart, no pane of settings beside them: more room for what is to be seen.
_MAKE_ROOM = """
for (const box of document.querySelectorAll("mat-checkbox"))
  if (/^(Enable step selection|Ignore outliers)/.test(box.innerText.trim())) box.querySelector("input").click();
document.querySelector('[aria-label="Toggle settings side pane"]').click();
"""
_ALL_DRAWN = f"""
[...document.querySelectorAll("metrics-pinned-view scalar-card")].filter(
  card => card.querySelectorAll("tb-data-table-content-row").length === {len(LEARNING_RATES) + 1}
).length === {len(TAGS)}
"""


def main() -> None:
    browser = find_chromium()
    if browser is None:
        sys.exit(f"No browser found ({', '.join(NAMES)}). On Debian and Ubuntu: sudo apt install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write("terminal.svg", terminal_picture(folder).encode())
        for rate in LEARNING_RATES:
            subprocess.run([sys.executable, "-m", "framework", f"optimizer.lr={rate}"], cwd=folder, check=True)
        write("tensorboard.png", tensorboard_picture(folder, browser=browser))


def write(name: str, content: bytes) -> None:
    (PICTURES / name).write_bytes(content)
    print(f"docs/pictures/{name}: {len(content) / 1000:.0f} kB")


def terminal_picture(folder: Path) -> str:
    """An SVG of a terminal in which the command was typed and has ended."""
    screen = pyte.Screen(_COLUMNS, _LINES)
    type_and_watch(screen, folder=folder)
    lines = [styled_line(screen.buffer[number], columns=screen.columns) for number in range(screen.lines)]
    while not lines[-1].plain.strip():
        lines.pop()
    console = Console(record=True, width=_COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, highlight=False)
    picture = console.export_svg(title=COMMAND)
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # web fonts: an image may not load them


def styled_line(line: dict[int, Char], *, columns: int) -> Text:
    """One line of the emulated screen, with its colours."""
    text = Text()
    chars = [line[column] for column in range(columns)]
    for (front, back, bold, italic), run in groupby(chars, lambda char: (char.fg, char.bg, char.bold, char.italics)):
        style = Style(color=colour(front), bgcolor=colour(back), bold=bold, italic=italic)
        text.append("".join(char.data for char in run), style)
    text.rstrip()
    return text


def colour(name: str) -> str | None:
    """What rich calls a colour of pyte's: a name, or six hexadecimal digits."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return _COLOURS.get(name, name.replace("bright", "bright_"))


def type_and_watch(screen: pyte.Screen, *, folder: Path) -> None:
    """Type the command in a shell in a pseudo-terminal, feed the screen with what is shown, until the next prompt."""
    environment = {
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PS1": _PROMPT,
        "TERM": "xterm-256color",
    }
    shell = shutil.which("bash") or sys.exit("bash was not found.")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(shell, ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", screen.lines, screen.columns, 0, 0))
        stream = pyte.ByteStream(screen)
        read_to_prompt(terminal, screen, stream)
        os.write(terminal, f"{COMMAND}\n".encode())
        read_to_prompt(terminal, screen, stream)
        os.write(terminal, b"exit\n")  # the shell's own status is then the command's
    except BaseException:
        os.kill(pid, signal.SIGHUP)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    if status != 0:
        shown = "\n".join(line.rstrip() for line in screen.display).rstrip()
        sys.exit(f"{COMMAND} failed, so there is nothing to show:\n{shown}")


def read_to_prompt(terminal: int, screen: pyte.Screen, stream: pyte.ByteStream) -> None:
    """Feed the screen, at least once, until the cursor stands behind the prompt."""
    for part in parts(terminal):
        stream.feed(part)
        if screen.display[screen.cursor.y].rstrip() == _PROMPT.rstrip() and screen.cursor.x == len(_PROMPT):
            return


def parts(terminal: int) -> Iterator[bytes]:
    """What comes from the terminal, as it comes. Raises TimeoutError if it takes too long."""
    deadline = time.monotonic() + _RUN_S
    while select.select([terminal], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        yield os.read(terminal, 1 << 16)
    raise TimeoutError(f"no prompt after {_RUN_S} s")


def tensorboard_picture(folder: Path, *, browser: str) -> bytes:
    """A PNG of the page with the charts of TAGS at the top, beside each other."""
    with tensorboard.served(folder, num_runs=len(LEARNING_RATES) + 1) as address:
        url = tensorboard.time_series(address, pinnedCards=tensorboard.pinned(*TAGS), smoothing="0")
        # Charts are drawn once they are in sight: three rows of them are, as long as the settings take their room.
        with opened_page(url, program=browser, width=_WIDTH, height=3 * _HEIGHT) as page:
            page.wait_for(_ALL_DRAWN, timeout=_PAGE_S)
            page.evaluate(_MAKE_ROOM)
            return when_still(page)


def when_still(page: Page) -> bytes:
    """The page's upper part once it has looked the same for a second: nothing on it says that a chart is drawn."""
    deadline = time.monotonic() + _PAGE_S
    picture, since = page.screenshot(height=_HEIGHT), time.monotonic()
    while time.monotonic() - since < 1.0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page still changes after {_PAGE_S} s")
        if (newer := page.screenshot(height=_HEIGHT)) != picture:
            picture, since = newer, time.monotonic()
    return picture


if __name__ == "__main__":
    main()
