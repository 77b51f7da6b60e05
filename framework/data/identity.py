"""Identify the train data in checkpoints, and refuse to resume in the middle of an epoch with other data.

With other data, or another order of it, some samples of the epoch would be trained on twice and others never.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from framework.data.sketch import Sketch
from framework.errors import CheckpointError
from framework.types import Order

_NUM_PARTS = 16
_PART_SIZE = 256
"""Of an order that isn't a tensor, so many parts of so many samples are compared."""
_REMEDY = (
    "Some samples of this epoch would be trained on twice, and others never. Set that back, resume from a checkpoint "
    "of an epoch's end, or start a new run from these weights: init_from=CHECKPOINT"
)


@dataclass(frozen=True)
class DataIdentity:
    """What identifies the train part of a run."""

    # The number of samples; None for a stream.
    size: int | None
    # A checksum of the order of the epoch; None: not known yet.
    order: int | None = None
    # Indices of the samples in `sketch`; empty for rows of tensors.
    indices: Sequence[int] = ()
    # None if the samples are random, or change from epoch to epoch.
    sketch: Sketch | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it in plain types."""
        return asdict(self)

    @staticmethod
    def load(state: Mapping[str, Any]) -> DataIdentity:
        identity = DataIdentity(**state)
        if state["sketch"] is None:
            return identity
        return replace(identity, sketch=Sketch(**state["sketch"]))


def common_identity(identities: Sequence[DataIdentity]) -> DataIdentity:
    """Return the identity without its sketch if the ranks differ: other processors may compute other samples."""
    first = identities[0]
    if all(identity == first for identity in identities):
        return first
    return replace(first, indices=(), sketch=None)


def checksum_of(order: Order) -> int:
    """Return a checksum of an epoch's order; of one that is computed where it is read, that of some parts."""
    if isinstance(order, Tensor):
        return zlib.crc32(order.contiguous().numpy().data)
    checksum = 0
    for begin in range(0, len(order), max(1, len(order) // _NUM_PARTS)):
        indices = order[begin : min(len(order), begin + _PART_SIZE)]
        checksum = zlib.crc32(indices.contiguous().numpy().data, checksum)
    return checksum


def check_size(saved: DataIdentity, *, size: int | None) -> None:
    """Raise CheckpointError if the train data has another size, or if one of the two is a stream."""
    if size == saved.size:
        return
    raise CheckpointError(
        f"The train data is {_described(size)}, and was {_described(saved.size)} when the checkpoint was made, in the "
        f"middle of an epoch.\n{_REMEDY}"
    )


def _described(size: int | None) -> str:
    return "a stream" if size is None else f"{size} samples"


def check_order(saved: DataIdentity, order: Order) -> None:
    """Raise CheckpointError if the epoch has another order than when the checkpoint was made."""
    if saved.order is not None and saved.order != checksum_of(order):
        raise CheckpointError(
            "The samples have another order than when the checkpoint was made, in the middle of an epoch: seed, "
            "data.shuffle or data.sampler has changed, or the global batch size of a sampler that looks at it.\n"
            f"{_REMEDY}"
        )


def check_content(saved: DataIdentity, now: DataIdentity) -> None:
    """Raise CheckpointError if the sketches of the same samples differ; check nothing if one is missing."""
    if saved.sketch is None or now.sketch is None:
        return
    has_same_samples = list(saved.indices) == list(now.indices)
    if not has_same_samples or saved.sketch.is_near(now.sketch):
        return
    which = f"Samples {', '.join(map(str, saved.indices))}" if saved.indices else "Rows"
    raise CheckpointError(
        f"{which} of the train dataset are others than when the checkpoint was made, in the middle of an epoch.\n"
        f"{_REMEDY}\nIf its samples change from epoch to epoch on purpose, give it set_epoch(epoch)."
    )
