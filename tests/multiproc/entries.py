"""What the ranks of the launch tests run: named by string, as the engine is, and mostly without torch."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from framework.config.schema import BackendConfig, BackendName, Duration, InitMethod
from framework.errors import ConfigError
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.pulse import Phase

LONG_S = 120.0
"""Far longer than any test waits: who sleeps so long has to be ended."""


def say_hello(rank: RankArguments, _link: Link) -> None:
    print(f"hello from rank {rank.rank} at {rank.rendezvous}", flush=True)


def add_up(rank: RankArguments, _link: Link) -> None:
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


def rank_1_raises(rank: RankArguments, _link: Link) -> None:
    if rank.rank == 1:
        raise ValueError("the sky is falling")
    time.sleep(LONG_S)


def all_refuse(_rank: RankArguments, _link: Link) -> None:
    raise ConfigError("optimizer.lr=lots isn't a number")


def leave_the_others(rank: RankArguments, _link: Link) -> None:
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


def exit_at_once(_rank: RankArguments, _link: Link) -> None:
    sys.exit(0)


def leave_alone(rank: RankArguments, _link: Link) -> None:
    """Nobody notices: the other rank does its work without a group."""
    if rank.rank == 1:
        os._exit(0)


def raise_unspeakable(_rank: RankArguments, _link: Link) -> None:
    class UnspeakableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise UnspeakableError


def fork_a_process(rank: RankArguments, _link: Link) -> None:
    """A process of the user's own that ends as it likes."""
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    os.waitpid(pid, 0)
    Path(rank.run_dir, "forked").touch()


def misbehave_in_a_collective(rank: RankArguments, link: Link) -> None:
    """Rank 1 does what the file `how` says in phase `data` of step 6, while its peers wait for 3 s at most."""
    import torch
    import torch.distributed as dist

    from framework.distributed.context import make_context
    from framework.distributed.group import process_group

    how, pulse = Path(rank.run_dir, "how").read_text(), link.pulse
    if how == "never comes" and rank.rank == 1:
        _sleep(LONG_S)
    context = make_context(rank.topology, node_rank=0, local_rank=rank.rank, backend_name=BackendName.GLOO)
    limit = Duration(LONG_S if how == "sleep unnoticed" else 3.0)
    settings = BackendConfig(name=BackendName.GLOO, init_method=InitMethod.ENV, init_timeout=limit, timeout=limit)
    pulse.at(Phase.MEETING)
    with process_group(context, settings, rendezvous=rank.rendezvous):
        for step in range(1, 11):
            pulse.at(Phase.DATA)
            if rank.rank == 1 and step == 6:
                _misbehave(how)
            pulse.at(Phase.BACKWARD)
            dist.all_reduce(torch.ones(1000))
            pulse.stepped(step)
        pulse.at(Phase.CLOSING)


def _misbehave(how: str) -> None:
    """sleep, late, or the name of a signal; `out of memory` needs the folder of a control group in SMALL_GROUP."""
    if how.startswith("sleep"):
        _sleep(LONG_S)
    elif how == "late":
        _sleep(2.0)
    elif how == "out of memory":
        Path(os.environ["SMALL_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
        kept = []
        while True:
            kept.append(bytearray(1 << 20))
    else:
        os.kill(os.getpid(), getattr(signal, how))


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def rank_0_raises_rank_1_ignores_sigterm(rank: RankArguments, _link: Link) -> None:
    ready = Path(rank.run_dir, "ignoring")
    if rank.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        time.sleep(LONG_S)
    while not ready.exists():
        time.sleep(0.01)
    raise ValueError("first")


def show_environment(rank: RankArguments, _link: Link) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GIVEN", "GONE")
    lines = [f"{name}={os.environ.get(name)}" for name in names]
    Path(rank.run_dir, f"environment_{rank.rank}").write_text("\n".join([*lines, f"cwd={Path.cwd()}"]))


def write_everywhere(_rank: RankArguments, _link: Link) -> None:
    """Python's streams, and the file descriptors that C++ code writes to."""
    print("printed", flush=True)
    print("complained", file=sys.stderr, flush=True)
    subprocess.run(["/bin/sh", "-c", "echo from a descriptor"], check=True)


def wait_long(rank: RankArguments, _link: Link) -> None:
    """Say so, and wait to be ended."""
    Path(rank.run_dir, f"waiting_{rank.rank}").touch()
    time.sleep(LONG_S)


def stay(rank: RankArguments, _link: Link) -> int:
    """Rank 1 does its work and doesn't leave, as the file `how` says: `thread` or `atexit`, and the status to give."""
    how, status = Path(rank.run_dir, "how").read_text().split()
    if rank.rank == 1:
        Path(rank.run_dir, "staying").write_text(str(os.getpid()))
        if how == "thread":
            threading.Thread(target=_sleep, args=(LONG_S,)).start()
        else:
            atexit.register(_sleep, LONG_S)
    return int(status)


def stay_while_another_works(rank: RankArguments, _link: Link) -> None:
    """Rank 1 is done at once and has a thread that ends after rank 0's work, which takes longer than leaving may."""
    if rank.rank == 0:
        time.sleep(12.0)
        return

    def end_late() -> None:
        time.sleep(14.0)
        Path(rank.run_dir, "left_by_itself").touch()

    threading.Thread(target=end_late).start()


def wait_for_go(rank: RankArguments, _link: Link) -> None:
    """Say so, and be done once there is a file `go`."""
    Path(rank.run_dir, f"waiting_{rank.rank}").touch()
    while not Path(rank.run_dir, "go").exists():
        time.sleep(0.01)
