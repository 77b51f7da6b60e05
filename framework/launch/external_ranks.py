"""A rank that torchrun, srun or Kubernetes has started, and its connection to the others."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import final

from framework.config.overrides import resume_argument
from framework.launch.cluster_environment import ClusterEnvironment
from framework.launch.fingerprint import fingerprint
from framework.launch.meeting_point import MeetingPoint
from framework.launch.rendezvous import Rendezvous
from framework.system.run_dir import RunDir

# Overrides that say from what a run starts. A resumed run has its own answer.
_STARTS = ("resume", "rerun", "init_from", "trust")


@final
class ExternalRanks:
    """This rank's connection to the others.

    Args:
        arguments: Those of the command, which rank 0 composes.
    """

    def __init__(self, cluster: ClusterEnvironment, arguments: Sequence[str]) -> None:
        self.cluster = cluster
        self.arguments = list(arguments)
        point = MeetingPoint(
            endpoint=(cluster.store_host, cluster.port),
            kind="rank",
            address=f"{cluster.host}:{cluster.port}",
            port_option="--master-port" if cluster.starter == "torchrun" else "MASTER_PORT",
            hosted_elsewhere=cluster.agent_store,
        )
        self.rendezvous = Rendezvous(
            fingerprint(arguments, working_dir=Path.cwd()),
            point,
            index=cluster.rank,
            count=cluster.world_size,
            attempt=cluster.attempt,
        )

    def resume_previous_attempt(self) -> None:
        """After torchrun has restarted the ranks, resume the run of an earlier attempt if it has a checkpoint.

        Raises RunError if the store can't be reached.
        """
        if not self.cluster.agent_store:
            # Only the agent's store outlives an attempt.
            return
        for attempt in reversed(range(self.cluster.attempt)):
            spec = self.rendezvous.sent_before(attempt)
            if spec is None:
                continue
            has_checkpoint = any(RunDir(Path(spec.run_dir)).checkpoints.glob("step_*"))
            if has_checkpoint:
                others = [text for text in self.arguments if text.partition("=")[0] not in _STARTS]
                # The run is this command's own, so its code needs no question.
                self.arguments = [*others, *shlex.split(resume_argument(spec.run_dir)), "trust=true"]
            return
