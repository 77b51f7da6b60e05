"""Changes of a configuration that may make a step fit, with the same global batch. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.jobs.plan.devices import Device

_FACTORS = (2, 4, 8, 16)
_MOST_GPUS_OF_A_NODE = 8
_FSDP = "framework.strategies.FSDP"
_RECOMPUTE = "trainer.activation_checkpointing=auto"


class Change(NamedTuple):
    """What to type, and what it makes of the request."""

    overrides: tuple[str, ...]
    config: Config
    topology: Topology


def kinds_of_changes(
    config: Config, topology: Topology, device: Device, *, keeps_model: bool = True
) -> Iterator[Sequence[Change]]:
    """Yield changes of one kind after another, the cheapest kind first; within a kind, the least change first.

    keeps_model: False leaves out changes with which a GPU has as much of the model as before.
    """
    change = Change((), config, topology)
    recomputed = _recomputed(change)
    if keeps_model:
        yield _accumulated(change)
        yield _lower_precision(change, device)
        yield recomputed
        for recomputing in recomputed:
            yield _accumulated(recomputing)
    if not device.is_gpu:
        return
    if config.strategy["_target_"] == _FSDP:
        yield _on_more_gpus(change)
        for recomputing in recomputed:
            yield _on_more_gpus(recomputing)
        return
    if keeps_model:
        yield _on_more_gpus(change)
    yield _sharded(change)
    for recomputing in recomputed:
        yield _sharded(recomputing)


def _accumulated(change: Change) -> list[Change]:
    """Return changes to smaller micro-batches, of which more are accumulated."""
    changes = []
    trainer = change.config.trainer
    for factor in _FACTORS:
        steps = factor * trainer.accumulate_grad_batches
        accumulating = replace(change.config, trainer=replace(trainer, accumulate_grad_batches=steps))
        smaller = _with_smaller_batch(change._replace(config=accumulating), factor)
        if smaller is not None:
            overrides = (*smaller.overrides, f"trainer.accumulate_grad_batches={steps}")
            changes.append(smaller._replace(overrides=overrides))
    return changes


def _lower_precision(change: Change, device: Device) -> list[Change]:
    trainer = change.config.trainer
    if trainer.precision != "32-true":
        return []
    if device.has_bf16:
        mixed = replace(trainer, precision="bf16-mixed")
    else:
        mixed = replace(trainer, precision="16-mixed")
    overrides = (*change.overrides, f"trainer.precision={mixed.precision}")
    return [Change(overrides, replace(change.config, trainer=mixed), change.topology)]


def _recomputed(change: Change) -> list[Change]:
    trainer = change.config.trainer
    if trainer.activation_checkpointing is not None or trainer.compile is not None:
        return []
    config = replace(change.config, trainer=replace(trainer, activation_checkpointing="auto"))
    return [Change((*change.overrides, _RECOMPUTE), config, change.topology)]


def _on_more_gpus(change: Change) -> list[Change]:
    """Return changes to twice, four times, … as many processes on each node, each with GPUs of its own."""
    changes = []
    topology = change.topology
    for factor in _FACTORS:
        procs = factor * topology.procs_per_node
        gpus = procs * topology.span
        smaller = _with_smaller_batch(change, factor)
        if gpus > _MOST_GPUS_OF_A_NODE or topology.shares_gpus or smaller is None:
            break
        more = replace(topology, procs_per_node=procs, gpus_per_node=gpus)
        overrides = [*smaller.overrides, f"trainer.gpus={gpus}"]
        if change.config.topology.procs_per_node is not None:
            overrides.append(f"topology.procs_per_node={procs}")
        changes.append(Change(tuple(overrides), smaller.config, more))
    return changes


def _sharded(change: Change) -> list[Change]:
    """Return changes to shards: on the GPUs that there are, if they are several, and on more of them."""
    config = replace(change.config, strategy={"_target_": _FSDP})
    sharded = Change((*change.overrides, "strategy=fsdp"), config, change.topology)
    more = _on_more_gpus(sharded)
    if change.topology.world_size > 1:
        return [sharded, *more]
    return more


def _with_smaller_batch(change: Change, factor: int) -> Change | None:
    """Divide `data.batch_size`, if that decides the global batch; return None if it can't be divided."""
    data = change.config.data
    if data.global_batch_size is not None:
        return change
    if data.train_batch_size % factor:
        return None
    smaller = replace(data, batch_size=data.train_batch_size // factor)
    overrides = (*change.overrides, f"data.batch_size={smaller.batch_size}")
    return Change(overrides, replace(change.config, data=smaller), change.topology)
