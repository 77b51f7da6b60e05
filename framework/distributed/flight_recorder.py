"""torch's flight recorder: each rank's last collectives, dumped after a time-out, and compared by torch's own reader.

torch records them in memory, for gloo and NCCL. A rank dumps them when the monitor asks for it, when a collective of
its own fails, and before gloo aborts it; NCCL's watchdog does so by itself. `torchfrtrace` reads the files, too.
https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import ctypes
import io
import logging
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, final

from framework.system.files import MAX_RECORD_BYTES, read_bytes
from framework.system.formatting import format_numbers

if TYPE_CHECKING:
    from torch.distributed.flight_recorder.components.types import Collective

# The last collectives that are kept: torch's own number, a few MB at most.
_NUM_ENTRIES = "2000"
# The last ones of each rank. Comparing the 2,000 of 64 ranks would take a minute.
_COMPARED_ENTRIES = 500
# Of ranks, in a line of text.
_SHOWN_SPANS = 8
_SHOWN_GROUPS = 3
_CODE_CACHE = "torch._inductor.codecache"
_Handler = ctypes.CFUNCTYPE(None)
# C++ may call them until the process ends.
_HANDLERS: list[object] = []


# On a rank


def record_collectives(prefix: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have torch record this process's collectives, and NCCL dump them to `prefix` and the rank after a time-out.

    Call it before there is a process group. Variables that the user has set win: TORCH_FR_BUFFER_SIZE=0 records none.
    """
    entries = environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", _NUM_ENTRIES)
    environ.setdefault("TORCH_FR_BUFFER_SIZE", entries)
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(prefix))


def dump_collectives(file: Path, *, backend: str) -> None:
    """Write the collectives that this rank has begun, with the lines that called them. Takes milliseconds."""
    import torch
    from torch import distributed

    c10d = distributed.distributed_c10d
    # torch's own debug server uses these functions; they have no public name.
    recorder: Any = torch._C._distributed_c10d
    with _without_code_cache():
        if backend == "nccl":
            data = recorder._dump_nccl_trace(True, True, False)
        else:
            data = recorder._dump_fr_trace(True, True, False)
    dumped = _unpickled(data)
    # gloo notes its groups before they have names, so torch's reader would not find them.
    groups = dict(dumped["pg_config"])
    for group, name in list(c10d._world.pg_names.items()):
        ranks = list(c10d._world.pg_group_ranks[group])
        groups[name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
    dumped["pg_config"] = groups
    # Hidden until it is complete.
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(pickle.dumps(dumped, protocol=2))
    part.replace(file)


def dump_before_abort(dump: Callable[[], None]) -> None:
    """Call `dump` when C++ ends this process for an error that nobody catches, then go on as before.

    gloo's thread does that to a rank that receives more bytes than it expects, as it does from a rank that called
    another collective; Python gets no exception and runs no exit function. Only for glibc's C++ library.
    """
    pid = os.getpid()

    def handle_abort() -> None:
        # A loader worker has no collectives.
        if os.getpid() == pid:
            dump()
        previous()

    handler = _Handler(handle_abort)
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return
    set_terminate.restype = ctypes.c_void_p
    set_terminate.argtypes = [ctypes.c_void_p]
    previous = _Handler(set_terminate(ctypes.cast(handler, ctypes.c_void_p)))
    _HANDLERS.append(handler)


@contextmanager
def _without_code_cache() -> Iterator[None]:
    """Keep torch from importing its compiler while it looks up the lines of collectives.

    It asks the compiler for the origin of generated code; a rank that hasn't imported it has none. The import takes 1.5
    to 3 s of CPU time in each rank (torch 2.14), and the dump without it 4 ms. If torch asks another module one day, it
    is imported as before.
    """
    if _CODE_CACHE in sys.modules or "torch._inductor" in sys.modules:
        yield
        return
    package = ModuleType("torch._inductor")
    package.__path__ = []
    module = ModuleType(_CODE_CACHE)
    module.PyCodeCache = _NoGeneratedCode  # type: ignore[attr-defined]
    sys.modules["torch._inductor"] = package
    sys.modules[_CODE_CACHE] = module
    try:
        yield
    finally:
        del sys.modules["torch._inductor"]
        del sys.modules[_CODE_CACHE]


@final
class _NoGeneratedCode:
    @staticmethod
    def stack_frames_for_code(_path: str, _line: int) -> None:
        return None


# Where the failure is reported


class _Dump(NamedTuple):
    """What a rank recorded, of which the other ranks have a record, too."""

    entries: list[dict[str, Any]]
    # By name; each has `name`, `desc` and `ranks`.
    groups: Mapping[str, Any]
    version: str


def compare_dumps(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `collectives`, the first of each group that ranks disagree about, as text, or `uncompared`: why not.

    The collective that began first comes first. There is none if the ranks agree, or without dumps of two ranks.

    Args:
        arguments: `prefix`, the path of the dumps without the ranks' numbers, and `world_size`.
    """
    try:
        dumps = _read_dumps(Path(arguments["prefix"]), world_size=arguments["world_size"])
        return {"collectives": _differences(dumps)}
    # Whatever torch's reader stumbles over, or a dump that NCCL has written half: the failure is still reported.
    except Exception as error:
        return {"uncompared": f"torch's reader can't compare what the ranks recorded: {type(error).__name__}: {error}"}


def _read_dumps(prefix: Path, *, world_size: int) -> dict[int, _Dump]:
    dumps = {}
    for rank in range(world_size):
        with suppress(FileNotFoundError):
            content = _unpickled(read_bytes(prefix.with_name(f"{prefix.name}{rank}")))
            entries = content["entries"][-_COMPARED_ENTRIES:]
            dumps[rank] = _Dump(entries, content["pg_config"], content["version"])
    return _comparable(dumps)


def _comparable(dumps: Mapping[int, _Dump]) -> dict[int, _Dump]:
    """Return the dumps without the collectives that the buffer of another rank no longer has.

    A rank that belongs to more groups makes more records, so it has forgotten more. torch's reader compares ranks from
    the same number of a record on.
    """
    # The first collective of a group that all of its ranks still have.
    starts: dict[str, float] = {}
    for dump in dumps.values():
        for group in dump.groups:
            numbers = [entry["collective_seq_id"] for entry in dump.entries if entry["process_group"][0] == group]
            is_complete = not dump.entries or dump.entries[0]["record_id"] == 0
            start = 0 if is_complete else min(numbers, default=math.inf)
            starts[group] = max(start, starts.get(group, 0))

    comparable = {}
    for rank, dump in dumps.items():
        entries = [entry for entry in dump.entries if entry["collective_seq_id"] >= starts[entry["process_group"][0]]]
        numbered = [{**entry, "record_id": number} for number, entry in enumerate(entries)]
        comparable[rank] = dump._replace(entries=numbered)
    return comparable


def _differences(dumps: Mapping[int, _Dump]) -> list[str]:
    if len(dumps) < 2:
        return []
    # It prints everything that it finds.
    logging.getLogger("Flight Recorder").addFilter(lambda _record: False)
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    details = {}
    for rank, dump in dumps.items():
        # The reader removes what it has compared.
        details[str(rank)] = {
            "rank": rank,
            "entries": list(dump.entries),
            "pg_config": dump.groups,
            "version": dump.version,
        }
    version = next(iter(dumps.values())).version
    settings = JobConfig().parse_args(["--allow-incomplete-ranks"])
    first_of_group: dict[str, _Difference] = {}
    for collective in build_db(details, settings, version).collectives:
        if collective.missing_ranks or not collective.pass_check:
            first_of_group.setdefault(collective.pg_desc, _Difference.of(collective, dumps))
    differences = sorted(first_of_group.values(), key=lambda difference: difference.began_ns)
    return [difference.text for difference in differences[:_SHOWN_GROUPS]]


class _Difference(NamedTuple):
    """A collective that ranks disagree about."""

    began_ns: int
    # `collective 7: rank 0 calls broadcast of Float [3] at a.py:5; rank 1 calls all_reduce of Float [4] at a.py:6`
    text: str

    @staticmethod
    def of(collective: Collective, dumps: Mapping[int, _Dump]) -> _Difference:
        others = collective.mismatch_collectives or {}
        missing = set(collective.missing_ranks or ())
        # The reader compares the others with the first of these.
        alike = sorted((set(collective.expected_ranks) & dumps.keys()) - missing - others.keys())
        entries = {rank: dumps[rank].entries[other.record_id] for rank, other in sorted(others.items())}
        entries |= dict.fromkeys(alike, dumps[alike[0]].entries[collective.record_id])

        calls: dict[str, list[int]] = {}
        for rank in sorted(entries):
            calls.setdefault(_call(entries[rank]), []).append(rank)
        if len(calls) == 1 and others:
            # The same call, which one device has begun and another one hasn't.
            calls = {}
            for rank in sorted(entries):
                calls.setdefault(f"{_call(entries[rank])} ({entries[rank]['state']})", []).append(rank)
        parts = [f"{_ranks(ranks, verb='call')} {call}" for call, ranks in calls.items()]
        if missing:
            parts.append(f"{_ranks(missing, verb='never call')} it")

        group = ""
        name = collective.pg_desc.partition(":")[2]
        if name not in ("", "default_pg"):
            group = f" of the group {name}"
        text = f"collective {collective.collective_seq_id}{group}: {'; '.join(parts)}"
        return _Difference(min(entry["time_created_ns"] for entry in entries.values()), text)


def _ranks(ranks: Iterable[int], *, verb: str) -> str:
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]} {verb}s"
    return f"ranks {format_numbers(numbers, max_spans=_SHOWN_SPANS)} {verb}"


def _call(entry: Mapping[str, Any]) -> str:
    """Return what was called, with what, and where: `all_reduce of Float [7] at mine.py:36`."""
    import torch

    text: str = entry["profiling_name"].partition(":")[2]
    tensors = [f"{dtype} {size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)]
    if tensors:
        text += f" of {', '.join(tensors)}"
    folder = f"{Path(torch.__file__).parent}{os.sep}"
    for frame in entry.get("frames", ()):
        # The first one that isn't torch's: its caller.
        if not frame["filename"].startswith(folder):
            return f"{text} at {frame['filename']}:{frame['line']}"
    return text


@final
class _PlainUnpickler(pickle.Unpickler):
    """Reads what torch's dumps have: numbers, texts, lists and dictionaries."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in a dump of collectives")


def _unpickled(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(data)} bytes are too many for a dump of collectives")
    dumped: dict[str, Any] = _PlainUnpickler(io.BytesIO(data)).load()
    return dumped
