"""What is in a checkpoint, and its manifest: the file that says the others are complete. No torch.

    checkpoints/step_00001200/
      model.pt         the unwrapped model's plain state dict: the weights to evaluate and to use
      training.pt      optimizer, scheduler, scaler, callbacks, progress; also `model` if training continues from other
                       weights than those, and `replicas` if each rank has its own, see replicas.py
      generators.pt    a list: the random generators' states of each rank
      config.yaml      the run's resolved config
      manifest.json    written last: versions, step, epoch, metrics, and every file's size and checksum
      sharded/         in place of model.pt if the model is sharded: a file of each rank, see shards.py

The checksum is CRC-32: it finds all damage of up to 32 bits in a row and misses other damage once in four billion
times. It is computed by isal, see system/files.py. It is no defence against forgery; reading with `weights_only=True`
is.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from framework.errors import CheckpointError
from framework.system.files import FileFacts as FileFacts
from framework.system.files import parse_json

# The version that is written, and the newest that is read. Version 1 had no sharded models.
FORMAT_VERSION = 2

# The entries of a checkpoint's state; each is one file.
PARTS = ("model", "training", "generators")

# The folder of a sharded model's files; there is no model.pt then.
SHARDS = "sharded"
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
    """Return the step in the name of a checkpoint, None if it has none."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # step_0000000012 isn't how 12 is written.
    if step_name(step) != name:
        return None
    return step


def steps_of(names: Iterable[str]) -> set[int]:
    """Return the steps in the names of checkpoints; other names are left out."""
    steps = set()
    for name in names:
        step = step_of(name)
        if step is not None:
            steps.add(step)
    return steps


@final
@dataclass(frozen=True)
class Manifest:
    step: int
    epoch: int
    # The metrics of an evaluation of these weights, empty without one. Infinite ones are read back as NaN.
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
    for name, value in manifest.metrics.items():
        # JSON has no NaN and no infinity.
        content["metrics"][name] = value if math.isfinite(value) else None
    return json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n"


def decode(text: bytes, *, source: object) -> Manifest:
    """Return the manifest that `encode` has made a text of.

    Raises ValueError if it is damaged, NewerFormatError, which names `source`, for a newer format.
    """
    try:
        content = parse_json(text)
        version = content["format_version"]
        checksum = content.pop("checksum", None)

        # The checksum is compared first, so that a damaged version number isn't taken for a newer one. A newer format
        # may have another checksum, or none.
        is_newer_without = checksum is None and version > FORMAT_VERSION
        if checksum != _checksum(content) and not is_newer_without:
            raise ValueError("its checksum differs")
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"{source} has checkpoint format {version}, written by framework {content['framework_version']}; "
                f"this one reads up to format {FORMAT_VERSION}.\nUpdate the framework to use it."
            )

        for name, value in content["metrics"].items():
            content["metrics"][name] = math.nan if value is None else float(value)
        content["files"] = {_checked_name(name): FileFacts(**facts) for name, facts in content["files"].items()}
        manifest = Manifest(**content)
        if type(manifest.step) is not int or type(manifest.epoch) is not int:
            raise ValueError("its step and epoch must be numbers")
        return manifest
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _checked_name(name: str) -> str:
    """Return the name of a file inside the checkpoint. Raises ValueError for one that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"it names {name}, which isn't in the checkpoint")
    return name


def _checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
