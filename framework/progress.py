"""Where training stands, how fast it goes, and which observers want to hear of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, final

from framework.types import Callback, Logger


@final
@dataclass
class Progress:
    """epoch: being trained, from 0. step: optimizer steps done. samples: of this epoch's global order consumed."""

    epoch: int = 0
    step: int = 0
    samples: int = 0

    def advance(self, *, global_count: int, epoch_end: bool) -> None:
        """Count one optimizer step; after an epoch's last one the next epoch's beginning is where training stands."""
        self.step += 1
        self.samples = 0 if epoch_end else self.samples + global_count
        self.epoch += int(epoch_end)

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step, self.samples = state["epoch"], state["step"], state["samples"]


@final
@dataclass
class Throughput:
    """Samples of all ranks and the time they took, without the time spent evaluating and saving."""

    samples: int = 0
    since: float = field(default_factory=time.perf_counter)

    def read(self) -> float:
        """Samples per second since the last reading."""
        now = time.perf_counter()
        rate = self.samples / max(now - self.since, 1e-9)
        self.samples, self.since = 0, now
        return rate

    def leave_out(self, *, since: float) -> None:
        """Don't count the time from then (of `time.perf_counter`) until now."""
        self.since += time.perf_counter() - since


def hooks(observers: Iterable[Any], name: str) -> list[Callable[..., Any]]:
    """The bound `name` of every observer that wrote one, so that a hook nobody wrote costs nothing in the loop."""
    bound = [(observer, getattr(observer, name, None)) for observer in observers]
    return [hook for observer, hook in bound if hook is not None and not _is_inherited(observer, name)]


def flush(loggers: Iterable[Any]) -> None:
    """Have what was logged until here outlive a kill."""
    for flush_one in hooks(loggers, "flush"):
        flush_one()


def _is_inherited(observer: object, name: str) -> bool:
    """Whether the hook is only the Protocol's own empty body, as when a class names the Protocol as its base."""
    written = getattr(type(observer), name, None)
    return written is not None and written in (getattr(Callback, name, None), getattr(Logger, name, None))
