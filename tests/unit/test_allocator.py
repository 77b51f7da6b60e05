from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from tests.helpers.command import run_python
from tests.helpers.internals import tune_malloc

# A step's worth of activations, 10 times: 4 pieces of 30 MiB, written to and freed.
PIECES = 4
PIECE_BYTES = 30 << 20
CHURN = f"""
import ctypes, resource, sys
from tests.helpers.internals import tune_malloc
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    pieces = [libc.malloc({PIECE_BYTES}) for _ in range({PIECES})]
    for each in pieces:
        libc.memset(each, 1, {PIECE_BYTES})
    for each in pieces:
        libc.free(each)
if sys.argv[1] == "kept":
    assert tune_malloc()
step(), step()
before = faults()
for _ in range(10):
    step()
print(faults() - before)
"""


def is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.skipif(not is_glibc(), reason="another C library")
def test_what_is_freed_is_used_again() -> None:
    faults = {how: int(run_python("-c", CHURN, how).stdout) for how in ("as it is", "kept")}
    pages = PIECES * PIECE_BYTES // mmap.PAGESIZE
    assert faults["kept"] < pages // 10
    assert faults["as it is"] > pages


def test_what_the_user_has_set_is_left(monkeypatch):
    class Library:
        @staticmethod
        def mallopt(*_: int) -> int:
            raise AssertionError("the user has set it")

    monkeypatch.setattr("ctypes.CDLL", lambda _: Library)
    assert not tune_malloc({"MALLOC_TRIM_THRESHOLD_": "1000"})
    assert not tune_malloc({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000"})
    # Another C library lacks the function.
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not tune_malloc({})
