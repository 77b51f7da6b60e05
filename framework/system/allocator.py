"""Settings of glibc's allocator. Without torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Numbers of malloc.h. https://man7.org/linux/man-pages/man3/mallopt.3.html
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_USER_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}
_KEPT_BYTES = 1 << 30  # at the end of the heap
_LARGEST_BYTES = 128 << 20  # larger ones go back each by itself: data sets, copies for checkpoints
_OLD_VERSIONS_MAX = 32 << 20  # before 2.35 a higher one is refused


def tune_malloc(environ: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep freed blocks below 128 MiB, up to 1 GiB, instead of returning them; return True if that is set.

    A training step allocates the same activations every time, and by default each page of the larger ones is faulted in
    again: a fifth of a step of a small convolutional network on the CPU (420,000 instead of 120,000 faults in 70 steps,
    benchmarks/RESULTS.md). Changes nothing if the user has set glibc's own variables, or without glibc.
    """
    if _USER_VARIABLES & environ.keys() or "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    set_as_asked = mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES) or mallopt(_MMAP_THRESHOLD, _OLD_VERSIONS_MAX)
    return bool(set_as_asked and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
