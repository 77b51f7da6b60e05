"""The launcher for ranks that something else has started: torchrun, SLURM's srun, a Kubernetes PyTorchJob.

Every process of the run is the command itself. Rank 0 composes and checks as always, makes the run directory and offers
both to the others, which have imported torch and wait. Then each runs the entry in its own process.

The store is the one that torchrun's agent hosts, or else rank 0's, which then is the last to leave.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from framework.config.assets import import_from_working_dir
from framework.config.parse import seconds_of
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    EXIT_STOPPED,
    ConfigError,
    LaunchError,
    RequestError,
    RunError,
)
from framework.hardware import openmp_environment
from framework.launch.child import log_to
from framework.launch.endpoint import PROBE_S
from framework.launch.environment import Place, typed_value
from framework.launch.interfaces import network_environment
from framework.launch.leader import WAIT_S, Leader, reach
from framework.launch.link import Link, environment_board
from framework.launch.mutual import stderr_of_the_terminal, watching_each_other
from framework.launch.nodes import Deadlined, StoreGoneError
from framework.launch.offer import Agreement, Fingerprint, Offer, fingerprint, make_visible
from framework.launch.panel import render
from framework.launch.plan import LaunchPlan, Outcome, RankArguments, rank_environment
from framework.launch.watch import Limits
from framework.launch.worker import run_entry, watched
from framework.pulse import Pulse
from framework.run_dir import RunDir
from framework.topology import Topology

_MARGIN_S = 10.0  # for rank 0, which waits as long for the others, to say first what is wrong


def take_part(place: Place, arguments: Sequence[str], *, lead: Callable[[Leader], int]) -> int:
    """Be the rank that `place` says; gives the exit status. `lead` is the command itself, for rank 0."""
    for name, value in openmp_environment(alone=False).items():  # before torch is imported
        os.environ.setdefault(name, value)
    if place.rank > 0:
        return _follow(place, arguments)
    leader = Leader(place, arguments)
    status = EXIT_RUN_FAILED
    try:
        if place.attempt > 0:
            leader.go_on()
        status = lead(leader)
    except RunError as error:  # the store can't be had; what the command itself raises, it tells itself
        status = error.exit_status
        print(error, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
        raise
    finally:
        leader.close(status)
    return status


def launch(plan: LaunchPlan) -> Outcome:
    """Offer the run to the other ranks, and run rank 0's part of it in this process."""
    if plan.leader is None:
        raise LaunchError("launcher=adopted needs ranks that something else has started.")
    run_dir = plan.run_dir
    plan.leader.make(
        Offer(
            entry=plan.entry,
            run_dir=str(run_dir.path),
            topology=plan.topology,
            limits=plan.limits,
            config=run_dir.config_file.read_text(),
            overrides=run_dir.overrides_file.read_text(),
        )
    )
    with _logged(plan.run_dir, rank=0, terminal=plan.terminal) as terminal:
        return _run(
            plan.leader.place,
            plan.entry,
            run_dir=plan.run_dir,
            topology=plan.topology,
            limits=plan.limits,
            terminal=terminal,
        )


def _follow(place: Place, arguments: Sequence[str]) -> int:
    """Take what rank 0 offers, and run this rank's part of it. What fails before that is told by one rank a node."""
    own = fingerprint(arguments, working_dir=Path.cwd())
    try:
        with _silent_stderr():  # torch's clients print a C++ stack where rank 0 ends; what it means is said below
            agreement, answer = _ask(place, own, limit_s=_limit(arguments))
    except (ConfigError, RunError) as error:
        if place.speaks or isinstance(error, ConfigError):  # that this very process is one too many
            print(error, file=sys.stderr, flush=True)
        return error.exit_status
    status = answer if isinstance(answer, int) else _take(place, answer)
    _leave(agreement)
    return status


def _leave(agreement: Agreement) -> None:
    with suppress(StoreGoneError):  # nobody hosts it any more, so nobody waits
        Deadlined()(agreement.leave)


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Leave out what native code writes to stderr while this is entered."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _ask(place: Place, own: Fingerprint, *, limit_s: float) -> tuple[Agreement, Offer | int]:
    """Say what this rank was started with, and wait for rank 0's answer.

    Raises RunError, ConfigError where another process has this rank.
    """
    deadline = time.monotonic() + limit_s + _MARGIN_S
    agreement = Agreement(reach(place, timeout_s=limit_s), count=place.world_size, attempt=place.attempt)

    def ask() -> Offer | int:
        agreement.come(place.rank, own=own, host=socket.gethostname())
        return agreement.take(timeout_s=deadline - time.monotonic())

    try:
        # With a deadline of its own: where the link to the store is cut, no call of torch's returns.
        with agreement.beating():
            return agreement, Deadlined()(ask, timeout_s=deadline - time.monotonic() + PROBE_S)
    except TimeoutError as error:
        _leave(agreement)
        raise RunError(
            f"Rank {place.rank} has waited {limit_s:g} s for rank 0 to say what to run, and it didn't.\n"
            "Look at what rank 0 printed; type backend.init_timeout=TIME if it only needs longer."
        ) from error
    except StoreGoneError as error:
        raise RunError(
            f"Rank {place.rank} has lost the store at {place.host}:{place.port}: rank 0 ended before it said what to "
            "run.\nLook at what rank 0 printed."
        ) from error


def _take(place: Place, offer: Offer) -> int:
    run_dir = RunDir(Path(offer.run_dir))
    try:
        make_visible(run_dir, offer)
    except OSError as error:
        print(
            f"Rank {place.rank} on {socket.gethostname()} can't make the run directory {run_dir.path}: "
            f"{error.strerror or error}.\nUse a folder that every node can write: path.outputs=FOLDER",
            file=sys.stderr,
            flush=True,
        )
        return RequestError.exit_status
    import_from_working_dir()
    with _logged(run_dir, rank=place.rank, terminal=False) as terminal:
        outcome = _run(
            place, offer.entry, run_dir=run_dir, topology=offer.topology, limits=offer.limits, terminal=terminal
        )
        if outcome.failure is not None:
            print(render(outcome.failure), file=terminal, flush=True)
            if place.node_rank == 0:  # rank 0, whose part this is, is gone
                with suppress(OSError, ValueError):  # the disk refuses; the terminal has it
                    run_dir.update_run({"status": "failed"})
    return outcome.status


@contextmanager
def _logged(run_dir: RunDir, *, rank: int, terminal: bool) -> Iterator[TextIO]:
    """Send what is printed here to this rank's log, with `terminal` to both; gives the terminal's own stderr.

    Python's streams are put back at the end, for what the command still says.
    """
    stdout, stderr = sys.stdout, sys.stderr
    with stderr_of_the_terminal() as direct:
        log_to(run_dir.rank_log(rank), terminal=terminal)
        try:
            yield direct
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = stdout, stderr


def _run(place: Place, entry: str, *, run_dir: RunDir, topology: Topology, limits: Limits, terminal: TextIO) -> Outcome:
    """Run the entry as this rank; whoever is left of its node reports a failure to `terminal`, or in the outcome."""
    os.environ.update(network_environment(place.host, nnodes=topology.nnodes))
    os.environ.update(
        rank_environment(topology, rank=place.rank, host=place.host, port=place.port, attempt=place.attempt)
    )
    rank = RankArguments(str(run_dir.path), topology, rank=place.rank, rendezvous="env://", attempt=place.attempt)
    open_board = partial(environment_board, place.attempt)
    with (
        watched(Pulse()) as pulse,
        watching_each_other(rank, pulse, open_board=open_board, limits=limits, terminal=terminal) as watch,
    ):
        ending = watch.settle(run_entry(entry, rank, Link(pulse, open_board)))
        stopped_by = pulse.asked_to_stop if ending.status == EXIT_STOPPED else 0
    return Outcome(ending.status, failure=ending.report, stopped_by=stopped_by)


def _limit(arguments: Sequence[str]) -> float:
    """How long to wait for rank 0: backend.init_timeout where it is typed; the configuration isn't known yet."""
    typed = typed_value(arguments, "backend.init_timeout")
    return (seconds_of(typed) if typed else None) or WAIT_S
