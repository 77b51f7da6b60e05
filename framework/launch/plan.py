"""What a launcher is given and returns, and what it gives to each rank: plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from framework.config.schema import InitMethod
from framework.config.topology import Topology
from framework.launch.external_ranks import ExternalRanks
from framework.launch.run_spec import RunSpec
from framework.monitoring.node_monitor import Limits
from framework.monitoring.rank_status import RankStatus
from framework.monitoring.report import FailureReport
from framework.system.files import read_text
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.distributed.store import RunStore
    from framework.launch.fork_server import ForkServer


class RunProgress(NamedTuple):
    """How far a training is, as its rank 0 shows it."""

    # Optimizer steps done.
    step: int
    # Of the whole run; 0 if that isn't known.
    total_steps: int
    # The number of the last validation, counted from 1 over all starts of the run, 0 before there is one since the last
    # start; and what it gave for `checkpoint.monitor`.
    validations: int
    validated_value: float


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """One node's place in a run, known before there is a run directory."""

    topology: Topology
    limits: Limits
    init_method: InitMethod
    # The fork server to use; None: one is started if the launcher needs it.
    fork_server: ForkServer | None
    # If rank 0's output goes to the terminal as well as to its log.
    terminal: bool
    # The index of this machine.
    node: int = 0
    # Host and port of the store on node 0; None on one node.
    endpoint: tuple[str, int] | None = None
    max_restarts: int = 0
    # Ending it at any moment loses nothing that was saved: resuming does what is left.
    is_resumable: bool = False
    # The arguments of the command. They must be the same on every node.
    arguments: tuple[str, ...] = ()
    # Set in rank 0 of ranks that something else has started.
    external_ranks: ExternalRanks | None = None
    # True: a training doesn't evaluate the test part at its end.
    skips_test: bool = False
    # Called a few times a second while the ranks run, on the node of rank 0.
    on_progress: Callable[[RunProgress], None] | None = None


@dataclass(frozen=True, kw_only=True)
class LaunchPlan(NodeSetup):
    """One run to start: `entry` ("module:function") is called in every rank as `entry(RankArguments, MonitorLink)`.

    The entry returns None when its work is done, EXIT_STOPPED if it was stopped on request and can be resumed.
    """

    entry: str
    run_dir: RunDir
    # Names of modules that every rank needs besides the fork server's preload.
    names: tuple[str, ...] = ()

    def spec(self) -> RunSpec:
        """Return what other nodes, or other external ranks, need to run their part."""
        secrets_file = self.run_dir.secrets_file
        secrets = ""
        if secrets_file.exists():
            secrets = read_text(secrets_file)
        return RunSpec(
            entry=self.entry,
            run_dir=str(self.run_dir.path),
            topology=self.topology,
            limits=self.limits,
            is_resumable=self.is_resumable,
            config=read_text(self.run_dir.config_file),
            overrides=read_text(self.run_dir.overrides_file),
            secrets=secrets,
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit status, and a report if it failed."""

    status: int
    failure: FailureReport | None = None
    # What the rank raised, if it ran in this process.
    error: Exception | None = None
    # Ranks that others waited for and that caught up.
    late: tuple[Mapping[str, Any], ...] = ()
    # It was ended on request before its first step.
    stopped_early: bool = False


@dataclass(frozen=True)
class RankArguments:
    """What one rank is given; it reads everything else from the run directory."""

    run_dir: str
    topology: Topology
    rank: int
    # URL for `init_process_group`; None for a group of one without a store.
    rendezvous: str | None
    # How often the ranks were restarted after a failure; a restart resumes from the last checkpoint.
    attempt: int = 0
    # True: a training doesn't evaluate the test part at its end.
    skips_test: bool = False

    @property
    def local_rank(self) -> int:
        return self.rank % self.topology.procs_per_node

    @property
    def node_rank(self) -> int:
        return self.rank // self.topology.procs_per_node


class RecordFailure(Protocol):
    def __call__(self, error: BaseException, /, *, memory: Mapping[str, Any] | None = None) -> None:
        """Tell the monitor what ends this rank. memory: what it had allocated, if it ran out of memory."""


def _record_nothing(_error: BaseException, *, memory: Mapping[str, Any] | None = None) -> None:
    """Leave it to the command, in whose process the rank runs."""


@final
@dataclass(frozen=True)
class MonitorLink:
    """A rank's connections to the monitor: its status, and the run's store for requests to stop.

    `open_store` opens a new connection to the store; None for a rank in the command's own process.
    `record_failure` tells the monitor what ends this rank; the first call counts.
    """

    rank_status: RankStatus
    open_store: Callable[[], RunStore] | None = None
    record_failure: RecordFailure = _record_nothing

    @property
    def is_watched(self) -> bool:
        """True if a launcher monitors the rank; False with `launcher=in_process`."""
        return self.open_store is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record an exception that leaves the block, before anything around it is closed.

        A library may abort the process while it closes: NCCL's watchdog does so 0.1 s after a GPU error.
        """
        try:
            yield
        except BaseException as error:
            self.record_failure(error)
            raise
