"""`job=collectives` on one rank: what `torch.distributed` does, one exchange after another.

Read the functions of `EXCHANGES` from top to bottom. Each is a generator: it makes its tensors, yields what is shown as
"before", makes the plain call, and yields what is shown as "after". The time is taken between the two.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed import collectives
from framework.distributed.butterfly import MEAN, Swap, butterfly_all_reduce, inner_ranks, rounds
from framework.distributed.collectives import gather_to_first
from framework.distributed.context import Context
from framework.distributed.group import process_group, set_timeout
from framework.errors import RunError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight.facts import device_name, interconnect
from framework.preflight.wording import seconds_text
from framework.pulse import COUNTED_GROUP, Phase
from framework.rank_log import logger
from framework.run_dir import write_atomically
from framework.session import Rank, entered

RESULT = "collectives.json"
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

_MATMUL_SIDE = 256
_NOT_OFFERED = re.compile(r"not support|unsupported|not implemented", re.IGNORECASE)


@dataclass(frozen=True)
class Comm:
    """This rank among the others, over one backend.

    group: for collectives. p2p: the same ranks, for sends and receives: gloo counts these as collectives, and the
    monitor tells by the number of collectives which rank is behind. device: where the backend's tensors are.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup
    p2p: dist.ProcessGroup
    device: torch.device
    delay_s: float
    notes: list[str] = field(default_factory=list)
    rounds: list[str] = field(default_factory=list)

    @property
    def partner(self) -> int | None:
        """The other rank of this one's pair: 0 and 1, 2 and 3, and so on; None for a last one that is alone."""
        other = self.rank ^ 1
        return other if other < self.world_size else None

    def numbered(self, count: int) -> Tensor:
        """Values that show whose they are: 20, 21, 22, … on rank 2 (from more than ten values on 200, 201, …)."""
        base = max(10, 10 ** len(str(count - 1)))
        begin = base * self.rank
        return torch.arange(begin, begin + count, dtype=torch.float64, device=self.device)

    def note(self, text: str, seconds: float) -> None:
        """Add a line to what is shown of this rank."""
        self.notes.append(f"{text} {seconds_text(seconds)}")


Shown = Iterator[Tensor]


def barrier(comm: Comm) -> Shown:
    """Ranks draw a number, one after the other; none passes a barrier before all have reached it."""
    number, store = torch.zeros(1, device=comm.device), dist.distributed_c10d._get_default_store()
    yield number
    for turn in range(comm.world_size):
        if turn == comm.rank:
            number += (store.add("number", 1) - 1) % comm.world_size + 1
        dist.barrier(group=comm.group)
    yield number


def ping_pong(comm: Comm) -> Shown:
    """Ranks 0 and 1, 2 and 3, … send a tensor back and forth ten times; the odd rank adds 1 each time."""
    tensor, partner = torch.zeros(1, device=comm.device), comm.partner
    yield tensor
    began = time.perf_counter()
    for _ in range(10 if partner is not None else 0):
        if comm.rank % 2 == 0:
            dist.send(tensor, partner, group=comm.p2p)
            dist.recv(tensor, partner, group=comm.p2p)
        else:
            dist.recv(tensor, partner, group=comm.p2p)
            tensor += 1
            dist.send(tensor, partner, group=comm.p2p)
    if partner is not None:
        comm.note("a round trip took", (time.perf_counter() - began) / 10)
    yield tensor


def send_recv(comm: Comm) -> Shown:
    """Around the ring from rank 0: receive a sum, add this rank's value, send it on. Both calls block."""
    tensor = torch.full((1,), comm.rank + 1.0, device=comm.device)
    received = torch.zeros_like(tensor)
    previous, following = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
    yield tensor
    if comm.rank == 0:
        dist.send(tensor, following, group=comm.p2p)
        dist.recv(tensor, previous, group=comm.p2p)
    else:
        dist.recv(received, previous, group=comm.p2p)
        tensor += received
        dist.send(tensor, following, group=comm.p2p)
    yield tensor


def isend_irecv(comm: Comm) -> Shown:
    """The even rank of a pair sends late, by collectives.delay; the odd one computes while it receives."""
    tensor, partner, work = comm.numbered(2), comm.partner, None
    matrix = torch.rand(_MATMUL_SIDE, _MATMUL_SIDE, device=comm.device)
    yield tensor
    began = time.perf_counter()
    if partner is not None and comm.rank % 2 == 0:
        time.sleep(comm.delay_s)
        work = dist.isend(tensor, partner, group=comm.p2p)
        comm.note("isend returned after", time.perf_counter() - began)
    elif partner is not None:
        work = dist.irecv(tensor, partner, group=comm.p2p)
        comm.note("irecv returned after", time.perf_counter() - began)
        matmuls = 0
        while time.perf_counter() - began < comm.delay_s:
            float((matrix @ matrix)[0, 0])  # waits for the device
            matmuls += 1
        comm.note(f"{matmuls:,} matmuls of {_MATMUL_SIDE}×{_MATMUL_SIDE} took", comm.delay_s)
    waiting = time.perf_counter()
    if work is not None:
        work.wait()
        comm.note("wait() took", time.perf_counter() - waiting)
    yield tensor


def all_reduce(comm: Comm) -> Shown:
    """Every rank gets the sum of all tensors."""
    tensor = comm.numbered(4)
    yield tensor
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=comm.group)
    yield tensor


def reduce_scatter(comm: Comm) -> Shown:
    """The sum of all tensors is cut into as many parts as there are ranks: rank r gets part r."""
    tensor = comm.numbered(comm.world_size)
    part = torch.empty_like(tensor[:1])
    yield tensor
    dist.reduce_scatter_tensor(part, tensor, op=dist.ReduceOp.SUM, group=comm.group)
    yield part


def all_gather(comm: Comm) -> Shown:
    """Every rank gets the tensors of all ranks, in rank order."""
    tensor = comm.numbered(1)
    gathered = torch.empty(comm.world_size, dtype=tensor.dtype, device=comm.device)
    yield tensor
    dist.all_gather_into_tensor(gathered, tensor, group=comm.group)
    yield gathered


def butterfly(comm: Comm) -> Shown:
    """The mean, by sends and receives alone, as with strategy=butterfly: halves, quarters, … and back."""
    tensor = comm.numbered(inner_ranks(comm.world_size))  # one value for each part
    way = list(rounds(comm.rank, comm.world_size))
    comm.rounds.extend(_partner(swap) for swap in way)
    comm.rounds.extend(_partner(swap and Swap(swap.partner, swap.kept, swap.sent)) for swap in reversed(way))
    yield tensor
    butterfly_all_reduce(tensor, op=MEAN, group=comm.p2p)
    yield tensor


def broadcast(comm: Comm) -> Shown:
    """Every rank gets the tensor of rank 0."""
    tensor = comm.numbered(4)
    yield tensor
    dist.broadcast(tensor, src=0, group=comm.group)
    yield tensor


def all_to_all(comm: Comm) -> Shown:
    """Every rank sends a part to each: rank r gets part r of all. Ranks × parts are transposed."""
    tensor = comm.numbered(comm.world_size)
    received = torch.empty_like(tensor)
    yield tensor
    dist.all_to_all_single(received, tensor, group=comm.group)
    yield received


EXCHANGES = (
    barrier,
    ping_pong,
    send_recv,
    isend_irecv,
    all_reduce,
    reduce_scatter,
    all_gather,
    butterfly,
    broadcast,
    all_to_all,
)
_OF_TWO = (ping_pong, send_recv, isend_irecv)


def collectives_rank(arguments: RankArguments, link: Link) -> None:
    """Run every exchange over every backend; rank 0 writes collectives.json. Raises FrameworkError."""
    with entered(arguments, link) as rank:
        link.pulse.at(Phase.MEETING)
        context, backend = rank.context, rank.config.backend
        with process_group(context, backend, rendezvous=arguments.rendezvous):
            set_timeout(backend.timeout, context)
            link.pulse.at(Phase.COLLECTIVES)
            backends = dict.fromkeys(rank.config.collectives.backends or (context.backend,))
            comms = {name: _comm(name, rank) for name in backends}
            shown = [[_show(exchange, name, comm) for name, comm in comms.items()] for exchange in EXCHANGES]
            gathered = gather_to_first((_who(context), shown), context)
            link.pulse.at(Phase.CLOSING)
            if gathered is not None:
                found = {
                    "recipe": rank.config.recipe,
                    "delay_s": rank.config.collectives.delay,
                    "backends": {name: comm.device.type for name, comm in comms.items()},
                    "ranks": [who for who, _ in gathered],
                    "exchanges": [
                        _described(exchange, list(comms), [each[number] for _, each in gathered])
                        for number, exchange in enumerate(EXCHANGES)
                    ],
                }
                write_atomically(rank.run_dir.path / RESULT, json.dumps(found, indent=2) + "\n")
            collectives.barrier(context)  # no rank leaves while another still needs it


def _comm(backend: str, rank: Rank) -> Comm:
    """Make the groups of one backend. Every rank must call it."""
    context, config = rank.context, rank.config
    timeout = timedelta(seconds=config.backend.timeout)
    group = dist.new_group(backend=backend, timeout=timeout, group_desc=COUNTED_GROUP)
    p2p = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(p2p, dist.ProcessGroup)
    device = torch.device("cpu") if backend == dist.Backend.GLOO else context.device
    for each in (group, p2p):
        dist.barrier(group=each)  # NCCL connects only now
    return Comm(context.rank, context.world_size, group, p2p, device, config.collectives.delay)


def _show(exchange: Callable[[Comm], Shown], backend: str, comm: Comm) -> dict[str, Any]:
    """Run one exchange twice, since the first run opens connections; return what the second showed on this rank.

    Raises RunError if torch raises an error, unless it is that the backend doesn't support the exchange.
    """
    if comm.world_size == 1 and exchange in _OF_TWO:
        return {"missing": "needs two processes"}
    name = exchange.__name__
    logger.info("%s over %s", name, backend)
    try:
        _once(exchange, replace(comm, delay_s=0.0, notes=[], rounds=[]))
        seen = _once(exchange, replace(comm, notes=[], rounds=[]))
    except (RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        if _NOT_OFFERED.search(first_line):
            return {"missing": f"not offered by {backend}: {first_line}"}
        raise RunError(
            f"{name} over {backend} failed on rank {comm.rank} of {comm.world_size}: {first_line}"
        ) from error
    logger.info("%s", seen)
    return seen


def _once(exchange: Callable[[Comm], Shown], comm: Comm) -> dict[str, Any]:
    steps = exchange(comm)
    before = _plain(next(steps))
    dist.barrier(group=comm.group)
    _wait_for(comm.device)
    began = time.perf_counter()
    after = next(steps)
    _wait_for(comm.device)
    seconds = time.perf_counter() - began
    return {"before": before, "after": _plain(after), "seconds": seconds, "notes": comm.notes, "rounds": comm.rounds}


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _plain(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "values": tensor.tolist()}


def _partner(swap: Swap | None) -> str:
    """Return whom a rank sends to and which values (→), whom it receives from (←), or both (↔)."""
    if swap is None:
        return "–"
    (begin, end), receives = swap.sent, swap.kept[0] < swap.kept[1]
    if begin == end:
        return f"← {swap.partner}"
    return f"{'↔' if receives else '→'} {swap.partner} [{begin}:{end}]"


def _who(context: Context) -> dict[str, Any]:
    """Return who this rank is; on the first rank of each node also the links between its GPUs."""
    return {
        "rank": context.rank,
        "local_rank": context.local_rank,
        "world_size": context.world_size,
        "backend": context.backend,
        "node": context.node_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "devices": [device_name(device) for device in dict.fromkeys(context.devices)],
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "interconnect": interconnect() if context.local_rank == 0 else None,
    }


def _described(
    exchange: Callable[[Comm], Shown], backends: Sequence[str], by_rank: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Return what all ranks showed of one exchange, with its code: what is between "before" and "after"."""
    lines = inspect.getsource(exchange).splitlines()
    before, after = (number for number, line in enumerate(lines) if line.startswith("    yield "))
    return {
        "name": exchange.__name__,
        "about": inspect.getdoc(exchange),
        "code": [line[4:] for line in lines[before + 1 : after]],
        "by_backend": {name: [each[number] for each in by_rank] for number, name in enumerate(backends)},
    }
