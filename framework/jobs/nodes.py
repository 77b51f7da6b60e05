"""Several nodes before their run begins: this command is typed on each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from framework.config.schema import Config
from framework.jobs.choosing import chosen_launcher
from framework.jobs.request import Request
from framework.launch.elastic import Company, gathered
from framework.launch.environment import split_endpoint, without_launch_arguments
from framework.launch.site import Site
from framework.launch.watch import Limits
from framework.topology import Topology


@contextmanager
def nodes_together(request: Request, topology: Topology) -> Iterator[Company | None]:
    """The nodes of the run, once all have come; None where this command starts ranks on this machine alone.

    Raises ConfigError where a node was started with something else, RunError where one doesn't come in time.
    """
    config = request.config
    endpoint = config.topology.rdzv_endpoint
    if topology.nnodes == 1 or endpoint is None or chosen_launcher(request) != "elastic":
        yield None
        return
    site = Site(
        topology,
        limits(config),
        terminal=True,
        node=config.topology.node_rank,
        endpoint=split_endpoint(endpoint),
        max_restarts=config.launcher.max_restarts,
    )
    warm = request.warm if request.warm is not None and request.warm.alive else None
    arguments = without_launch_arguments(sys.argv[1:])
    with gathered(site, warm=warm, init_method=config.backend.init_method, arguments=arguments) as company:
        yield company


def limits(config: Config) -> Limits:
    """The time-outs as launchers take them."""
    return Limits(
        init_timeout_s=config.backend.init_timeout,
        timeout_s=config.backend.timeout,
        late_after_s=config.launcher.late_after,
    )
