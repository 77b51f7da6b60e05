"""The choice of a launcher, for `launcher=auto`."""

from __future__ import annotations

from typing import final

from framework.config.schema import Config
from framework.launch.base import Launcher
from framework.launch.elastic import ElasticLauncher
from framework.launch.external_ranks import ExternalRanks
from framework.launch.local import LocalLauncher


@final
class AutoLauncher(Launcher):
    """Chooses one of the other launchers, by who has started this process and by what is requested."""

    name = "auto"
    spans_nodes = True
    restarts = True
    joins_started_ranks = True

    def choose(self, config: Config, *, external_ranks: ExternalRanks | None) -> Launcher:
        if external_ranks is not None:
            # Other runs need none of what it imports.
            from framework.launch.external import ExternalLauncher

            return ExternalLauncher()
        if config.topology.nnodes > 1 or config.launcher.max_restarts > 0:
            return ElasticLauncher()
        return LocalLauncher()
