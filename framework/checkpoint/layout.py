"""What is in a checkpoint directory, and its manifest: the file that says the others are complete. No torch.

    checkpoints/step_00001200/
      model.pt         the unwrapped model's plain state dict: the weights to evaluate and to use
      training.pt      optimizer, scheduler, scaler, callbacks, progress; also `model` if training continues from other
                       weights than those, and `replicas` if each rank has its own, see replicas.py
      generators.pt    a list: the random generators' states of each rank
      config.yaml      the run's resolved config
      manifest.json    written last: versions, step, epoch, metrics, and every file's size and checksum
      sharded/         in place of model.pt if the model is sharded: a file of each rank, see shards.py

The checksum is CRC-32: it finds all damage of up to 32 bits in a row and misses other damage once in four billion
times, at 6.5 GB/s with zlib, where BLAKE2b does 1.3 GB/s. It is no defence against forgery; reading with
`weights_only=True` is.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from framework.errors import CheckpointError
from framework.system.files import FileFacts as FileFacts
from framework.system.files import file_damage, read_json

FORMAT_VERSION = 2
"""The version that is written, and the newest that is read. Version 1 had no sharded models."""

PARTS = ("model", "training", "generators")
"""The entries of a checkpoint's state; each is one file."""

SHARDS = "sharded"
"""The folder of a sharded model's files; there is no model.pt then."""
SHARDS_INDEX = f"{SHARDS}/.metadata"

MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.yaml"
LAST = "last"
BEST = "best"

_STEP_NAME = re.compile(r"step_(\d{8,})")


@final
class NewerFormatError(CheckpointError):
    """A newer framework wrote the checkpoint. It isn't damaged, so no older one is used instead."""


def part_file(part: str) -> str:
    return f"{part}.pt"


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a directory's name, None if it has none."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


@final
@dataclass(frozen=True)
class Manifest:
    step: int
    epoch: int
    # Of the evaluation of these weights, empty without one. Infinite ones are read back as NaN.
    metrics: Mapping[str, float]
    files: Mapping[str, FileFacts]
    framework_version: str
    torch_version: str
    format_version: int = FORMAT_VERSION

    @property
    def is_sharded(self) -> bool:
        return SHARDS_INDEX in self.files


def encode(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a checksum of itself."""
    content = asdict(manifest)
    content["metrics"] = {name: value if math.isfinite(value) else None for name, value in manifest.metrics.items()}
    return json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a step directory. Raises CheckpointError, NewerFormatError for a newer format."""
    found = _manifest_or_fault(directory)
    if isinstance(found, str):
        raise CheckpointError(f"The checkpoint {directory} can't be used: {found}.")
    return found


def manifest_or_none(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except CheckpointError:
        return None


def _manifest_or_fault(directory: Path) -> Manifest | str:
    """Return the manifest, or what is wrong with it. Raises NewerFormatError for a newer format.

    The manifest's own checksum is compared first, so that a damaged version number isn't taken for a newer one.
    """
    try:
        content = read_json(directory / MANIFEST_NAME)
        version = content["format_version"]
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content) and not (checksum is None and version > FORMAT_VERSION):
            raise ValueError("its checksum differs")
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{directory} has checkpoint format {version}, written by framework {content['framework_version']}; "
                f"this one reads up to format {FORMAT_VERSION}.\nUpdate the framework to use it."
            )
        metrics = {name: math.nan if value is None else float(value) for name, value in content["metrics"].items()}
        files = {_checked_name(name): FileFacts(**facts) for name, facts in content["files"].items()}
        manifest = Manifest(**{**content, "metrics": metrics, "files": files})
        if type(manifest.step) is not int or type(manifest.epoch) is not int:
            raise ValueError("its step and epoch must be numbers")
        return manifest
    except FileNotFoundError:
        return f"it has no {MANIFEST_NAME}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"its {MANIFEST_NAME} is damaged ({reason})"


def find_damage(directory: Path, *, thorough: bool = True, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with a step directory, such as "model.pt is missing"; None if nothing is.

    Unpickles nothing, so a file of unknown origin can't run code. Raises NewerFormatError for a newer format.

    Args:
        thorough: read every file and compare its checksum; else only the manifest and the sizes are checked.
        rank: check every `world_size`-th file from this one on, if ranks share the work.
    """
    if not directory.is_dir():
        return "it isn't a directory" if directory.exists() else "it is gone"
    manifest = _manifest_or_fault(directory)
    if isinstance(manifest, str):
        return manifest
    if step_of(directory.name) not in (None, manifest.step):  # someone renamed it
        return f"its {MANIFEST_NAME} is of step {manifest.step}"
    faults = {
        name: file_damage(directory / name, manifest.files[name], thorough=thorough)
        for name in sorted(manifest.files)[rank::world_size]
    }
    return "; ".join(f"{name} {fault}" for name, fault in faults.items() if fault is not None) or None


def _checked_name(name: str) -> str:
    """Return the name of a file inside the checkpoint. Raises ValueError for one that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"it names {name}, which isn't in the checkpoint")
    return name


def _checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
