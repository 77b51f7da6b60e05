"""Whether a checkpoint is as it was written: its manifest, and every file's size and checksum. No torch.

Nothing is unpickled for it, so a file that isn't ours does nothing here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from framework.checkpoint.format import (
    MANIFEST_NAME,
    FileFacts,
    Manifest,
    NewerFormatError,
    decode,
    step_of,
)
from framework.errors import CheckpointError

_READ_BYTES = 1 << 20


def damage(directory: Path, *, thorough: bool = True, number: int = 0, of: int = 1) -> str | None:
    """What is wrong with a step directory, such as "model.pt is missing"; None where it is whole.

    thorough: read every file and compare its checksum; else only the manifest and the sizes are looked at, which costs
    a stat for each file. Of the files every `of`-th is looked at, from `number` on, where several share the work.
    Raises NewerFormatError where a newer framework wrote it.
    """
    if not directory.is_dir():
        return "it is no directory" if directory.exists() else "it is gone"
    try:
        manifest = decode((directory / MANIFEST_NAME).read_text(), directory=directory)
    except FileNotFoundError:
        return f"it has no {MANIFEST_NAME}"
    except NewerFormatError:
        raise
    except (OSError, ValueError, CheckpointError) as error:
        why = f"be read ({error.strerror or error})" if isinstance(error, OSError) else "be used"
        return f"its {MANIFEST_NAME} can't {why}"
    step = step_of(directory.name)
    if step not in (None, manifest.step):
        # It was renamed by hand, and would be taken for another step.
        return f"its {MANIFEST_NAME} is of step {manifest.step}"
    names = sorted(manifest.files)[number::of]
    return "; ".join(_faults(directory, manifest, names, thorough=thorough)) or None


def file_fault(path: Path, *, facts: FileFacts | None, thorough: bool = True) -> str | None:
    """What is wrong with one file of a checkpoint, to follow its name; None where it is as it was written.

    facts: what the manifest says of it, None where that doesn't know it.
    """
    if facts is None:
        return f"is not in {MANIFEST_NAME}"
    try:
        size_bytes = path.stat().st_size
        if size_bytes != facts.size_bytes:
            return f"has {size_bytes} bytes instead of {facts.size_bytes}"
        if thorough and _crc32(path) != facts.crc32:
            return "has another checksum than when it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error.strerror or error})"
    return None


def _faults(directory: Path, manifest: Manifest, names: Iterable[str], *, thorough: bool) -> Iterator[str]:
    for name in names:
        fault = file_fault(directory / name, facts=manifest.files[name], thorough=thorough)
        if fault is not None:
            yield f"{name} {fault}"


def _crc32(path: Path) -> str:
    crc32, buffer = 0, memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size_bytes := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:size_bytes], crc32)
    return f"{crc32:08x}"
