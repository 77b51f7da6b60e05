"""What lies in a checkpoint directory, and its manifest: the file that says the others are complete. No torch.

    checkpoints/step_00001200/
      model.pt         the unwrapped model's plain state dict: the weights to evaluate and to use
      training.pt      optimizer, scheduler, scaler, callbacks, progress; and `model` where training goes on from others
                       and `replicas` where each rank's are its own, see replicas.py
      generators.pt    a list: the random generators' states of each rank
      config.yaml      the run's resolved config
      manifest.json    written last: versions, step, epoch, metrics, and every file's size and checksum
      sharded/         in place of model.pt where the model is spread over ranks: each one's part, see sharded.py

The checksum is CRC-32: it finds every damage of up to 32 bits in a row and misses other damage once in four billion
times, at 6.5 GB/s with zlib where BLAKE2b does 1.3 GB/s. It is no defence against forgery; that files are read with
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

WHOLE_VERSION = 1
SHARDED_VERSION = 2
FORMAT_VERSION = SHARDED_VERSION
"""The newest that is read. Each checkpoint bears the oldest that reads it."""

PARTS = ("model", "training", "generators")
"""The keys of a checkpoint's state; each is one file."""

SHARDS = "sharded"
"""The folder of what ranks hold parts of, where a model is spread over them; there is no file of the model then."""
SHARDS_INDEX = f"{SHARDS}/.metadata"

MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.yaml"
LAST = "last"
BEST = "best"

_STEP_NAME = re.compile(r"step_(\d{8,})")


@final
class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer framework: it isn't damaged, and no older one is what was asked for."""


def part_file(part: str) -> str:
    return f"{part}.pt"


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step a directory name bears; None where it is no step's name."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


@final
@dataclass(frozen=True)
class FileFacts:
    size_bytes: int
    crc32: str


@final
@dataclass(frozen=True)
class Manifest:
    """metrics: of the evaluation this checkpoint was saved after, empty without one. Not finite ones become NaN."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileFacts]
    framework_version: str
    torch_version: str
    format_version: int = WHOLE_VERSION

    @property
    def is_sharded(self) -> bool:
        """Whether it is of a model that is spread over ranks."""
        return SHARDS_INDEX in self.files


def encode(manifest: Manifest) -> str:
    """The manifest as JSON, with a checksum of itself."""
    content = asdict(manifest)
    content["metrics"] = {name: value if math.isfinite(value) else None for name, value in manifest.metrics.items()}
    return json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n"


def decode(text: str, *, directory: Path) -> Manifest:
    """The manifest that `encode` wrote. Raises CheckpointError where it is damaged, NewerFormatError for a newer one.

    Whatever a newer format has, its checksum is made in this way, so that a damaged version isn't taken for a new one.
    """
    try:
        content = json.loads(text)
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
        files = {name: FileFacts(**facts) for name, facts in content["files"].items()}
        return Manifest(**{**content, "metrics": metrics, "files": files})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"The checkpoint {directory} is damaged: its {MANIFEST_NAME} can't be used.") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
