"""What the ranks of the launch tests run: named by string, as the engine is, and mostly without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from framework.config.schema import BackendConfig, BackendName, Duration, InitMethod
from framework.errors import ConfigError
from framework.launch.plan import RankArguments

LONG_S = 120.0
"""Far longer than any test waits: who sleeps so long has to be ended."""


def say_hello(rank: RankArguments) -> None:
    print(f"hello from rank {rank.rank} at {rank.rendezvous}", flush=True)


def add_up(rank: RankArguments) -> None:
    """Meet the others over the rendezvous and add one number each."""
    import torch
    import torch.distributed as dist

    world_size = rank.topology.world_size
    dist.init_process_group(
        "gloo",
        init_method=rank.rendezvous,
        rank=rank.rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    total = torch.tensor([float(rank.rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    Path(rank.run_dir, f"total_{rank.rank}").write_text(str(total.item()))


def rank_1_raises(rank: RankArguments) -> None:
    if rank.rank == 1:
        raise ValueError("the sky is falling")
    time.sleep(LONG_S)


def all_refuse(_rank: RankArguments) -> None:
    raise ConfigError("optimizer.lr=lots isn't a number")


def leave_the_others(rank: RankArguments) -> None:
    """Rank 1 ends as the file `how` says while its peers are inside a collective of the process group."""
    import torch
    import torch.distributed as dist

    from framework.distributed.context import make_context
    from framework.distributed.group import process_group

    context = make_context(rank.topology, node_rank=0, local_rank=rank.rank, backend_name=BackendName.GLOO)
    limit = Duration(30.0)
    settings = BackendConfig(name=BackendName.GLOO, init_method=InitMethod.ENV, init_timeout=limit, timeout=limit)
    with process_group(context, settings, rendezvous=rank.rendezvous):
        for step in range(1000):
            if rank.rank == 1 and step == 5:
                time.sleep(0.1)  # the others are waiting by now
                _end(Path(rank.run_dir, "how").read_text())
            dist.all_reduce(torch.ones(1000))


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "_exit":
        os._exit(0)
    elif how == "exit":
        sys.exit(0)
    raise ValueError("a mistake of its own")


def exit_at_once(_rank: RankArguments) -> None:
    sys.exit(0)


def leave_alone(rank: RankArguments) -> None:
    """Nobody notices: the other rank does its work without a group."""
    if rank.rank == 1:
        os._exit(0)


def raise_unspeakable(_rank: RankArguments) -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise UnspeakableError


def fork_a_process(rank: RankArguments) -> None:
    """A process of the user's own that ends as it likes."""
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    os.waitpid(pid, 0)
    Path(rank.run_dir, "forked").touch()


def rank_0_raises_rank_1_ignores_sigterm(rank: RankArguments) -> None:
    ready = Path(rank.run_dir, "ignoring")
    if rank.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        time.sleep(LONG_S)
    while not ready.exists():
        time.sleep(0.01)
    raise ValueError("first")


def show_environment(rank: RankArguments) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GIVEN", "GONE")
    lines = [f"{name}={os.environ.get(name)}" for name in names]
    Path(rank.run_dir, f"environment_{rank.rank}").write_text("\n".join([*lines, f"cwd={Path.cwd()}"]))


def write_everywhere(_rank: RankArguments) -> None:
    """Python's streams, and the file descriptors that C++ code writes to."""
    print("printed", flush=True)
    print("complained", file=sys.stderr, flush=True)
    subprocess.run(["/bin/sh", "-c", "echo from a descriptor"], check=True)


def wait_long(rank: RankArguments) -> None:
    """Say so, and wait to be ended."""
    Path(rank.run_dir, f"waiting_{rank.rank}").touch()
    time.sleep(LONG_S)
