"""A real SLURM cluster: controller and one node daemon per host, on hosts of a network of their own (see `network`).

Everything it writes lies in one folder; its ports, its munge socket and key are its own, so one that the machine runs
is not touched. The daemons are children of the test's process, and end with it even if it is killed. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from tests.helpers import network
from tests.helpers.command import Started
from tests.helpers.network import Host

NUM_NODES = 2
# SLURM is configured with more CPUs than there are; tasks share those.
CPUS_PER_NODE = 8
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "setpriv")
_START_S = 30.0
_END_S = 10.0
_POLL_S = 0.05
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
KillWait=5
UnkillableStepTimeout=10
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@cache
def why_not() -> str | None:
    """Why SLURM can't run here; None where it can."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if lacking:
        return f"no {' and no '.join(lacking)} found. On Debian: apt-get install slurm-wlm munge"
    return network.why_not()


@final
@dataclass(frozen=True)
class Cluster:
    """A running cluster. Commands are typed on its first host, which is also its first node."""

    folder: Path
    hosts: list[Host]

    @contextmanager
    def started(self, *command: str, cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[Started]:
        """A command of SLURM, running; at the end its job is cancelled if it is still there."""
        environment = {**self.environment, **(env or {})}
        try:
            with self.hosts[0].started(*command, cwd=cwd, env=environment) as started:
                yield started
        finally:
            self._end_jobs()

    def run(
        self, *command: str, cwd: Path, timeout: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The command, once it has ended. Fails the test if it takes longer or leaves a process behind."""
        with self.started(*command, cwd=cwd, env=env) as started:
            status = started.wait(timeout=timeout)
            started.assert_all_gone()
            return subprocess.CompletedProcess(command, status, started.stdout(), started.stderr())

    def srun(
        self, *options: str, cwd: Path, timeout: float = 90.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`srun` with these options and a command, until all its tasks have ended."""
        return self.run("srun", *options, cwd=cwd, timeout=timeout, env=env)

    def scancel(self, *options: str) -> None:
        """Signal or cancel jobs; returns once SLURM has the request."""
        self._ask("scancel", *options)

    def requeue(self, job: str) -> None:
        """Put a job, or a task `JOB_N` of an array, back in the queue; one that is about to end once it has."""
        deadline = time.monotonic() + _START_S
        while self._ask("scontrol", "requeue", job) is None:
            assert time.monotonic() < deadline, f"{job} couldn't be requeued\n{self.log()}"
            time.sleep(_POLL_S)

    def log(self) -> str:
        """What the daemons have written; for a test that fails."""
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def wait_until_idle(self, *, timeout: float) -> None:
        """Return once every node waits for work."""
        idle = "idle\n" * NUM_NODES
        self._wait_for(idle, "sinfo", "--noheader", "--Node", "--format=%T", timeout=timeout)

    def wait_for_jobs(self, *, timeout: float) -> None:
        """Return once no job is running or waiting, one that was put back in the queue neither."""
        self._wait_for("", "squeue", "--noheader", timeout=timeout)

    def _end_jobs(self) -> None:
        # A job that is over by now makes scancel fail, which is no matter.
        self._ask("scancel", "--signal=KILL", "--full", "--user=root")
        self._ask("scancel", "--user=root")
        self.wait_until_idle(timeout=_START_S)

    def _wait_for(self, wanted: str, *command: str, timeout: float) -> None:
        """Return once a command prints what is wanted; a controller that doesn't answer is asked again."""
        deadline = time.monotonic() + timeout
        while (printed := self._ask(*command)) != wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{command[0]} prints {printed!r} after {timeout} s\n{self.log()}")
            time.sleep(_POLL_S)

    def _ask(self, *command: str) -> str | None:
        """Return what a short command prints; None if it fails, as where the controller doesn't answer."""
        environment = {**os.environ, **self.environment}
        whole = self.hosts[0].command(*command)
        answer = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=_START_S)
        return answer.stdout if answer.returncode == 0 else None


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster of two nodes with nothing to do; at the end no process of it is left."""
    with network.network(NUM_NODES) as hosts, ExitStack() as daemons:
        given = Cluster(folder, hosts)
        _write_files(given)
        try:
            _start_daemons(given, daemons)
            given.wait_until_idle(timeout=_START_S)
        except AssertionError as error:
            raise AssertionError(f"SLURM didn't start: {error}\n{given.log()}") from None
        yield given


def _write_files(cluster: Cluster) -> None:
    folder = cluster.folder
    hosts = cluster.hosts
    # munged wants its socket where anybody could reach it.
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS_PER_NODE} RealMemory=1000 State=UNKNOWN"
        for host in hosts
    )
    controller = f"{hosts[0].name}({hosts[0].address})"
    for host in hosts:
        (folder / host.name).mkdir()
    # No controller is used, so that none need be mounted.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, controller=controller, nodes=nodes))


def _start_daemons(cluster: Cluster, daemons: ExitStack) -> None:
    folder = cluster.folder
    first = cluster.hosts[0]
    files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
    _start(daemons, "munged", cluster, command=["munged", "--foreground", "--force", *options])
    _wait_for_file(folder / "munge.socket")
    _start(daemons, "slurmctld", cluster, command=first.command("slurmctld", "-D", "-i"))
    for host in cluster.hosts:
        _start(daemons, f"slurmd-{host.name}", cluster, command=host.command("slurmd", "-D", "-N", host.name))


def _start(daemons: ExitStack, name: str, cluster: Cluster, *, command: list[str]) -> None:
    """Start a daemon that dies with this process; it is ended when `daemons` is closed."""
    with (cluster.folder / f"{name}.printed.log").open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *command],
            env={**os.environ, **cluster.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    daemons.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} isn't there after {_START_S} s"
        time.sleep(_POLL_S)
