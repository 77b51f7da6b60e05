"""What an exception of someone else's code says, and where that code raised it: for errors that stand in its place."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch


def said(error: BaseException, *, lines: int = 1) -> str:
    """Its class and the first lines of its text that aren't empty; the class alone where there are none."""
    text = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join([": ".join([type(error).__name__, *text[:1]]), *text[1:lines]])


def place(error: BaseException) -> str:
    """The line that is to be changed: the last one that isn't torch's own."""
    torchs = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if not each.filename.startswith(torchs)), frames[-1])
    return f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
