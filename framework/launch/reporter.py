"""From what one node's watcher knows to the one report of a failure, with those of the other nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from framework.launch.failure import Kind, RankFailure
from framework.launch.nodes import Exchange
from framework.launch.report import FailureReport, make_report
from framework.launch.watch import NodeWatch
from framework.run_dir import RunDir, write_atomically


@final
@dataclass(frozen=True)
class Reporter:
    """Makes the report of one attempt on one node. exchange: None where there is no other node.

    is_last: the run isn't started anew after this attempt.
    """

    watch: NodeWatch
    exchange: Exchange | None
    run_dir: RunDir
    nnodes: int
    procs_per_node: int
    attempt: int
    is_last: bool

    def report(self, exits: Sequence[dict[str, Any]], *, cause: str) -> FailureReport:
        """Node 0 merges what all nodes state; the others take its report, or make one of their side of a cut.

        exits: how ranks ended that weren't ended on purpose: rank, status (None: unknown), time, early. Takes seconds.
        """
        own = {**self.watch.statement({end["rank"]: end for end in exits}), "time": time.time()}
        exchange, statements, silent = self.exchange, [own], list[int]()
        if exchange is not None:
            if self.watch.node > 0:
                given = exchange.await_report(own, cause=cause)
                if given is not None:
                    return FailureReport.from_plain(given)
            statements, silent = exchange.gather(own, cause=cause)
        report = make_report(
            statements,
            world_size=self.nnodes * self.procs_per_node,
            attempt=self.attempt,
            silent_nodes=[self._unreachable(node) for node in silent],
        )
        report = self._written(report)
        if exchange is not None and self.watch.node == 0:
            exchange.publish(report.to_plain())
        return report

    def _unreachable(self, node: int) -> RankFailure:
        first_rank = node * self.procs_per_node
        return RankFailure(
            rank=first_rank,
            kind=Kind.UNREACHABLE,
            node=node,
            host="",
            local_rank=0,
            pid=0,
            devices="",
            phase="unknown",
            step=0,
            time=time.time(),
            log=str(self.run_dir.rank_log(first_rank)),
            waited_s=0.0 if self.exchange is None else self.exchange.silent_for(node),
        )

    def _written(self, report: FailureReport) -> FailureReport:
        """The report, in its file; or with the reason why not: a full disk, say, which may be the very failure."""
        is_last = self.is_last or report.first.is_final
        file = self.run_dir.failure_of(node=self.watch.node, attempt=self.attempt, is_last=is_last)
        report = replace(report, file=str(file), node=self.watch.node)
        try:
            write_atomically(file, json.dumps(report.to_plain(), indent=2) + "\n")
        except OSError as error:
            return replace(report, file=None, unsaved=f"{file} can't be written: {error.strerror or error}.")
        return report
