"""`job=collectives`: show what ranks exchange, with the tensors before and after. No torch here.

The ranks start as for training, on all nodes and by any launcher; nothing is trained. The exchanges are in
`framework/collectives_demo.py`. What they showed is printed, and written to collectives.json in the run directory:

    recipe, delay_s (of the late sender)
    backends    backend → kind of the devices where its tensors are
    ranks       rank, local_rank, world_size, backend (the run's), node, host, pid, devices (device, name), environment
                (variable → value or null), interconnect (of the first rank of a node: what `nvidia-smi topo -m` prints)
    exchanges   name, about, code (its lines), by_backend: backend → for each rank before and after
                (shape, dtype, values), seconds between them, notes, rounds (of the butterfly); or missing: why it can't
                be shown
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from framework.config.schema import BackendName, Config
from framework.errors import ConfigError
from framework.jobs.choosing import checked_topology
from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, run
from framework.jobs.summary import interruption_without_trace, short
from framework.preflight.wording import seconds_text
from framework.run_dir import RunDir, read_object
from framework.topology import Topology

_ENTRY = "framework.collectives_demo:collectives_rank"
_RESULT = "collectives.json"  # as `collectives_demo` has it
_SHOWN_RANKS = 16
_COLUMNS = 100  # of the terminal
_VALUES_CHARS = 34

Row = tuple[str, ...]


def main(request: Request) -> JobResult:
    """Run and print the exchanges on any number of processes. Raises FrameworkError if the request can't be met."""
    check(request)
    return run(request, entry=_ENTRY, words=Words("Collectives of", _closing, interruption_without_trace))


def check(request: Request) -> Topology:
    """Return the topology. Raises FrameworkError for any mistake that can be found before anything starts."""
    topology = checked_topology(request)
    has_own_gpus = topology.gpus_per_node > 0 and not topology.shares_gpus
    if BackendName.NCCL.value in (request.config.collectives.backends or ()) and not has_own_gpus:
        raise ConfigError(
            "collectives.backends names nccl, which needs a GPU for each process, and these processes "
            f"{'share theirs' if topology.shares_gpus else 'have none'}.\nUse collectives.backends=[gloo]."
        )
    return topology


def _closing(_config: Config, run_dir: RunDir, status: int) -> str:
    path = short(run_dir.path)
    found = read_object(run_dir.path / _RESULT) if status == 0 else None
    if found is None:
        return f"  {'logs':<12} {path}/logs"
    return f"\n{render(found)}\n\n  {path}/{_RESULT}"


def render(found: Mapping[str, Any]) -> str:
    """Return the page: who the ranks are, one block per exchange, the GPUs' links, the times side by side."""
    blocks = [_who(found["ranks"]), *(_block(each, found["backends"]) for each in found["exchanges"])]
    links = {rank["node"]: rank["interconnect"] for rank in found["ranks"] if rank["interconnect"] is not None}
    blocks += [f"Links between the GPUs of node {node} (nvidia-smi topo -m)\n\n{text}" for node, text in links.items()]
    if not links:
        blocks.append("Links between GPUs\n\n  none: no node has a GPU whose driver answers `nvidia-smi topo -m`")
    if len(found["backends"]) > 1:
        blocks.append(_times(found))
    return "\n\n\n".join(blocks)


def _who(ranks: Sequence[Mapping[str, Any]]) -> str:
    places: list[Row] = [("rank", "local rank", "world size", "backend", "node", "pid", "devices")]
    names = list(ranks[0]["environment"])
    variables: list[Row] = [("rank", *names)]
    for rank in ranks[:_SHOWN_RANKS]:
        numbers = (str(rank[key]) for key in ("rank", "local_rank", "world_size", "backend"))
        devices = ", ".join(f"{one['device']} {one['name']}".strip() for one in rank["devices"])
        places.append((*numbers, f"{rank['node']} {rank['host']}", str(rank["pid"]), _cut(devices, _VALUES_CHARS)))
        variables.append((str(rank["rank"]), *(rank["environment"][name] or "–" for name in names)))
    parts = (
        _table(places, of=ranks),
        "  and what it reads from its environment (–: not set)",
        _table(variables, of=ranks),
    )
    return "\n\n".join(("Who each rank is", *parts))


def _block(exchange: Mapping[str, Any], backends: Mapping[str, str]) -> str:
    """Return one exchange: what it does, its code, a table with a row for each rank, the notes of the ranks."""
    by_backend = {name: ranks for name, ranks in exchange["by_backend"].items() if "missing" not in ranks[0]}
    missing = [ranks[0]["missing"] for ranks in exchange["by_backend"].values() if "missing" in ranks[0]]
    parts = ["\n".join([exchange["name"], *(f"  {line}" for line in wrap(exchange["about"], _COLUMNS - 2))])]
    parts.append("\n".join(f"    {line}" for line in exchange["code"]))
    if by_backend:
        first, *others = by_backend
        shown = by_backend[first]
        kind = f"{shown[0]['before']['dtype']} on {backends[first]}"
        rows: list[Row] = [("rank", *(_head(shown, key, kind) for key in ("before", "after")), *by_backend)]
        for number, rank in enumerate(shown[:_SHOWN_RANKS]):
            times = (seconds_text(ranks[number]["seconds"]) for ranks in by_backend.values())
            rows.append((str(number), _values(rank["before"]), _values(rank["after"]), *times))
        parts.append(_table(rows, of=shown))
        parts += _remarks(shown)
        for name in others:
            parts += [f"  over {name}:\n{text}" for text in _notes(by_backend[name])]
            if [rank["after"]["values"] for rank in by_backend[name]] != [rank["after"]["values"] for rank in shown]:
                parts.append(f"  {name} gave other values than {first}: see {_RESULT}")
    parts += [f"  {text}" for text in dict.fromkeys(missing)]
    return "\n\n".join(parts)


def _head(ranks: Sequence[Mapping[str, Any]], key: str, kind: str) -> str:
    """The head of a column: all tensors in it have one shape."""
    shape = ", ".join(map(str, ranks[0][key]["shape"]))
    return f"{key}: ({shape}) {kind}" if key == "before" else f"{key}: ({shape})"


def _remarks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return what is below the table: notes; for the butterfly also its rounds and the true mean."""
    yield from _notes(ranks)
    if not ranks[0]["rounds"]:
        return
    half = len(ranks[0]["rounds"]) // 2
    rows: list[Row] = [
        ("rank", *(f"{'reduce' if number < half else 'gather'} {number % half + 1}" for number in range(2 * half)))
    ]
    rows += [(str(number), *rank["rounds"]) for number, rank in enumerate(ranks[:_SHOWN_RANKS])]
    yield "  rounds: with whom, and which values it sends (↔ both ways, ← only receives, – takes no part)"
    yield _table(rows, of=ranks)
    columns = zip(*(rank["before"]["values"] for rank in ranks), strict=True)
    mean = [sum(column) / len(ranks) for column in columns]
    farthest = max(abs(a - b) for rank in ranks for a, b in zip(rank["after"]["values"], mean, strict=True))
    yield f"  true mean of all: {_values({'values': mean})}; the largest difference from it is {farthest:.3g}"


def _notes(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shown = enumerate(ranks[:_SHOWN_RANKS])
    notes = [f"  rank {number}: {'; '.join(rank['notes'])}" for number, rank in shown if rank["notes"]]
    if notes:
        yield "\n".join(notes)


def _times(found: Mapping[str, Any]) -> str:
    """Return the backends side by side: for each exchange, the time of the slowest rank."""
    backends = found["backends"]
    rows: list[Row] = [("exchange", *(f"{name} ({kind})" for name, kind in backends.items()))]
    for exchange in found["exchanges"]:
        by_backend = (exchange["by_backend"][name] for name in backends)
        cells = (
            "–" if "missing" in ranks[0] else seconds_text(max(r["seconds"] for r in ranks)) for ranks in by_backend
        )
        rows.append((exchange["name"], *cells))
    return f"Times of the slowest rank\n\n{_table(rows)}"


def _values(tensor: Mapping[str, Any]) -> str:
    """Return `[0, 1, 2, 3]`; of too many values for a column, the first ones and the last."""
    texts = [f"{value:.6g}" for value in tensor["values"]]
    kept = len(texts)
    while len(line := _listed(texts, kept)) > _VALUES_CHARS and kept > 2:
        kept -= 1
    return line


def _listed(texts: Sequence[str], kept: int) -> str:
    shown = texts if kept == len(texts) else [*texts[: kept - 1], "…", texts[-1]]
    return f"[{', '.join(shown)}]"


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _table(rows: Sequence[Row], *, of: Sequence[Any] = ()) -> str:
    """Align columns. of: all ranks, of which only the first have a row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(of) > _SHOWN_RANKS:
        lines.append(f"… and {len(of) - _SHOWN_RANKS} more ranks, in {_RESULT}")
    return "\n".join(f"  {line}" for line in lines)
