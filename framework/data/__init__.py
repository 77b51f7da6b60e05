"""From datasets to the batches of one rank. Start with `loader`; `order` is the sample order, `batching` batch sizes.

`resident` (tensors in memory), `workers` (torch's DataLoader) or `stream` (an IterableDataset) load a batch; `prefetch`
moves it to the device. `keyed_random`, `sample_check` and `identity` make the same run see the same data again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.data.token_file import TokenFile

__all__ = ["TokenFile"]


def __getattr__(name: str) -> Any:
    """Import `TokenFile` when it is used: it needs torch, and other modules of this folder are used without."""
    if name != "TokenFile":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from framework.data.token_file import TokenFile

    return TokenFile
