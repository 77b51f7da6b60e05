"""The launcher of this machine's ranks: all from the warm fork server, watched from a parent that has no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from framework.config.schema import InitMethod
from framework.launch.node_run import NodeRun
from framework.launch.plan import LaunchPlan, Outcome
from framework.launch.signals import heeded
from framework.launch.site import Site
from framework.launch.warm import WarmServer, warm_server


def launch(plan: LaunchPlan) -> Outcome:
    """Start the keeper and every rank, wait for all of them; and a fork server for them where none was given.

    Raises LaunchError when processes can't be started or are lost, KeyboardInterrupt when the run is ended at once: on
    Ctrl-C or another of `STOP_SIGNALS` where nothing would be saved, on a second Ctrl-C else. No rank is left then.
    """
    with node_run(Site.of(plan), warm=plan.warm, init_method=plan.init_method) as run:
        run.start()
        return replace(run.attempt(plan), late=tuple(run.late))


@contextmanager
def node_run(site: Site, *, warm: WarmServer | None, init_method: InitMethod) -> Iterator[NodeRun]:
    """This node's part of a run, with nothing started yet; nothing of it is left afterwards.

    warm: the server to start processes from, None for a new one.
    """
    with heeded() as signals, warm_server(warm) as server, _meeting_folder(init_method) as folder:
        run = NodeRun(site, server, folder=folder, signals=signals)
        try:
            yield run
        finally:
            run.close()


@contextmanager
def _meeting_folder(method: InitMethod) -> Iterator[Path]:
    """A new folder for the rendezvous file, where there is to be one; removed at the end."""
    if method is not InitMethod.FILE:
        yield Path()
        return
    with TemporaryDirectory(prefix="framework_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
