"""Write one checkpoint into a storage: its files with their checksums, and the manifest last.

Nothing here knows of ranks or of other checkpoints.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy
import torch
import torch.utils.serialization

from framework.checkpoint.direct_io import ChecksummedFile
from framework.checkpoint.layout import CONFIG_NAME, MANIFEST_NAME, PARTS, Manifest, encode, part_file, step_name
from framework.checkpoint.storage import CheckpointStorage, LocalStorage, WriteContent, disk_errors
from framework.errors import CheckpointError, DiskError
from framework.system.files import FileFacts, content_damage, open_regular
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from framework.checkpoint.shards import Shards

# The types that `torch.load(weights_only=True)` reads.
_VALUES = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        torch.Tensor,
        torch.nn.Parameter,
        torch.Size,
        torch.device,
        torch.dtype,
    }
)
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})


def write(
    storage: CheckpointStorage,
    state: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    config_text: str,
    shards: Shards | None = None,
) -> str:
    """Write one checkpoint and return its name.

    A checkpoint of the same step is replaced. One process at a time may write to a storage; with `shards`, of a sharded
    model, every rank must call it. Raises DiskError if the storage refuses; earlier checkpoints stay.

    Args:
        state: as `check_plain` requires; with `shards` without `model`, and only rank 0's is used.
    """
    checkpoint = step_name(step)
    # Called with the facts of the files that are written before, by the ranks of a sharded model.
    make_files = partial(_files, state, step=step, epoch=epoch, metrics=metrics, config_text=config_text)
    with disk_errors(f"The checkpoint of step {step} can't be written to {storage}"):
        if shards is None:
            storage.write(checkpoint, make_files({}))
        else:
            _write_sharded(storage, checkpoint, shards, make_files)
    return checkpoint


def point(storage: CheckpointStorage, pointer: str, *, step: int) -> None:
    """Make `pointer`, such as `last`, name the checkpoint of `step`. Raises DiskError if the storage refuses."""
    checkpoint = step_name(step)
    with disk_errors(f"The pointer {storage}/{pointer} can't be moved to {checkpoint}"):
        storage.point(pointer, checkpoint)


def delete(storage: CheckpointStorage, step: int) -> None:
    """Delete the checkpoint of `step`. Raises DiskError if the storage refuses."""
    checkpoint = step_name(step)
    with disk_errors(f"The checkpoint {storage}/{checkpoint} can't be deleted"):
        storage.delete(checkpoint)


def _files(
    state: Mapping[str, Any],
    shard_facts: Mapping[str, FileFacts],
    *,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    config_text: str,
) -> dict[str, WriteContent]:
    """Return the files of a checkpoint in the order to write them: each adds its facts to the manifest, the last one.

    Args:
        shard_facts: The facts of a sharded model's files, which are written already.
    """
    contents: dict[str, WriteContent] = {}
    for part in PARTS:
        if part in state:
            contents[part_file(part)] = partial(_save, state[part])
    contents[CONFIG_NAME] = lambda file: file.write(config_text.encode())
    # The facts of the files that are written already, by name.
    facts = dict(shard_facts)

    def write_recorded(file: BinaryIO, *, name: str) -> None:
        checksummed = ChecksummedFile(file)
        contents[name](checksummed)
        facts[name] = checksummed.finish()

    def write_manifest(file: BinaryIO) -> None:
        missing = contents.keys() - facts.keys()
        if missing:
            names = ", ".join(sorted(missing))
            raise RuntimeError(f"A storage must write the manifest last, and {names} isn't written yet.")
        manifest = Manifest(
            step=step,
            epoch=epoch,
            metrics=dict(metrics),
            files=facts,
            framework_version=installed_versions(("framework",))["framework"],
            torch_version=torch.__version__,
        )
        file.write(encode(manifest).encode())

    files: dict[str, WriteContent] = {name: partial(write_recorded, name=name) for name in contents}
    files[MANIFEST_NAME] = write_manifest
    return files


def _save(value: Any, file: Any) -> None:
    settings: Any = torch.utils.serialization.config
    # Zip's own checksums take a third of `torch.save`'s time.
    with settings.patch("save.compute_crc32", False):
        torch.save(value, file)


def _write_sharded(
    storage: CheckpointStorage,
    checkpoint: str,
    shards: Shards,
    make_files: Callable[[Mapping[str, FileFacts]], dict[str, WriteContent]],
) -> None:
    """Write every rank's shards into the directory of a checkpoint, and then, on rank 0, the other files.

    Args:
        make_files: Returns the other files, for the facts of the shards' files.
    """
    assert isinstance(storage, LocalStorage), "the manager has checked that"
    directory = storage.unfinished(checkpoint)
    # What rank 0 has to do at the end, whether the shards are written or not.
    cleanup = ExitStack()

    def begin() -> None:
        cleanup.callback(storage.discard_unfinished, checkpoint)
        storage.begin(checkpoint)

    def finish(shard_facts: Mapping[str, FileFacts]) -> None:
        missing = []
        for name, facts in shard_facts.items():
            if content_damage(partial(open_regular, directory / name), facts, thorough=False):
                missing.append(name)
        if missing:
            raise DiskError(
                f"Rank 0 doesn't see all files that the others have written to {storage}: {', '.join(missing[:4])}.\n"
                "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
            )
        storage.finish(checkpoint, make_files(shard_facts))

    with cleanup:
        shards.write(directory, begin=begin, finish=finish)


def with_python_numbers(state: Any) -> Any:
    """Return a state of dicts, lists and tuples with Python's numbers in place of NumPy's.

    A schedule that computes with NumPy, as `np.cos` in a LambdaLR, leaves them in the optimizer's groups.
    """
    if isinstance(state, numpy.generic):
        return state.item()
    if type(state) is dict:
        return {key: with_python_numbers(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(with_python_numbers(value) for value in state)
    return state


def is_plain(state: Any) -> bool:
    """Return True if `check_plain` accepts the state."""
    try:
        check_plain(state)
    except CheckpointError:
        return False
    return True


def check_plain(state: Any, *, name: str = "") -> None:
    """Raise CheckpointError, naming the entry, if `torch.load(weights_only=True)` would not read `state` back.

    Types are compared exactly: a subclass would come back as something else, or not at all.
    """
    kind = type(state)
    if kind in _VALUES:
        return
    if kind in _MAPPINGS:
        for key, value in state.items():
            if isinstance(key, str):
                entry_name = f"{name}.{key}".lstrip(".")
            else:
                entry_name = f"{name}[{key!r}]"
            check_plain(key, name=f"the key {entry_name}")
            check_plain(value, name=entry_name)
    elif kind in _SEQUENCES:
        for index, value in enumerate(state):
            check_plain(value, name=f"{name}[{index}]")
    else:
        raise CheckpointError(
            f"The state to save has at {name or 'its top'} a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"can't hold.\nIt may hold tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of "
            "them: give number.item(), torch.from_numpy(array), str(path), dict(mapping), module.state_dict()."
        )
