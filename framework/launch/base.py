"""The base class of all launchers: how the ranks of a run are started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from framework.config.schema import Config, LauncherConfig
from framework.config.targets import import_target
from framework.config.topology import Topology, resolve_topology
from framework.launch.external_ranks import ExternalRanks
from framework.launch.plan import LaunchPlan, NodeSetup, Outcome
from framework.launch.run_spec import RunSpec
from framework.system.hardware import count_gpus, resolve_gpus


@dataclass(frozen=True)
class Part:
    """This process's part in a run."""

    # Starts the ranks, waits for them, and returns how the run ended.
    launch: Callable[[LaunchPlan], Outcome]
    # What to run, if the command on another node decides that; None if this one does.
    spec: RunSpec | None = None


class Launcher:
    """Starts the ranks of a run. Inherit from it, override `launch`, and name the class in a YAML:

        # conf/launcher/mine.yaml
        defaults:
          - auto

        _target_: package.module.MyLauncher
        args: {}  # keywords of the class

    It is used in the command's process, where torch isn't imported. The attributes say what it can do: a request for
    something else is refused before anything starts.
    """

    # Its name in messages: `launcher=NAME`.
    name: ClassVar[str]
    # If it starts ranks on more than one node.
    spans_nodes: ClassVar[bool] = False
    # If it restarts the ranks after a failure, `launcher.max_restarts` times.
    restarts: ClassVar[bool] = False
    # If it starts the ranks itself.
    starts_ranks: ClassVar[bool] = True
    # If it can run in ranks that something else has started, of which this process is one.
    joins_started_ranks: ClassVar[bool] = False
    # If the only rank runs in the command's own process.
    runs_in_command: ClassVar[bool] = False

    def choose(self, config: Config, *, external_ranks: ExternalRanks | None) -> Launcher:
        """Return the launcher to use: this one, unless it only chooses among others."""
        return self

    def topology(self, config: Config, *, external_ranks: ExternalRanks | None, is_planned: bool) -> Topology:
        """Return which ranks there are and which GPUs they own. Raises FrameworkError for what it can't start.

        Args:
            external_ranks: set if something else has started this process as rank 0 of several.
            is_planned: the run is only shown, so neither `trainer.gpus` nor the rendezvous endpoint has to exist.
        """
        gpus = config.trainer.gpus
        if not is_planned:
            gpus = resolve_gpus(gpus)
        elif gpus is None:
            gpus = count_gpus()
        return resolve_topology(config.topology, gpus=gpus)

    @contextmanager
    def join(self, setup: NodeSetup) -> Iterator[Part]:
        """Meet the commands of this run on other nodes, if there are any. Leave the run at the exit.

        This is done before the run has a directory. Raises FrameworkError if they differ or don't come.
        """
        yield Part(self.launch)

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Start the ranks of this node, wait for all of them, and return how the run ended. No rank is left then.

        Raises LaunchError if they can't be started, KeyboardInterrupt if the run is ended at once.
        """
        raise NotImplementedError


def launcher_class(settings: LauncherConfig) -> type[Launcher]:
    """Return the class that `launcher._target_` names. Raises TargetError if there is no such class."""
    launcher: type[Launcher] = import_target(settings._target_)
    return launcher
