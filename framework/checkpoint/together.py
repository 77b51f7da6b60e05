"""One checkpoint, written by all ranks: every one its shards, the first one everything else. Failures are agreed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from framework.checkpoint.format import FileFacts
from framework.checkpoint.sharded import Shards, write_shards
from framework.checkpoint.store import WriteShards
from framework.errors import DiskError

Write = Callable[[WriteShards], object]
"""Writes a checkpoint, and has the shards written by what it is given."""


@final
@dataclass(frozen=True)
class _News:
    """What one rank tells the others."""

    fault: str | None = None
    size_bytes: int = 0
    directory: Path | None = None


@final
class Together:
    """The ranks of `group`, which is used for nothing else: it may wait in a thread of each while training goes on.

    Everything here waits for the slowest rank, and at most as long as the group's time-out. holds_own: plain tensors
    are of the rank that gives them; else they are the same on every rank, and the first one writes them.
    """

    def __init__(self, group: dist.ProcessGroup, *, holds_own: bool = False) -> None:
        self._group = group
        self.holds_own = holds_own

    def write(
        self, shards: Shards, write: Write | None, *, fault: str | None, require_room: Callable[[int], None]
    ) -> None:
        """Write one checkpoint. Every rank must call it; the first one gives `write`.

        fault: why this rank has nothing to write; then nobody writes. require_room: called by the first one with the
        bytes of all. Raises DiskError on every rank where something can't be written on one; where the fault is
        another one, that rank raises it itself. What was written until then is deleted.
        """
        size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in shards.tensors.values())
        met = self._exchange(_News(fault=fault, size_bytes=size_bytes))
        _raise_first(met)
        if write is None:
            self._follow(shards)
            return
        told = False

        def write_all_shards(directory: Path) -> Mapping[str, FileFacts]:
            nonlocal told
            told = True
            self._exchange(_News(directory=directory))
            return write_shards(directory, shards, group=self._group)

        error: BaseException | None = None
        try:
            require_room(sum(news.size_bytes for news in met))
            write(write_all_shards)
        except BaseException as raised:  # told to the others, whatever it is: they wait for it
            error = raised
        if not told:
            self._exchange(_News())
        self._exchange(_News(fault=None if error is None else str(error)))
        if error is not None:
            raise error

    def _follow(self, shards: Shards) -> None:
        """On the other ranks."""
        directory = self._exchange(_News())[0].directory
        error: Exception | None = None
        if directory is not None:
            try:
                write_shards(directory, shards, group=self._group)
            except Exception as raised:  # the first one comes to the same end, and tells it
                error = raised
        met = self._exchange(_News())
        if error is not None:
            raise error
        _raise_first(met)

    def _exchange(self, news: _News) -> list[_News]:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, news, group=self._group)
        return everyone


def _raise_first(everyone: list[_News]) -> None:
    fault = next((news.fault for news in everyone if news.fault is not None), None)
    if fault is not None:
        raise DiskError(fault)
