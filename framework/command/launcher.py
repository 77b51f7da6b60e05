"""Choose the launcher, the topology and the backend of a request: once, into a `Placement`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from framework.checkpoint import find, find_weights
from framework.config.schema import BackendName, Config, Node
from framework.config.targets import SourceSignatures, check_devices
from framework.config.topology import Topology
from framework.data.batching import plan_steps
from framework.errors import ConfigError, RequestError
from framework.launch.base import Launcher, launcher_class
from framework.launch.external_ranks import ExternalRanks
from framework.remote.weights import weights_path
from framework.strategies.callback_rules import callback_mistakes, weight_mistakes
from framework.strategies.rules import refusals, rules_of, strategy_request


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a run are, what starts them, and how they communicate."""

    # Never `auto`, but what it has chosen.
    launcher: Launcher
    topology: Topology
    # On NVIDIA GPUs or the CPU, never `auto`.
    backend: BackendName


def place(
    config: Config,
    *,
    external_ranks: ExternalRanks | None = None,
    is_swept: bool = False,
    is_planned: bool = False,
) -> Placement:
    """Return the placement, after every check that needs neither torch nor a run directory. Raises FrameworkError.

    Args:
        external_ranks: those of which this process is rank 0, if something else has started them.
        is_swept: the run is one of a sweep's.
        is_planned: the run is only shown, so neither `trainer.gpus` nor the rendezvous endpoint has to exist.
    """
    if config.init_from is not None and config.resume is None:
        weights = weights_path(config.init_from, cache=config.path.cache)
        if find_weights(weights) is None:
            find(weights)

    launcher = launcher_class(config.launcher)(**config.launcher.args)
    launcher = launcher.choose(config, external_ranks=external_ranks)
    _check_starter(launcher, external_ranks)
    topology = launcher.topology(config, external_ranks=external_ranks, is_planned=is_planned)
    if topology.nnodes > 1 and external_ranks is None:
        _check_several_nodes(config, is_swept=is_swept)
    if topology.nnodes == 1 and external_ranks is None:
        _check_one_node(config, launcher)
    if is_swept and launcher.runs_in_command:
        raise ConfigError(
            f"launcher={launcher.name} is for a debugger, and the trials of a sweep have no terminal. Leave it out; to "
            "debug a trial, type its values without -m."
        )
    backend = _backend(config, topology)
    return Placement(launcher, topology, backend)


def placement_mistakes(config: Config, placement: Placement, *, trains: bool) -> list[str]:
    """Return what is wrong with the strategy, the model and the batches for these processes, as far as sources show it.

    The ranks check the same, and the rest.
    """
    topology = placement.topology
    node = config.strategy
    rules_class = rules_of(node["_target_"])
    mistakes: list[str] = []
    if rules_class is not None:
        request = strategy_request(config, topology, backend=placement.backend, trains=trains)
        rules = rules_class(request)
        mistakes += rules.mistakes()
        if not mistakes:
            mistakes += refusals(lambda: plan_steps(config, rules.data_share()))
            mistakes += callback_mistakes(_callbacks(config), rules, target=node["_target_"])
            mistakes += weight_mistakes(config, rules, kind=node["_target_"].rpartition(".")[2])
    mistakes += refusals(lambda: check_devices(config.model, topology.span, SourceSignatures()))
    return mistakes


def _callbacks(config: Config) -> Mapping[str, Node]:
    """Return the callbacks that will be built."""
    return {} if config.trainer.fast_dev_run else config.callbacks


def _check_starter(launcher: Launcher, external_ranks: ExternalRanks | None) -> None:
    """Raise ConfigError if the launcher needs another starter of this process than it has had."""
    if external_ranks is not None and not launcher.joins_started_ranks:
        cluster = external_ranks.cluster
        raise ConfigError(
            f"launcher={launcher.name} is configured, but {cluster.starter} has started this process as one of "
            f"{cluster.world_size} ranks.\n"
            f"Use launcher=auto; or type launcher={launcher.name} to let each process start a run of its own."
        )
    if external_ranks is None and not launcher.starts_ranks:
        raise ConfigError(
            f"launcher={launcher.name}, but this process isn't one of several that torchrun, srun or a Kubernetes "
            "PyTorchJob has started.\n"
            f"Start the command with one of them, or leave launcher={launcher.name} out."
        )


def _check_one_node(config: Config, launcher: Launcher) -> None:
    """Raise ConfigError for settings of how ranks meet that would have no effect."""
    endpoint = config.topology.rdzv_endpoint
    if endpoint is not None:
        raise ConfigError(
            f"topology.rdzv_endpoint={endpoint} has no effect with topology.nnodes=1: ranks of one machine meet at a "
            "port that the command binds.\n"
            "Leave it out, or set topology.nnodes to the number of machines."
        )
    method = config.backend.init_method
    if launcher.runs_in_command and method != "env":
        raise ConfigError(
            f"backend.init_method={method} has no effect with launcher={launcher.name}, whose only process meets no "
            "other.\nLeave it out."
        )


def _check_several_nodes(config: Config, *, is_swept: bool) -> None:
    nnodes = config.topology.nnodes
    if is_swept:
        raise ConfigError(
            f"A sweep (-m) runs on one node, and topology.nnodes={nnodes}. Leave -m out, or use one node."
        )
    if config.backend.init_method == "file":
        raise ConfigError(
            f"backend.init_method=file is for ranks of one machine, and topology.nnodes={nnodes}.\n"
            "Use backend.init_method=env."
        )


def _backend(config: Config, topology: Topology) -> BackendName:
    """Return the backend that the ranks will use. Raises RequestError: NCCL without GPUs."""
    name = config.backend.name
    has_gpus = topology.gpus_per_node > 0
    if name == "auto":
        return "nccl" if has_gpus and not topology.shares_gpus else "gloo"
    if name == "nccl" and not has_gpus:
        raise RequestError(
            "backend.name=nccl needs GPUs, and these processes run on the CPU (trainer.gpus=0, or auto without any).\n"
            "Use backend.name=gloo or backend.name=auto."
        )
    return name
