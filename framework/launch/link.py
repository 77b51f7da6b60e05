"""What ties a rank to those who watch it: its pulse, and the board of its attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from framework.launch.board import Board, connect
from framework.pulse import Pulse

_STORE_TIMEOUT_S = 10.0


@final
@dataclass(frozen=True)
class Link:
    """Handed to a rank's entry.

    `open_board` makes a connection to the run's store of one's own; None for a rank that is alone and meets nobody.
    """

    pulse: Pulse
    open_board: Callable[[], Board] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether a launcher watches the rank. If not, it runs in the command's own process (`launcher=in_place`)."""
        return self.open_board is not None


def environment_board(attempt: int) -> Board:
    """The board in the store that the environment names by MASTER_ADDR and MASTER_PORT, as torchrun does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Board(connect(address, port, timeout_s=_STORE_TIMEOUT_S), attempt=attempt)
