"""When what was logged is written: pieces that are encoded one after another cost a third of what each costs alone."""

from __future__ import annotations

import math
from time import monotonic
from typing import final

_INTERVAL_S = 0.1  # what a kill may lose, of what no checkpoint has yet


@final
class Pace:
    """Due at once where nothing was written for a tenth of a second; what comes faster waits for it to pass."""

    def __init__(self) -> None:
        self._due_s = -math.inf

    def is_due(self) -> bool:
        return monotonic() >= self._due_s

    def note(self) -> None:
        """That all has been written now."""
        self._due_s = monotonic() + _INTERVAL_S
