"""A topology as text: one grid a node, a column for each of its processes. Made without torch, from formulas alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from framework.topology import Topology

WIDTH = 100
_MAX_NODES = 3  # drawn one by one; of more, the first and the last
_MAX_PROCS = 16  # likewise, of a node's processes; of more, the first ones and the last
_FIRST_PROCS = 6
_LABEL_WIDTH = 14
_GAP = "…"


def draw(topology: Topology) -> str:
    """Nodes, their ranks, and what each owns. No more than a page, however many there are."""
    nodes = topology.nnodes
    if nodes <= _MAX_NODES:
        return "\n".join(_node(topology, node) for node in range(nodes))
    first, last = topology.rank_of(1, 0), topology.rank_of(nodes - 2, topology.procs_per_node - 1)
    likewise = f"  nodes 1–{nodes - 2}  likewise: ranks {first}–{last}, {topology.procs_per_node} on each node"
    return "\n".join([_node(topology, 0), "", likewise, "", _node(topology, nodes - 1)])


def numbers(values: Sequence[int]) -> str:
    """`0–7` for a run of three or more, else `0, 1`."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}–{values[-1]}"
    return ", ".join(map(str, values))


def _node(topology: Topology, node: int) -> str:
    columns = [
        (_GAP,) * 3 if local is None else _cells(topology, node=node, local_rank=local)
        for local in _shown(topology.procs_per_node)
    ]
    # The same on every node, the one with the longest numbers included.
    end = _cells(topology, node=topology.nnodes - 1, local_rank=topology.procs_per_node - 1)
    width = max(len(cell) for column in [*columns, end] for cell in column)
    per_row = max(1, (WIDTH - _LABEL_WIDTH - 3) // (width + 3))
    rows = [columns[begin : begin + per_row] for begin in range(0, len(columns), per_row)]
    device = "GPU" if topology.gpus_per_node else "device"
    labels = (f"node {node}", "rank", "local rank", device)
    return "\n".join(line for row in rows for line in _grid(row, labels=labels, width=width))


def _shown(procs: int) -> Iterable[int | None]:
    """The local ranks to draw; None stands for those left out."""
    if procs <= _MAX_PROCS:
        return range(procs)
    return [*range(_FIRST_PROCS), None, procs - 1]


def _cells(topology: Topology, *, node: int, local_rank: int) -> tuple[str, str, str]:
    gpus = topology.device_indices(local_rank)
    cpu = "CPU" if topology.span == 1 else f"{topology.span} × CPU"
    return str(topology.rank_of(node, local_rank)), str(local_rank), numbers(gpus) or cpu


def _grid(columns: Sequence[tuple[str, ...]], *, labels: Sequence[str], width: int) -> list[str]:
    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * (width + 2) for _ in columns) + right

    node, *names = labels
    lines = [f"  {node:<{_LABEL_WIDTH}}{rule('┌', '┬', '┐')}"]
    for number, name in enumerate(names):
        cells = "│".join(f" {column[number]:^{width}} " for column in columns)
        lines.append(f"    {name:<{_LABEL_WIDTH - 2}}│{cells}│")
    return [*lines, " " * (_LABEL_WIDTH + 2) + rule("└", "┴", "┘")]
