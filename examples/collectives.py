"""What the collectives of torch.distributed do: each rank's tensor before and after, one exchange after another.

    torchrun --nproc-per-node=3 examples/collectives.py

Read the functions from `barrier` to `all_to_all`. Each makes its tensors, yields what is shown as "before", makes the
plain call, and yields what is shown as "after". The time is taken between the two.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed import collectives
from framework.distributed.butterfly import butterfly_all_reduce_mean, inner_ranks, rounds
from framework.system.formatting import format_seconds, format_table

VARIABLES = ("LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = timedelta(minutes=5)
MATMUL_SIDE = 256


@dataclass(frozen=True)
class Comm:
    """This rank's groups over one backend."""

    backend: str
    rank: int
    world_size: int
    # For collectives.
    group: dist.ProcessGroup
    # For sends and receives.
    p2p: dist.ProcessGroup
    # Where the backend's tensors are.
    device: torch.device
    # How late the sender of isend/irecv is.
    delay_s: float = 0.0
    # Lines to show below the tensors.
    notes: list[str] = field(default_factory=list)

    @property
    def partner(self) -> int | None:
        """The other rank of this one's pair: 0 and 1, 2 and 3, and so on; None for a last one that is alone."""
        other = self.rank ^ 1
        return other if other < self.world_size else None

    def numbered(self, count: int) -> Tensor:
        """Return values that show whose they are: 20, 21, 22, … on rank 2 (for more than ten values 200, 201, …)."""
        digits = len(str(count - 1))
        begin = self.rank * max(10, 10**digits)
        return torch.arange(begin, begin + count, dtype=torch.float64, device=self.device)

    def note(self, text: str, began: float) -> None:
        """Add a line with the time since `began`."""
        self.notes.append(f"{text} {format_seconds(time.perf_counter() - began)}")


Shown = Iterator[Tensor]


def barrier(comm: Comm) -> Shown:
    """Ranks draw a number, one after the other; none passes a barrier before all have reached it."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    number = torch.zeros(1, device=comm.device)
    yield number
    for turn in range(comm.world_size):
        if turn == comm.rank:
            drawn = store.add("number", 1)
            number += (drawn - 1) % comm.world_size + 1
        dist.barrier(group=comm.group)
    yield number


def ping_pong(comm: Comm) -> Shown:
    """Ranks 0 and 1, 2 and 3, … send a tensor back and forth ten times; the odd rank adds 1 each time."""
    tensor = torch.zeros(1, device=comm.device)
    partner = comm.partner
    yield tensor
    began = time.perf_counter()
    if partner is not None:
        for _ in range(10):
            if comm.rank % 2 == 0:
                dist.send(tensor, partner, group=comm.p2p)
                dist.recv(tensor, partner, group=comm.p2p)
            else:
                dist.recv(tensor, partner, group=comm.p2p)
                tensor += 1
                dist.send(tensor, partner, group=comm.p2p)
        comm.note("ten round trips took", began)
    yield tensor


def send_recv(comm: Comm) -> Shown:
    """Around the ring from rank 0: receive a sum, add this rank's value, send it on. Both calls block."""
    tensor = torch.full((1,), comm.rank + 1.0, device=comm.device)
    received = torch.zeros_like(tensor)
    previous = (comm.rank - 1) % comm.world_size
    following = (comm.rank + 1) % comm.world_size
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
    """The even rank of a pair sends late, by --delay seconds; the odd one computes while it receives."""
    tensor = comm.numbered(2)
    matrix = torch.rand(MATMUL_SIDE, MATMUL_SIDE, device=comm.device)
    partner = comm.partner
    yield tensor
    began = time.perf_counter()
    if partner is None:
        work = None
    elif comm.rank % 2 == 0:
        time.sleep(comm.delay_s)
        work = dist.isend(tensor, partner, group=comm.p2p)
        comm.note("isend returned after", began)
    else:
        work = dist.irecv(tensor, partner, group=comm.p2p)
        comm.note("irecv returned after", began)
        matmuls = 0
        while time.perf_counter() - began < comm.delay_s:
            # Reading a value waits for the device.
            float((matrix @ matrix)[0, 0])
            matmuls += 1
        comm.note(f"{matmuls:,} matmuls of {MATMUL_SIDE}×{MATMUL_SIDE} took", began)
    if work is not None:
        waiting = time.perf_counter()
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
    # One value for each part.
    tensor = comm.numbered(inner_ranks(comm.world_size))
    partners = []
    for swap in rounds(comm.rank, comm.world_size):
        partners.append("–" if swap is None else str(swap.partner))
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


OF_TWO = (ping_pong, send_recv, isend_irecv)
OF_ANY = (all_reduce, reduce_scatter, all_gather, butterfly, broadcast, all_to_all)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", choices=("gloo", "nccl"), default=["gloo"])
    parser.add_argument("--delay", type=float, default=1.0, help="seconds that the sender of isend/irecv is late")
    options = parser.parse_args()

    # The ranks' default group exchanges what is shown.
    dist.init_process_group("gloo", timeout=TIMEOUT)
    comms = [connect(backend) for backend in options.backends]
    exchanges: list[Callable[[Comm], Shown]] = [barrier]
    if dist.get_world_size() > 1:
        exchanges += OF_TWO
    exchanges += OF_ANY

    blocks = [who_each_rank_is()]
    for exchange in exchanges:
        for comm in comms:
            blocks.append(show(exchange, comm, delay_s=options.delay))
    if dist.get_rank() == 0:
        print("\n\n\n".join(blocks))
    dist.destroy_process_group()


def connect(backend: str) -> Comm:
    """Make the groups of one backend. Every rank must call it."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    group: Any = dist.new_group(backend=backend, timeout=TIMEOUT)
    p2p: Any = dist.new_group(backend=backend, timeout=TIMEOUT)
    # NCCL connects only now; sends and receives need all ranks to have connected.
    dist.barrier(group=p2p)
    return Comm(backend, dist.get_rank(), dist.get_world_size(), group, p2p, device)


def show(exchange: Callable[[Comm], Shown], comm: Comm, *, delay_s: float) -> str:
    """Run one exchange twice, since the first run opens connections; return what the second showed on every rank.

    That is what the exchange does, its code, a table with a row for each rank, and the ranks' notes.
    """
    run(exchange, comm)
    comm = replace(comm, delay_s=delay_s, notes=[])
    before, after, seconds = run(exchange, comm)

    row = (str(comm.rank), values(before), values(after), format_seconds(seconds))
    rows: list[tuple[str, ...]] = [("rank", "before", "after", comm.backend)]
    notes = []
    for rank, (rank_row, rank_notes) in enumerate(gather((row, comm.notes))):
        rows.append(rank_row)
        if rank_notes:
            notes.append(f"  rank {rank}: {'; '.join(rank_notes)}")

    # The code between the two yields.
    code = re.split(r"    yield .*\n", inspect.getsource(exchange))[1].rstrip()
    parts = [f"{exchange.__name__}\n  {inspect.getdoc(exchange)}", code, format_table(rows)]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def run(exchange: Callable[[Comm], Shown], comm: Comm) -> tuple[Tensor, Tensor, float]:
    """Return the tensors before and after an exchange, and how many seconds it took."""
    tensors = exchange(comm)
    before = next(tensors).to("cpu", copy=True)
    dist.barrier(group=comm.group)
    wait_for(comm.device)
    began = time.perf_counter()
    after = next(tensors)
    wait_for(comm.device)
    return before, after, time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def who_each_rank_is() -> str:
    """Return a table with a row for each rank: where it is, and its environment variables."""
    variables = [os.environ.get(name, "–") for name in VARIABLES]
    row = [str(dist.get_rank()), socket.gethostname(), str(os.getpid()), *variables]
    rows = [["rank", "host", "pid", *VARIABLES], *gather(row)]
    return f"Who each rank is, and what it reads from its environment (–: not set)\n\n{format_table(rows)}"


def values(tensor: Tensor) -> str:
    return f"[{', '.join(f'{value:.6g}' for value in tensor.tolist())}]"


if __name__ == "__main__":
    main()
