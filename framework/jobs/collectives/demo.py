"""`job=collectives` on one rank: what `torch.distributed` does, one exchange after another.

Read the functions from `barrier` to `all_to_all`. Each is a generator: it makes its tensors, yields what is shown as
"before", makes the plain call, and yields what is shown as "after". The time is taken between the two.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed import collectives
from framework.distributed.butterfly import butterfly_all_reduce_mean, inner_ranks, rounds
from framework.distributed.process_group import new_group, process_group, set_timeout
from framework.engine.setup import RankSetup, setup_rank
from framework.launch.plan import MonitorLink, RankArguments
from framework.monitoring.rank_status import RankPhase
from framework.system.formatting import format_seconds, format_table
from framework.system.rank_log import logger
from framework.system.run_dir import write_atomically

VARIABLES = ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PAGE = "collectives.txt"  # in the run directory
_MATMUL_SIDE = 256


@dataclass(frozen=True)
class Comm:
    """This rank's groups over one backend."""

    backend: str
    rank: int
    world_size: int
    # For collectives.
    group: dist.ProcessGroup
    # For sends and receives. gloo counts these as collectives, and the monitor compares those counts to find the rank
    # that is behind.
    p2p: dist.ProcessGroup
    # Of the backend's tensors.
    device: torch.device
    delay_s: float = 0.0
    # Lines to show below the tensors.
    notes: list[str] = field(default_factory=list)

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

    def note(self, text: str, began: float) -> None:
        """Add a line with the time since `began`."""
        self.notes.append(f"{text} {format_seconds(time.perf_counter() - began)}")


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
        comm.note("ten round trips took", began)
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
        comm.note("isend returned after", began)
    elif partner is not None:
        work = dist.irecv(tensor, partner, group=comm.p2p)
        comm.note("irecv returned after", began)
        matmuls = 0
        while time.perf_counter() - began < comm.delay_s:
            float((matrix @ matrix)[0, 0])  # waits for the device
            matmuls += 1
        comm.note(f"{matmuls:,} matmuls of {_MATMUL_SIDE}×{_MATMUL_SIDE} took", began)
    waiting = time.perf_counter()
    if work is not None:
        work.wait()
        comm.note("wait() took", waiting)
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
    collectives.reduce_scatter_single(part, tensor, group=comm.group)
    yield part


def all_gather(comm: Comm) -> Shown:
    """Every rank gets the tensors of all ranks, in rank order."""
    tensor = comm.numbered(1)
    gathered = torch.empty(comm.world_size, dtype=tensor.dtype, device=comm.device)
    yield tensor
    collectives.all_gather_single(gathered, tensor, group=comm.group)
    yield gathered


def butterfly(comm: Comm) -> Shown:
    """The mean, by sends and receives alone, as with strategy=butterfly: halves, quarters, … and back."""
    tensor = comm.numbered(inner_ranks(comm.world_size))  # one value for each part
    partners = ["–" if swap is None else str(swap.partner) for swap in rounds(comm.rank, comm.world_size)]
    comm.notes.append(f"partners {', '.join(partners + partners[::-1])}")
    yield tensor
    butterfly_all_reduce_mean(tensor, group=comm.p2p)
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


_OF_TWO = (ping_pong, send_recv, isend_irecv)
_OF_ANY = (all_reduce, reduce_scatter, all_gather, butterfly, broadcast, all_to_all)


def collectives_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Run every exchange over every backend; rank 0 writes the page. Raises FrameworkError."""
    with setup_rank(arguments, link) as setup:
        link.rank_status.set_phase(RankPhase.MEETING)
        context, config = setup.context, setup.config
        with process_group(context, config.backend, rendezvous=arguments.rendezvous), link.recording():
            set_timeout(config.backend.timeout, context)
            link.rank_status.set_phase(RankPhase.COLLECTIVES)
            comms = [_connect(name, setup) for name in config.collectives.backends or (context.backend,)]
            exchanges = (barrier, *(_OF_TWO if context.world_size > 1 else ()), *_OF_ANY)
            page = [_who(setup)]
            for exchange in exchanges:
                page += [_show(exchange, comm, setup) for comm in comms]
            link.rank_status.set_phase(RankPhase.CLOSING)
            if context.is_main:
                write_atomically(setup.run_dir.path / PAGE, "\n\n\n".join(page) + "\n")
            collectives.barrier(context)  # no rank leaves while another still needs it


def _connect(backend: str, setup: RankSetup) -> Comm:
    """Make the groups of one backend. Every rank must call it."""
    context, timeout_s = setup.context, setup.config.backend.timeout
    group = new_group(timeout_s, backend=backend, is_monitored=True)
    p2p = new_group(timeout_s, backend=backend)
    device = torch.device("cpu") if backend == dist.Backend.GLOO else context.device
    dist.barrier(group=p2p)  # NCCL connects only now; sends and receives need all ranks to have connected
    return Comm(backend, context.rank, context.world_size, group, p2p, device)


def _show(exchange: Callable[[Comm], Shown], comm: Comm, setup: RankSetup) -> str:
    """Run one exchange twice, since the first run opens connections; return what the second showed on every rank.

    That is what the exchange does, its code, a table with a row for each rank, and the ranks' notes.
    """
    logger.info("%s over %s", exchange.__name__, comm.backend)
    for delay_s in (0.0, setup.config.collectives.delay):  # the first run opens connections
        comm = replace(comm, delay_s=delay_s, notes=[])
        steps = exchange(comm)
        before = next(steps).to("cpu", copy=True)
        dist.barrier(group=comm.group)
        setup.context.wait_for_devices()
        began = time.perf_counter()
        after = next(steps)
        setup.context.wait_for_devices()
        seconds = time.perf_counter() - began
    titles = ("rank", "before", "after", comm.backend)
    row = (str(comm.rank), _values(before), _values(after), format_seconds(seconds))
    shown = collectives.gather_to_all((row, comm.notes), setup.context)
    table = format_table([titles, *(own for own, _ in shown)])
    notes = "\n".join(f"  rank {number}: {'; '.join(own)}" for number, (_, own) in enumerate(shown) if own)
    code = re.split(r"    yield .*\n", inspect.getsource(exchange))[1].rstrip()
    return "\n\n".join(filter(None, (f"{exchange.__name__}\n  {inspect.getdoc(exchange)}", code, table, notes)))


# The page


def _who(setup: RankSetup) -> str:
    """Return a table with a row for each rank: where it is, and its environment variables."""
    place = [socket.gethostname(), str(os.getpid()), ", ".join(map(str, setup.context.devices))]
    own = [str(setup.context.rank), *place, *(os.environ.get(name, "–") for name in VARIABLES)]
    rows = [["rank", "host", "pid", "devices", *VARIABLES], *collectives.gather_to_all(own, setup.context)]
    return f"Who each rank is, and what it reads from its environment (–: not set)\n\n{format_table(rows)}"


def _values(tensor: Tensor) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in tensor.tolist())}]"
