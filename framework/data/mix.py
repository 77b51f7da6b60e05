"""Mix streams by weights."""

from __future__ import annotations

import copy
import inspect
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, final

import torch
from torch.utils.data import IterableDataset

from framework.errors import DataError

_ENDED = object()


@final
class Mix(IterableDataset[Any]):
    """A stream whose every sample comes from one of several streams, drawn by weights.

        Datasets(train=Mix([web, books], weights=[3, 1]))

    Draws are torch's, which in training depend on (seed, epoch, position in the stream) alone. The streams' `shard`,
    `set_epoch`, `state_dict` and `load_state_dict` are used if they have them.

    Args:
        streams: Each an IterableDataset.
        weights: Positive numbers, one per stream: the shares of samples. None: all equal.
        at_end: "stop" ends with the first stream that is drawn and has no more samples. "restart" reads a stream that
            has ended again, with `set_epoch(epoch + number of earlier passes)`, until each has ended once.

    Raises DataError for streams and weights that don't fit.
    """

    def __init__(
        self,
        streams: Sequence[IterableDataset[Any]],
        weights: Sequence[float] | None = None,
        *,
        at_end: Literal["stop", "restart"] = "stop",
    ) -> None:
        self.streams = list(streams)
        self.weights = [1.0] * len(self.streams) if weights is None else [float(weight) for weight in weights]
        self.at_end = at_end
        self._check()
        self._limits = list(accumulate(self.weights))
        self._epoch = 0
        # How often each stream has ended.
        self._passes = [0] * len(self.streams)
        self._is_resumed = False
        self._was_read = False
        # The state of each stream before it was first read.
        self._initial: list[Any] | None = None

    def _check(self) -> None:
        for number, stream in enumerate(self.streams):
            if not isinstance(stream, IterableDataset):
                raise DataError(
                    f"Stream {number} of a Mix is a {type(stream).__name__}, not a torch.utils.data.IterableDataset.\n"
                    "Map-style datasets are mixed by ConcatDataset and framework.samplers.MixtureSampler."
                )
        if not self.streams or len(self.weights) != len(self.streams):
            raise DataError(
                f"A Mix of {len(self.streams)} streams has {len(self.weights)} weights. Give one or more streams, and "
                "a weight for each."
            )
        for weight in self.weights:
            if not (weight > 0 and math.isfinite(weight)):
                raise DataError(f"The weights of a Mix are {self.weights}. Each must be a finite number above 0.")
        if self.at_end not in ("stop", "restart"):
            raise DataError(f'at_end={self.at_end!r} of a Mix is neither "stop" nor "restart".')

    def shard(self, num_shards: int, index: int) -> Mix:
        """Return a mix, by the same weights, of a shard of each stream."""
        shards = []
        for number, stream in enumerate(self.streams):
            take = getattr(stream, "shard", None)
            if not callable(take):
                raise DataError(
                    f"Stream {number} of a Mix, a {type(stream).__name__}, has no shard(num_shards, index).\n"
                    "Write that method, or use data.stream=shared with data.num_workers=1 or 0."
                )
            shards.append(take(num_shards=num_shards, index=index))
        return Mix(shards, self.weights, at_end=self.at_end)

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch. The framework calls `set_epoch` of the streams too."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self._keep_initial()
        if not self._is_resumed:
            self._rewind()
        self._is_resumed = False
        iterators = [iter(stream) for stream in self.streams]
        while True:
            number = self._draw()
            sample = next(iterators[number], _ENDED)
            if sample is _ENDED:
                self._passes[number] += 1
                if self.at_end == "stop" or all(self._passes):
                    return
                iterators[number] = self._restarted(number)
                sample = next(iterators[number], _ENDED)
            if sample is _ENDED:
                raise DataError(f"Stream {number} of a Mix, a {type(self.streams[number]).__name__}, has no samples.")
            yield sample

    def _rewind(self) -> None:
        """Go back to the first sample of each stream."""
        self._passes = [0] * len(self.streams)
        if self._was_read:
            assert self._initial is not None, "it is kept before the first sample"
            for stream, state in zip(self.streams, self._initial, strict=True):
                if saves_state(stream):
                    stream.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
        self._was_read = True

    def _draw(self) -> int:
        """Return the number of the stream that the next sample comes from."""
        place = torch.rand((), dtype=torch.float64).item() * self._limits[-1]
        return min(bisect_right(self._limits, place), len(self.streams) - 1)

    def _restarted(self, number: int) -> Iterator[Any]:
        stream: Any = self.streams[number]
        self._set_pass(number)
        if saves_state(stream):
            assert self._initial is not None, "it is kept before the first sample"
            stream.load_state_dict(copy.deepcopy(self._initial[number]))
        return iter(stream)

    def _set_pass(self, number: int) -> None:
        set_epoch = getattr(self.streams[number], "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch + self._passes[number])

    def _keep_initial(self) -> None:
        if self._initial is None:
            self._initial = copy.deepcopy(self._states())

    def _states(self) -> list[Any]:
        states = []
        for stream in self.streams:
            states.append(stream.state_dict() if saves_state(stream) else None)  # type: ignore[attr-defined]
        return states

    def state_dict(self) -> dict[str, Any]:
        """Return the position. It is complete only if every stream saves its state."""
        return {"passes": list(self._passes), "streams": self._states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there with the next `iter()`."""
        self._keep_initial()
        if len(state["passes"]) != len(self.streams):
            raise DataError(
                f"The state of a Mix is of {len(state['passes'])} streams, and there are {len(self.streams)}."
            )
        self._passes = list(state["passes"])
        self._is_resumed = True
        self._was_read = True
        for number, stream in enumerate(self.streams):
            if self._passes[number]:
                self._set_pass(number)
            if saves_state(stream):
                stream.load_state_dict(state["streams"][number])  # type: ignore[attr-defined]


def saves_state(dataset: Any) -> bool:
    """Return True if the dataset has `state_dict()` and `load_state_dict(state)`."""
    save = getattr(dataset, "state_dict", None)
    if not callable(save) or not callable(getattr(dataset, "load_state_dict", None)):
        return False
    try:
        inspect.signature(save).bind()
    except TypeError:
        # It needs arguments, as that of LitData's StreamingDataset, which its own loader knows.
        return False
    return True
