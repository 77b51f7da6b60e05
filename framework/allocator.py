"""How glibc's allocator treats what is freed. Without torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Numbers of malloc.h. https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OF_THE_USERS = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}
_KEPT_BYTES = 1 << 30  # at the end of the heap
_LARGEST_BYTES = 128 << 20  # larger ones go back each by itself: data sets, copies for checkpoints
_MOST_OF_OLD_VERSIONS = 32 << 20  # before 2.35 a higher one is refused


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have this process keep what it frees of blocks below 128 MiB, for what it allocates next; whether that is set.

    Up to 1 GiB at the end of its heap; free room in the midst of it can't be given back in any case.

    A training step allocates and frees the same activations again and again. By default the larger ones go back to the
    system each time, and every page of them is faulted in anew: on a CPU that was a fifth of a step of a small
    convolutional network. Nothing is changed where the user has said by variables of glibc's what is to be kept, and
    where there is no glibc.
    """
    if _OF_THE_USERS & environ.keys() or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    set_as_asked = mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES) or mallopt(_MMAP_THRESHOLD, _MOST_OF_OLD_VERSIONS)
    return bool(set_as_asked and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
