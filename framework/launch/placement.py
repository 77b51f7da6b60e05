"""The topology of ranks that something else has started: what the configuration says of it must fit what there is."""

from __future__ import annotations

from dataclasses import replace

from framework.config.schema import Config, InitMethod
from framework.errors import ConfigError, TopologyError
from framework.launch.environment import Place
from framework.topology import Topology, resolve_topology


def placed_topology(config: Config, place: Place, *, visible_gpus: int) -> Topology:
    """Who is where, as `place.starter` has decided; rank 0 asks. visible_gpus: GPUs that this process sees.

    `trainer.gpus` are those of a node; `auto` takes as many as its processes need. Raises TopologyError where the
    configuration says something else, or there are too few GPUs, ConfigError for settings that can't be followed.
    """
    _check_given(config, place)
    settings = replace(config.topology, nnodes=place.nnodes, procs_per_node=place.procs_per_node)
    requested = config.trainer.gpus
    if requested == 0 or (requested is None and visible_gpus == 0):
        return resolve_topology(settings, gpus=0)
    procs = place.procs_per_node
    if settings.share_gpus:
        return resolve_topology(settings, gpus=visible_gpus if requested is None else requested)
    gpus = procs * (settings.gpus_per_process or settings.min_gpus_per_process) if requested is None else requested
    topology = resolve_topology(settings, gpus=gpus)
    if visible_gpus >= gpus:
        return topology
    if visible_gpus == topology.span:
        return replace(topology, own_view=True)
    raise TopologyError(
        f"{procs} processes on a node need {gpus} GPUs, {topology.span} each, and this process sees {visible_gpus}.\n"
        f"It must see all {gpus}, or just its own. To train on the CPU instead: trainer.gpus=0"
    )


def _check_given(config: Config, place: Place) -> None:
    """Raise for what is configured and isn't what the processes were started as."""
    given = config.topology
    started = f"{place.starter} has started"
    if given.nnodes not in (1, place.nnodes):
        raise TopologyError(
            f"topology.nnodes={given.nnodes}, but {started} processes on {_counted(place.nnodes, 'node')}.\n"
            f"Leave topology.nnodes out, or have {place.starter} start {given.nnodes}."
        )
    if given.procs_per_node not in (None, place.procs_per_node):
        raise TopologyError(
            f"topology.procs_per_node={given.procs_per_node}, but {started} "
            f"{_counted(place.procs_per_node, 'process', 'processes')} on each node.\n"
            f"Leave topology.procs_per_node out, or have {place.starter} start {given.procs_per_node}."
        )
    if given.node_rank not in (0, place.node_rank):
        raise TopologyError(
            f"topology.node_rank={given.node_rank}, but {started} this process on node {place.node_rank}.\n"
            "Leave topology.node_rank out."
        )
    if config.backend.init_method is not InitMethod.ENV:
        raise ConfigError(
            f"backend.init_method={config.backend.init_method.value} can't be used by ranks that {started}: "
            "they meet where that says.\nLeave it out (env)."
        )
    if config.launcher.max_restarts:
        raise ConfigError(
            f"launcher.max_restarts={config.launcher.max_restarts} can't be done for ranks that {started}.\n"
            "Leave it out; torchrun has --max-restarts of its own."
        )


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
