"""What is known of one node's part in a run from the beginning."""

from __future__ import annotations

from dataclasses import dataclass

from framework.launch.plan import LaunchPlan
from framework.launch.watch import Limits
from framework.topology import Topology


@dataclass(frozen=True)
class Site:
    """One node's place in a run, known before there is a run directory.

    endpoint: host and port where several nodes meet, None on one node. terminal: see `LaunchPlan`.
    """

    topology: Topology
    limits: Limits
    terminal: bool
    node: int = 0
    endpoint: tuple[str, int] | None = None
    max_restarts: int = 0

    @staticmethod
    def of(plan: LaunchPlan) -> Site:
        return Site(plan.topology, plan.limits, plan.terminal, plan.node, plan.endpoint, plan.max_restarts)
