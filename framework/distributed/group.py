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
from framework.errors import RunError
from framework.pulse import COUNTED_GROUP

# Groups with peers, to the end of the process. Torch joins a group's threads where its last owner goes: that may be
# DDP's C++ part, with the interpreter's lock held, for which a thread waits that has a tensor to give back.
_KEPT: list[object] = []


@contextmanager
def process_group(
    context: Context, settings: BackendConfig, *, rendezvous: str | None, with_cpu: bool = False
) -> Iterator[None]:
    """The default group while this is entered. Every rank must enter. with_cpu: tensors on the CPU go through it too.

    It is destroyed on the way out, but an error leaves a group with peers to the end of the process: they must not
    notice before this rank has told what happened, and a collective under way could hold up the destruction.

    `rendezvous` is a URL for `init_process_group`; None makes a group of this rank alone that meets nobody.
    Raises RunError when the ranks don't all arrive within `settings.init_timeout`.
    """
    # Before the group is made: otherwise the first collective of every rank opens a context on GPU 0.
    if context.device.type != "cpu":
        torch.accelerator.set_device_index(context.device)
    try:
        _init(backends(context, with_cpu=with_cpu), context, settings, rendezvous=rendezvous)
    except RuntimeError as error:  # dist.DistError is one, and gloo's own wait raises nothing finer
        raise RunError(
            f"Rank {context.rank} of {context.world_size} could not join the process group within "
            f"backend.init_timeout={settings.init_timeout:g} s: {error}\n"
            "Look into the other ranks' logs; raise backend.init_timeout if they are only slow."
        ) from error
    if rendezvous is not None:
        _KEPT.append(dist.group.WORLD)
    try:
        yield
    except BaseException:
        if rendezvous is None:
            with suppress(RuntimeError):  # after a GPU failure this fails too, and would hide the cause
                dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def group_of_mine(ranks: Sequence[Sequence[int]], context: Context) -> dist.ProcessGroup:
    """A group for each of `ranks`, which together are all ranks once; gives this rank's. Its time-out is the first's.

    Every rank must call it.
    """
    timeout = timeout_of(dist.distributed_c10d._get_default_group())
    groups = [dist.new_group(list(each), backend=context.backend, timeout=timeout) for each in ranks]
    (mine,) = (group for group, each in zip(groups, ranks, strict=True) if context.rank in each)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def side_group(timeout_s: float, *, is_counted: bool = False) -> dist.ProcessGroup:
    """A second group of all ranks, over the CPU, for what goes on beside training.

    is_counted: by its collectives it is told, as by the first's, who is behind: all ranks begin those of both in one
    order. It ends with the first. Every rank must call it.
    """
    described = COUNTED_GROUP if is_counted else None
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=described)
    assert isinstance(group, dist.ProcessGroup)  # else this rank isn't in it, and all are
    return group


def second_group() -> dist.ProcessGroup:
    """Another group of all ranks, as the first one is made, with its time-out. It ends with it.

    Every rank must call it.
    """
    group = dist.new_group(timeout=timeout_of(dist.distributed_c10d._get_default_group()))
    assert isinstance(group, dist.ProcessGroup)
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time-out that its collectives have; None, for which torch takes a default, where the backend tells none."""
    backend = group._get_backend(group._device_types[0])
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def set_timeout(timeout_s: float, context: Context, *, groups: Sequence[dist.ProcessGroup] = ()) -> None:
    """Give every later collective this time-out. Every rank must call it at the same place.

    groups: those that were made besides, for collectives of training.
    """
    if context.world_size == 1:
        return
    dist.barrier()  # the new, shorter limit must not catch a rank that is still setting up
    limit_groups(timeout_s, (None, *groups))


def limit_groups(timeout_s: float, groups: Sequence[dist.ProcessGroup | None]) -> None:
    """Give every later collective of these groups this time-out; None is the default group."""
    timeout = timedelta(seconds=timeout_s)
    for group in groups:
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timeout, group)
        else:
            # Before the public function came, this private one was the only way.
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def backends(context: Context, *, with_cpu: bool) -> str:
    """What `init_process_group` is given: the context's backend, and gloo for the CPU where that is served too."""
    kind = context.device.type
    return f"{kind}:{context.backend},cpu:gloo" if with_cpu and kind != "cpu" else context.backend


def _init(backend: str, context: Context, settings: BackendConfig, *, rendezvous: str | None) -> None:
    # With a device, NCCL connects eagerly and every collective knows its GPU; a replica over several has no single one.
    one_gpu = context.device.type != "cpu" and len(context.devices) == 1 and context.backend != "gloo"
    timeout = timedelta(seconds=settings.init_timeout)
    dist.init_process_group(
        backend,
        store=dist.HashStore() if rendezvous is None else _meet(rendezvous, context, timeout=timeout),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=context.device if one_gpu else None,
    )


def _meet(rendezvous: str, context: Context, *, timeout: timedelta) -> dist.Store:
    """The ranks' store, as `init_process_group` would find it, without what an attempt before this one has left there.

    Torch's own agents make a new store for each attempt; here the run's store lives on, and with it the addresses of
    ranks that are gone.
    """
    store, _, _ = next(dist.rendezvous(rendezvous, context.rank, context.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
