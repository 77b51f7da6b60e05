"""Process groups in which only this rank exists: their collectives return at once, with this rank's own values.

A rank that makes a step by itself takes the memory that it takes among the others:

    group = new_stand_in_group()
    with as_default_group(group):
        model = strategy.wrap(model)
        train_step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

# It registers the backend.
import torch.testing._internal.distributed.fake_pg  # noqa: F401

from framework.distributed.context import Context

# The name that torch.distributed has for it.
STAND_IN: Final = "fake"


@contextmanager
def stand_in_process_group(context: Context) -> Iterator[None]:
    """Make the default group where there is none, for the rank of `context`, and destroy it at the exit."""
    dist.init_process_group(STAND_IN, store=dist.HashStore(), rank=context.rank, world_size=context.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_stand_in_group() -> dist.ProcessGroup:
    """Make a group beside the default one, with as many ranks. Every rank must call it."""
    group = dist.new_group(backend=STAND_IN)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def as_default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Have collectives use `group` if they name none, and make groups and meshes of its backend."""
    # Here, since it takes most of a second to import.
    from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache

    default_group = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = default_group
        # To torch, meshes of the same ranks are equal, whatever their groups. An operator on DTensors of the real mesh
        # would return one of the stand-in's, and its sum over ranks would be this rank's.
        _clear_python_sharding_prop_cache()
        _clear_fast_path_sharding_prop_cache()
