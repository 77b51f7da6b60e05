"""The launcher for ranks that torchrun, SLURM's srun or a Kubernetes PyTorchJob have started.

Every process is the command itself. Rank 0 composes and checks as usual, and sends the others what to run; they have
imported torch meanwhile. Then each runs the entry in its own process.

The store is hosted by torchrun's agent if there is one, otherwise by rank 0, which then exits last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import TextIO, final

from framework.config.assets import import_from_working_dir
from framework.config.schema import Config
from framework.config.topology import Topology, resolve_topology
from framework.config.values import seconds_of
from framework.distributed.store import open_run_store
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    ConfigError,
    FrameworkError,
    StoppedBySignalError,
    TopologyError,
)
from framework.launch.base import Launcher, Part
from framework.launch.child import log_to, silence_compiled_code
from framework.launch.cluster_environment import ClusterEnvironment, typed_value
from framework.launch.external_monitor import ExternalMonitor
from framework.launch.external_ranks import ExternalRanks
from framework.launch.plan import LaunchPlan, MonitorLink, NodeSetup, Outcome, RankArguments
from framework.launch.rank_environment import network_environment, rank_environment
from framework.launch.rendezvous import WAIT_S
from framework.launch.run_spec import RunSpec, make_visible
from framework.launch.worker import run_entry
from framework.monitoring.rank_status import RankStatus, heartbeat
from framework.system.formatting import format_count
from framework.system.hardware import count_gpus, openmp_environment
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown
from framework.system.signals import SCHEDULER_SIGNALS, catching_signals, die_with_parent

# Beyond rank 0's own time-out, so that rank 0 is the first to print what is wrong.
_MARGIN_S = 10.0


def run_external(
    cluster: ClusterEnvironment, arguments: Sequence[str], *, command: Callable[[ExternalRanks], int]
) -> int:
    """Run this process's rank; return the exit status.

    Args:
        command: The command itself, which rank 0 runs.
    """
    if cluster.starter == "torchrun":
        # An agent that is killed leaves its ranks behind, and they would go on training.
        die_with_parent(os.getppid())
    # Torch's libraries read these when they are loaded.
    for name, value in openmp_environment(alone=False).items():
        os.environ.setdefault(name, value)
    ranks = ExternalRanks(cluster, arguments)
    status = EXIT_RUN_FAILED
    try:
        if cluster.rank == 0:
            ranks.resume_previous_attempt()
            status = command(ranks)
        else:
            status = _follow(ranks)
    except FrameworkError as error:
        # The command prints its own errors, so on rank 0 it is one of the store.
        status = error.exit_status
        if cluster.rank == 0 or cluster.prints_for_node:
            print(shown(str(error)), file=sys.stderr, flush=True)
    except StoppedBySignalError:
        status = EXIT_STOPPED
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        raise
    finally:
        ranks.rendezvous.close(status)
    return status


@final
class ExternalLauncher(Launcher):
    """Runs rank 0 in this process, and has the other ranks run the same."""

    name = "external"
    spans_nodes = True
    starts_ranks = False
    joins_started_ranks = True

    def topology(self, config: Config, *, external_ranks: ExternalRanks | None, is_planned: bool) -> Topology:
        gpus = config.trainer.gpus
        if gpus == 0:
            visible = 0
        elif is_planned and gpus is not None:
            visible = gpus
        else:
            visible = count_gpus()
        return external_topology(config, _started(external_ranks).cluster, visible_gpus=visible)

    @contextmanager
    def join(self, setup: NodeSetup) -> Iterator[Part]:
        """Compare what all ranks were started with."""
        _started(setup.external_ranks).rendezvous.compare(timeout_s=setup.limits.init_timeout_s)
        yield Part(self.launch)

    def launch(self, plan: LaunchPlan) -> Outcome:
        ranks = _started(plan.external_ranks)
        spec = plan.spec()
        ranks.rendezvous.send(spec)
        with _logged(plan.run_dir, rank=0, terminal=plan.terminal) as terminal:
            return _run(ranks.cluster, spec, terminal=terminal)


def _started(ranks: ExternalRanks | None) -> ExternalRanks:
    assert ranks is not None, "launcher=external is refused without them"
    return ranks


def external_topology(config: Config, cluster: ClusterEnvironment, *, visible_gpus: int) -> Topology:
    """Return the topology that `cluster.starter` has decided on.

    `trainer.gpus` counts the GPUs of a node; `auto` takes as many as its processes need. Raises TopologyError if the
    configuration contradicts it or there are too few GPUs, ConfigError for settings that can't be used.

    Args:
        visible_gpus: GPUs that rank 0 sees.
    """
    _check_config(config, cluster)
    procs = cluster.procs_per_node
    settings = replace(config.topology, nnodes=cluster.nnodes, procs_per_node=procs)
    gpus = config.trainer.gpus
    if gpus is None:
        if visible_gpus == 0 or settings.share_gpus:
            gpus = visible_gpus
        else:
            gpus = procs * (settings.gpus_per_process or settings.min_gpus_per_process)
    topology = resolve_topology(settings, gpus=gpus)
    if gpus == 0 or settings.share_gpus:
        return topology
    if visible_gpus >= gpus:
        return topology
    if visible_gpus == topology.span:
        return replace(topology, own_view=True)
    raise TopologyError(
        f"{procs} processes on a node need {gpus} GPUs, {topology.span} each, and this process sees {visible_gpus}.\n"
        f"It must see all {gpus}, or just its own. To train on the CPU instead: trainer.gpus=0"
    )


def _check_config(config: Config, cluster: ClusterEnvironment) -> None:
    """Raise for settings that contradict how the processes were started."""
    started = f"{cluster.starter} has started"
    store = f"{cluster.host}:{cluster.port}"
    processes = format_count(cluster.procs_per_node, "process", "processes")
    for key, allowed, what in (
        ("nnodes", (1, cluster.nnodes), f"processes on {format_count(cluster.nnodes, 'node')}"),
        ("procs_per_node", (None, cluster.procs_per_node), f"{processes} on each node"),
        ("node_rank", (0, cluster.node_rank), f"this process on node {cluster.node_rank}"),
        ("rdzv_endpoint", (None, store), f"ranks that meet at {store}"),
    ):
        value = getattr(config.topology, key)
        if value not in allowed:
            raise TopologyError(f"topology.{key}={value}, but {started} {what}.\nLeave topology.{key} out.")
    if config.backend.init_method != "env":
        raise ConfigError(
            f"backend.init_method={config.backend.init_method} can't be used by ranks that {started}: "
            "they meet at its address.\nLeave it out (env)."
        )
    if config.launcher.max_restarts:
        raise ConfigError(
            f"launcher.max_restarts={config.launcher.max_restarts} can't be used for ranks that {started}.\n"
            "Leave it out; torchrun has --max-restarts of its own."
        )


# The other ranks


def _follow(ranks: ExternalRanks) -> int:
    """Run what rank 0 sends."""
    # torch's clients print a C++ stack if rank 0 ends; what it means is in our own error.
    silence_compiled_code()
    # The key is looked for in what was typed, since nothing is composed yet.
    typed = typed_value(ranks.arguments, "backend.init_timeout")
    limit_s = seconds_of(typed) or WAIT_S
    ranks.rendezvous.open(timeout_s=limit_s)
    spec = ranks.rendezvous.follow(timeout_s=limit_s + _MARGIN_S)
    if isinstance(spec, int):
        return spec
    run_dir = RunDir(Path(spec.run_dir))
    make_visible(run_dir, spec)
    import_from_working_dir()
    with _logged(run_dir, rank=ranks.cluster.rank, terminal=False) as terminal:
        return _run(ranks.cluster, spec, terminal=terminal).status


# Every rank


@contextmanager
def _logged(run_dir: RunDir, *, rank: int, terminal: bool) -> Iterator[TextIO]:
    """Send what is printed to this rank's log, with `terminal` also to the terminal; yield the terminal's stderr.

    Python's streams are restored at the end, for what the command still prints.
    """
    stdout = sys.stdout
    stderr = sys.stderr
    with os.fdopen(os.dup(stderr.fileno()), "w", buffering=1, errors="backslashreplace") as direct:
        log_to(run_dir.rank_log(rank), terminal=terminal)
        try:
            yield direct
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout = stdout
            sys.stderr = stderr
            if terminal:
                os.dup2(direct.fileno(), 2)


def _run(cluster: ClusterEnvironment, spec: RunSpec, *, terminal: TextIO) -> Outcome:
    """Run the entry as this rank. A failure is reported on `terminal` or in the outcome, by one rank of the node."""
    topology = spec.topology
    attempt = cluster.attempt
    os.environ.update(network_environment(cluster.host, nnodes=topology.nnodes))
    os.environ.update(
        rank_environment(topology, rank=cluster.rank, host=cluster.store_host, port=cluster.port, attempt=attempt)
    )
    rank = RankArguments(spec.run_dir, topology, rank=cluster.rank, rendezvous="env://", attempt=attempt)
    open_store = partial(open_run_store, attempt)
    received = catching_signals(SCHEDULER_SIGNALS, observed=[SIGINT])
    with closing(RankStatus()) as rank_status, heartbeat(rank_status), received as signals:
        monitor = ExternalMonitor(
            rank,
            rank_status,
            store=open_store(),
            limits=spec.limits,
            is_resumable=spec.is_resumable,
            terminal=terminal,
            signals=signals,
        )
        with closing(monitor):
            monitor.start()
            status = run_entry(spec.entry, rank, MonitorLink(rank_status, open_store))
            return monitor.settle(status)
