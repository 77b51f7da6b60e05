"""The process group of a run: set up with one time-out, used with another, destroyed at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from framework.config.schema import BackendConfig
from framework.distributed.context import Context
from framework.distributed.store import COUNTED_GROUP
from framework.errors import RunError
from framework.system.rank_log import warn

# Groups with peers, kept to the end of the process. Torch joins a group's threads when its last owner is deleted: that
# may be DDP's C++ part, which holds the interpreter's lock while a thread waits for it to free a tensor.
_KEPT: list[object] = []


@contextmanager
def process_group(
    context: Context, settings: BackendConfig, *, rendezvous: str | None, with_cpu: bool = False
) -> Iterator[None]:
    """Make the default group, and destroy it at the exit. Every rank must enter.

    After an error a group with peers is kept: they must not notice before this rank has reported what happened, and a
    running collective could block the destruction.

    Args:
        rendezvous: A URL for `init_process_group`; None makes a group of this rank alone.
        with_cpu: Support tensors on the CPU too.

    Raises RunError if the ranks don't all arrive within `settings.init_timeout`.
    """
    # The rank has set its device already, but the user's code, imported or built since, may have set another one.
    if context.device.type != "cpu":
        torch.accelerator.set_device_index(context.device)
    try:
        _init_process_group(backends(context, with_cpu=with_cpu), context, settings, rendezvous=rendezvous)
    except RuntimeError as error:
        # It may be a dist.DistError, but gloo's own wait raises nothing finer than RuntimeError.
        if context.world_size > 1:
            raise RunError(
                f"Rank {context.rank} of {context.world_size} could not join the process group within "
                f"backend.init_timeout={settings.init_timeout:g} s: {error}\n"
                "Look at the other ranks' logs; raise backend.init_timeout if they are only slow."
            ) from error
        if settings.name != "auto" or context.backend == "gloo":
            raise RunError(
                f"The backend {context.backend} could not start: {error}\nUse backend.name=auto, or gloo."
            ) from error
        warn(f"{context.backend} could not start, and gloo takes its place, as there is one process: {error}")
        _init_process_group("gloo", context, settings, rendezvous=rendezvous)
    if rendezvous is not None:
        _KEPT.append(dist.group.WORLD)
    try:
        yield
    except BaseException:
        if rendezvous is None:
            # After a GPU failure this fails too, and would hide the cause.
            with suppress(RuntimeError):
                dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _init_process_group(backend: str, context: Context, settings: BackendConfig, *, rendezvous: str | None) -> None:
    timeout = timedelta(seconds=settings.init_timeout)
    store: dist.Store
    if rendezvous is None:
        store = dist.HashStore()
    else:
        store = _meet(rendezvous, context, timeout=timeout)

    # With a device, NCCL connects at once, and every collective knows its GPU. One process has nobody to connect to,
    # and a replica on several devices has no single one.
    device_id = None
    connects = context.world_size > 1 and context.device.type != "cpu" and context.backend != "gloo"
    if connects and len(context.devices) == 1:
        device_id = context.device
    dist.init_process_group(
        backend,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=device_id,
    )


def new_subgroup(ranks: Sequence[Sequence[int]], context: Context) -> dist.ProcessGroup:
    """Make a group of each of `ranks`, which together are all ranks once, and return this rank's.

    It has the default group's time-out. Every rank must call it.
    """
    group, _ = dist.new_subgroups_by_enumeration(
        [list(members) for members in ranks], timeout=group_timeout(None), backend=context.backend
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def new_group(timeout_s: float, *, backend: str = "gloo", is_monitored: bool = False) -> dist.ProcessGroup:
    """Make another group of all ranks, for exchanges apart from training's. Every rank must call it.

    Args:
        backend: gloo exchanges over the CPU.
        is_monitored: The monitor, which finds the rank that is behind by counting collectives, counts this group's
            together with the default group's. All ranks must begin the collectives of both in one order.
    """
    description = COUNTED_GROUP if is_monitored else None
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s), group_desc=description)
    assert isinstance(group, dist.ProcessGroup)
    return group


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the time-out of the group's collectives (None: the default group's), or None if it is unknown."""
    group = group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(group._device_types[0])
    options = getattr(backend, "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def set_timeout(timeout_s: float, context: Context, *, groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Give every later collective this time-out. Every rank must call it at the same place.

    Args:
        groups: Other groups for collectives of training.
    """
    if context.world_size == 1:
        return
    # The new, shorter limit must not catch a rank that is still setting up.
    dist.barrier()
    set_group_timeouts(timeout_s, (None, *groups))


def set_group_timeouts(timeout_s: float, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Give every later collective of these groups this time-out; None is the default group."""
    timeout = timedelta(seconds=timeout_s)
    for group in groups:
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timeout, group)
        else:
            # Older versions of torch have only this private function.
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def backends(context: Context, *, with_cpu: bool) -> str:
    """Return the context's backend for `init_process_group`, with gloo for the CPU if that is asked for."""
    kind = context.device.type
    if with_cpu and kind != "cpu":
        return f"{kind}:{context.backend},cpu:gloo"
    return context.backend


def _meet(rendezvous: str, context: Context, *, timeout: timedelta) -> dist.Store:
    """Return the ranks' store, as `init_process_group` finds it, with a prefix for this attempt.

    Torch's own agents make a new store for each attempt; here the run keeps its store, and with it the addresses of
    ranks that have ended.
    """
    store, _, _ = next(dist.rendezvous(rendezvous, context.rank, context.world_size, timeout=timeout))
    store.set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)
