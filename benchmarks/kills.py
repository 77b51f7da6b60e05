"""Random kills of any one process of a run: does all of it end soon, and with exit status 0 only if it had finished?

    python -m benchmarks.kills --runs 60 --seed 0 [--launchers local,nodes,torchrun,srun] [--only rank]

Each run trains a small model with loader workers. At a random moment, from the command's start to its end, one process
of it gets SIGKILL: the command, the fork server, the run's server, which is forked from it and forks the ranks, a rank
or a worker; under torchrun its agent, too. (srun's own processes aren't killed: what happens then is SLURM's decision.)
Two of three runs never end by themselves. Afterwards every command must end within the time-outs, and its exit status
mustn't be 0 unless run.json says "finished". No process may be left. Without its fork server a run goes on, or starts
another one: such a run must end at a Ctrl-C.

    local     one command                        nodes     a command on each of two hosts (network namespaces; root)
    torchrun  two ranks of one agent             srun      four tasks on two such hosts (slurm-wlm, munge, root)
    plain     a DDP loop without the framework, started by torchrun on two hosts: for comparison

Seconds are from the kill until no process was left. `--only` waits for a process of that kind.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import final

import psutil

from benchmarks.arguments import some_of
from tests.helpers import trouble
from tests.helpers.command import Started, started_program
from tests.helpers.network import Host, network
from tests.helpers.slurm import Cluster, cluster
from tests.helpers.trouble import Fault

# The processes of a run, by the number of their ancestors in it.
ROLES = {
    "local": ("command", "fork server", "run server", "rank", "worker"),
    "nodes": ("command", "fork server", "run server", "rank", "worker"),
    "torchrun": ("torchrun", "rank", "worker"),
    "srun": ("rank", "worker"),
    "plain": ("torchrun", "rank"),
}
TIMEOUT_S = 8.0
INIT_TIMEOUT_S = 30.0
# A node may wait for one that is gone, and then for its report.
ENDS_S = INIT_TIMEOUT_S + 60.0
GONE_S = 20.0
# By then the ranks of another fork server train.
_REPLACED_S = 10.0
_START_S = 240.0
FRAMEWORK = (
    sys.executable,
    "-m",
    "framework",
    "recipe=trouble",
    "data.num_workers=1",
    f"backend.timeout={TIMEOUT_S}",
    f"backend.init_timeout={INIT_TIMEOUT_S}",
)
ENDLESS = (
    "trainer.max_steps=1000000",
    "trainer.max_epochs=1000000",
    "trainer.val_check_interval=1000",
    "checkpoint.every_n_steps=1000",
)
PLAIN = """
import sys, time, torch
from torch import distributed, nn
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
for step in range(1_000_000 if sys.argv[1:] else 20):
    model(torch.ones(4, 4)).sum().backward()
    time.sleep(0.05)
distributed.destroy_process_group()
"""


@dataclass(frozen=True)
class Case:
    """One run."""

    seed: int
    launcher: str
    # The run never ends by itself.
    endless: bool
    # When the kill comes, as a share of the time that an uninterrupted run takes.
    share: float

    def __str__(self) -> str:
        length = "endless" if self.endless else "short"
        return f"seed {self.seed}: {self.launcher}, {length}, at {self.share:.2f}"


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    case: Case
    # What was killed; empty if the run had ended before.
    role: str
    # From the kill until no process was left.
    seconds: float
    # One line for each thing that wasn't as it must be.
    wrong: tuple[str, ...]


def draw(seed: int, launcher: str) -> Case:
    """Return the case of a seed: always the same one."""
    choose = random.Random(seed)
    endless = choose.random() < 2 / 3
    if endless:
        share = choose.uniform(0.0, 1.2)
    else:
        share = choose.uniform(0.6, 1.0)
    return Case(seed, launcher, endless, share)


@final
class Machines:
    """Hosts and a SLURM cluster, made when they are first needed. `commands` starts a run on them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._seconds: dict[str, float] = {}

    @cached_property
    def hosts(self) -> list[Host]:
        return self._stack.enter_context(network(2))

    @cached_property
    def cluster(self) -> Cluster:
        return self._stack.enter_context(cluster(Path(self._stack.enter_context(tempfile.TemporaryDirectory()))))

    def seconds(self, launcher: str) -> float:
        """Return how long an uninterrupted run takes."""
        if launcher not in self._seconds:
            with self.commands(launcher, endless=False) as (commands, _):
                began_s = time.monotonic()
                for command in commands:
                    assert command.wait(timeout=_START_S) == 0, command.printed()
                self._seconds[launcher] = time.monotonic() - began_s
        return self._seconds[launcher]

    @contextmanager
    def commands(self, launcher: str, *, endless: bool) -> Iterator[tuple[list[Started], Path]]:
        """Yield the commands of a run, and the folder they were typed in."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            trouble.write_recipe(folder, Fault(pause=0.05))
            (folder / "plain.py").write_text(PLAIN)
            framework = FRAMEWORK + ENDLESS if endless else FRAMEWORK
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
            if launcher == "local":
                contexts = [started_program(*framework, "topology.procs_per_node=2", cwd=folder)]
            elif launcher == "torchrun":
                contexts = [started_program(*torchrun, "--standalone", *framework[1:], cwd=folder)]
            elif launcher == "srun":
                contexts = [self.cluster.started("srun", "--nodes=2", "--ntasks-per-node=2", *framework, cwd=folder)]
            elif launcher == "nodes":
                at = f"topology.rdzv_endpoint={self.hosts[0].address}:29400"
                both = (*framework, "topology=multi_node", "topology.nnodes=2", "topology.procs_per_node=2", at)
                contexts = [
                    host.started(*both, f"topology.node_rank={node}", cwd=folder)
                    for node, host in enumerate(self.hosts)
                ]
            else:
                meet = ("--nnodes=2", f"--master-addr={self.hosts[0].address}", "--master-port=29400")
                script = ("plain.py", "endless") if endless else ("plain.py",)
                contexts = [
                    host.started(*torchrun, *meet, f"--node-rank={node}", *script, cwd=folder)
                    for node, host in enumerate(self.hosts)
                ]
            yield [stack.enter_context(context) for context in contexts], folder


def run(case: Case, machines: Machines, *, only: str | None) -> Result:
    """Do it in a folder of its own, and judge it."""
    choose = random.Random(case.seed)
    pause_s = case.share * machines.seconds(case.launcher)
    role = ""
    killed_s = time.monotonic()
    with machines.commands(case.launcher, endless=case.endless) as (commands, folder):
        try:
            time.sleep(pause_s)
            processes = _wait_for(only, case.launcher, commands)
            if processes:
                role = choose.choice(sorted(processes))
                with suppress(psutil.NoSuchProcess):
                    choose.choice(processes[role]).kill()
            killed_s = time.monotonic()
            # Such a run goes on, and must end at a Ctrl-C.
            if role == "fork server" and case.endless:
                time.sleep(_REPLACED_S)
                for command in commands:
                    command.process.send_signal(signal.SIGINT)
            statuses = [command.wait(timeout=ENDS_S) for command in commands]
            for command in commands:
                command.assert_all_gone(within_s=GONE_S)
        except AssertionError as error:
            return Result(case, role, time.monotonic() - killed_s, (str(error),))
        seconds = time.monotonic() - killed_s
        if 0 in statuses and case.launcher != "plain" and not _is_finished(folder):
            printed = "\n".join(command.printed() for command in commands)
            return Result(case, role, seconds, (f"exit statuses {statuses}, though it hadn't finished", printed))
        return Result(case, role, seconds, ())


def _wait_for(only: str | None, launcher: str, commands: Sequence[Started]) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by their roles, once there are some; only: those of this role.

    They are none if the run has ended.
    """
    while True:
        processes = _processes(launcher, commands)
        if only is not None:
            processes = {only: processes[only]} if only in processes else {}
        if processes or not any(_runs(command) for command in commands):
            return processes
        time.sleep(0.05)


def _processes(launcher: str, commands: Sequence[Started]) -> dict[str, list[psutil.Process]]:
    """Return the living Python processes of a run by their roles; others are srun's, or ask git for a commit."""
    by_role: dict[str, list[psutil.Process]] = {}
    for started in commands:
        processes = started.processes()
        pids = {process.pid for process in processes}
        for process in processes:
            try:
                # Torch gives some of its processes other names.
                if "python" not in "".join(process.cmdline()[:1]):
                    continue
                depth = sum(parent.pid in pids for parent in process.parents())
            except psutil.NoSuchProcess:
                continue
            if depth < len(ROLES[launcher]):
                by_role.setdefault(ROLES[launcher][depth], []).append(process)
    return by_role


def _runs(started: Started) -> bool:
    return started.process.poll() is None


def _is_finished(folder: Path) -> bool:
    return any('"status": "finished"' in file.read_text() for file in folder.glob("outputs/*/*/run.json"))


def table(results: Sequence[Result]) -> str:
    """Return Markdown: per launcher and kind of process how many runs were right, and how long they took to end."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in sorted(results, key=_place):
        groups.setdefault((result.case.launcher, result.role), []).append(result)

    lines = ["| launcher | killed | runs | right | median, s | slowest, s |", "|---|---|---|---|---|---|"]
    for (launcher, role), group in groups.items():
        num_right = sum(not result.wrong for result in group)
        killed = role or "nothing: it had ended"
        times = "– | –"
        if role:
            seconds = [result.seconds for result in group]
            times = f"{median(seconds):.1f} | {max(seconds):.1f}"
        lines.append(f"| {launcher} | {killed} | {len(group)} | {num_right} | {times} |")
    return "\n".join(lines)


def _place(result: Result) -> tuple[int, int]:
    """Return where a result stands in the table: by launcher and role, those without a kill last."""
    launcher = result.case.launcher
    roles = [*ROLES[launcher], ""]
    return list(ROLES).index(launcher), roles.index(result.role)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if any run was wrong."""
    asked = _arguments(argv)
    results: list[Result] = []
    with ExitStack() as stack:
        machines = Machines(stack)
        for launcher in asked.launchers:
            for seed in range(asked.seed, asked.seed + asked.runs):
                result = run(draw(seed, launcher), machines, only=asked.only)
                results.append(result)
                word = "WRONG" if result.wrong else "right"
                killed = result.role or "nothing"
                print(f"{word} {result.case}: {killed} killed, {result.seconds:.1f} s", flush=True)
                for line in result.wrong:
                    print(f"  {line}", flush=True)
    print(table(results))
    return 1 if any(result.wrong for result in results) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="with each launcher")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next one has the next number")
    parser.add_argument("--launchers", type=some_of(ROLES), default=["local", "nodes", "torchrun", "srun"])
    parser.add_argument("--only", choices=sorted(set().union(*ROLES.values())))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
