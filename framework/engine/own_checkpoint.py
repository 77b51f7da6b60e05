"""Which checkpoint a run resumes from: all ranks verify its files together, and agree on one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from framework.checkpoint import find, find_damage, manifest_or_none
from framework.checkpoint.lookup import LastUndamaged, describe_others, last_undamaged
from framework.distributed.collectives import broadcast_object, gather_to_all
from framework.distributed.context import Context
from framework.engine.setup import RankSetup
from framework.errors import CheckpointError, RunError
from framework.remote.place import RemotePlace
from framework.system.formatting import display_path
from framework.system.rank_log import warn


def own_checkpoint(setup: RankSetup) -> LastUndamaged:
    """Return the checkpoint to resume from; none for a new run, or one that was stopped before its first checkpoint.

    It is the one that `resume` names. If that is the run directory, or in a restart, it is the last undamaged one. Its
    files are verified first. Every rank must call it.

    Raises:
        RunError: this node doesn't have it, and the run has no URL to fetch it from.
        CheckpointError: it can't be used; the same on every rank.
    """
    if setup.config.resume is None and setup.attempt == 0:
        return LastUndamaged(None)
    context = setup.context
    source = Path(str(setup.config.resume))
    is_last = setup.attempt > 0 or source.resolve() == setup.run_dir.path.resolve()
    if is_last:
        source = setup.run_dir.checkpoints

    agreed = _agree(source, context, is_last=is_last)
    directory = agreed.directory
    if directory is not None and is_last:
        # Symlinks may lead elsewhere than on rank 0's node.
        directory = (source / directory.name).resolve()
    if directory is not None and manifest_or_none(directory) is None:
        _fetch(setup, directory)
    if directory is not None and manifest_or_none(directory) is None:
        raise RunError(
            f"Node {context.node_rank} ({socket.gethostname()}) doesn't have the checkpoint to resume from, "
            f"{directory}.\nPut the run directory on a disk that all nodes share, path.outputs=FOLDER, or in a bucket, "
            "path.outputs=s3://BUCKET/FOLDER"
        )
    if context.is_main:
        for damaged, text in agreed.damaged:
            path = display_path(damaged)
            warn(f"The checkpoint {path} can't be used: {text}. An earlier one is used; nothing is deleted")
        if directory is None:
            warn("There is no checkpoint yet: the run starts from scratch")
    return LastUndamaged(directory, agreed.damaged)


def _fetch(setup: RankSetup, directory: Path) -> None:
    """Fetch a checkpoint that this node lacks, if the run has a URL. Raises RequestError if that fails."""
    place = RemotePlace.of_run(setup.run_dir.path, outputs=setup.config.path.outputs)
    if place is not None:
        # It imports what only URLs need.
        from framework.remote.fetch import fetch_uploaded

        fetch_uploaded(place, directory.name, timeout_s=setup.config.backend.init_timeout)


def _agree(source: Path, context: Context, *, is_last: bool) -> LastUndamaged:
    """Return the checkpoint that `source` means, the same on every rank, once all ranks have read its files.

    With `is_last`, `source` is a folder of checkpoints, and its last undamaged one is meant.

    Rank 0 proposes a checkpoint, and every rank reads its share of the files. If it is damaged, rank 0 proposes an
    earlier one or gives an error. If it is whole, rank 0 proposes it again, which ends the loop.
    """
    # What is wrong with each checkpoint whose files were read; None for nothing.
    faults: dict[Path, str | None] = {}
    while True:
        proposed = None
        if context.is_main:
            proposed = _propose(source, faults, is_last=is_last)
        proposed = broadcast_object(proposed, context)
        if isinstance(proposed, str):
            raise CheckpointError(proposed)
        assert isinstance(proposed, LastUndamaged)
        directory = proposed.directory
        if directory is None or directory in faults:
            return proposed
        faults[directory] = _read_together(directory, context)


def _propose(source: Path, faults: Mapping[Path, str | None], *, is_last: bool) -> LastUndamaged | str:
    """Return the checkpoint that `source` means, or an error's text.

    One that isn't in `faults` yet has only its sizes checked.
    """

    def damage(directory: Path) -> str | None:
        if directory in faults:
            return faults[directory]
        return find_damage(directory, thorough=False)

    try:
        if is_last:
            return last_undamaged(source, find_damage=damage)
        directory = find(source)
        fault = damage(directory)
    except CheckpointError as error:
        return str(error)
    if fault is not None:
        return f"The checkpoint {directory} is damaged: {fault}.\n{describe_others(directory)}"
    return LastUndamaged(directory)


def _read_together(directory: Path, context: Context) -> str | None:
    """Let each rank read its share of the files. Return what is wrong with them, the same on every rank."""
    fault = None
    # A node with a disk of its own may not have the checkpoint, which is refused later.
    if manifest_or_none(directory) is not None:
        fault = find_damage(directory, rank=context.rank, world_size=context.world_size)
    faults = [text for text in gather_to_all(fault, context) if text is not None]
    return "; ".join(faults) or None
