"""Ranks that live as long as the tests do: a call costs what it computes, not the start of processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.helpers import processes
from tests.helpers.internals import SLOW_TO_IMPORT, Topology

TIMEOUT_S = 90.0
PRELOAD = ["torch", *SLOW_TO_IMPORT]
GRACE_S = 3.0
"""What other ranks get to finish after one has failed; they may wait for it in a collective."""


class RankError(AssertionError):
    """A function raised, or didn't return, on some rank."""


class RankPool:
    """Groups of 2, 3, ... CPU ranks, each with a live gloo group. A group is started at its first use.

    A group in which a rank failed is replaced. Generators and the working directory are reset before each call, and
    warnings are errors, as in any test.
    """

    def __init__(self, folder: Path) -> None:
        # The ranks of a group meet in this folder.
        self._folder = folder
        self._groups: dict[int, list[tuple[BaseProcess, Connection]]] = {}

    def run(self, function: Callable[..., Any], /, *args: Any, ranks: int = 2, **kwargs: Any) -> list[Any]:
        """Call `function(context, *args, **kwargs)` on every rank; return the results in the order of ranks.

        The function is found by its name, so it lies at the top level of a module; arguments and results are pickled.
        Raises RankError with the traceback of every rank that failed.
        """
        call = pickle.dumps((function, args, kwargs, str(Path.cwd())))
        if ranks not in self._groups:
            self._groups[ranks] = _start(ranks, self._folder / uuid.uuid4().hex)
        members = self._groups[ranks]
        for _, connection in members:
            connection.send_bytes(call)
        answers = _answers([connection for _, connection in members])
        failures = [f"Rank {rank}: {what}" for rank, (succeeded, what) in enumerate(answers) if not succeeded]
        if failures:
            self._end(ranks)
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for ranks in list(self._groups):
            self._end(ranks)

    def _end(self, ranks: int) -> None:
        for process, connection in self._groups.pop(ranks):
            connection.close()
            process.kill()
            process.join()
            processes.LONG_LIVED.discard(process.pid)
            process.close()


def _start(ranks: int, store: Path) -> list[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    members: list[tuple[BaseProcess, Connection]] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, ranks, str(store), theirs), daemon=True)
        process.start()
        theirs.close()
        processes.LONG_LIVED.add(process.pid)
        members.append((process, ours))
    return members


def _answers(connections: list[Connection]) -> list[tuple[bool, Any]]:
    """Return for each rank if it succeeded, and its result or the error."""
    answers: dict[Connection, tuple[bool, Any]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(answers) < len(connections):
        ready = wait([each for each in connections if each not in answers], max(0.0, deadline - time.monotonic()))
        if not ready:
            answers |= {each: (False, "did not return in time") for each in connections if each not in answers}
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                answers[connection] = pickle.loads(connection.recv_bytes())
            except EOFError:
                answers[connection] = False, "died"
            if not answers[connection][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return [answers[connection] for connection in connections]


def _serve(rank: int, ranks: int, store: str, calls: Connection) -> None:
    """Answer calls until the tests close the connection or end."""
    import torch
    import torch.distributed as dist

    from tests.helpers.internals import make_context

    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    topology = Topology(nnodes=1, procs_per_node=ranks, gpus_per_node=0, span=1)
    context = make_context(topology, node_rank=0, local_rank=rank, backend_name="gloo")
    while True:
        try:
            content = calls.recv_bytes()
        except EOFError:
            # Destroying a group whose peers are gone could wait.
            os._exit(0)
        try:
            function, args, kwargs, cwd = pickle.loads(content)
            os.chdir(cwd)
            random.seed(0)
            torch.manual_seed(0)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                answer = pickle.dumps((True, function(context, *args, **kwargs)))
            assert dist.is_initialized(), "the function destroyed the process group"
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        calls.send_bytes(answer)
