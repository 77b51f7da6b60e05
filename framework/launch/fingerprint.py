"""What a process was started with, to compare it with what another one was started with."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from framework.config.assets import config_dir, user_config_dir
from framework.system.versions import installed_versions

# Arguments by their keys, hashes of files, versions of packages.
Fingerprint = dict[str, str]

# Where most of what `_target_` names is.
_SOURCES = ("*.py", "*/*.py")


def fingerprint(arguments: Sequence[str], *, working_dir: Path) -> Fingerprint:
    """Return the fingerprint of this process, which was given these arguments of the command."""
    result: Fingerprint = {}
    for text in arguments:
        key, _, value = text.partition("=")
        # The number of the node is the one argument that differs from node to node.
        if key != "topology.node_rank":
            result[key] = value

    user_folder = user_config_dir(working_dir)
    if user_folder is None:
        folders = {"conf": config_dir()}
    else:
        folders = {"the framework's conf": config_dir(), "conf": user_folder}
    for name, folder in folders.items():
        for path, digest in _hashes(folder, "**/*.yaml"):
            result[f"{name}/{path}"] = digest
    for pattern in _SOURCES:
        result.update(_hashes(working_dir, pattern))

    result["python"] = ".".join(platform.python_version_tuple()[:2])
    result.update(installed_versions(("framework", "torch")))
    return result


def differences(theirs: Fingerprint, zeros: Fingerprint, *, kind: str = "rank") -> list[str]:
    """Return a line for each thing that differs, with both values.

    Args:
        zeros: the fingerprint of rank or node 0.
        kind: what is compared, "rank" or "node".
    """
    return [
        f"{name}: {theirs.get(name, 'missing')}; {kind} 0 has {zeros.get(name, 'none')}"
        for name in sorted(theirs.keys() | zeros.keys())
        if theirs.get(name) != zeros.get(name)
    ]


def _hashes(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the path below `folder` and the hash of each file that can be read."""
    for file in sorted(folder.glob(pattern)):
        if file.is_file() and os.access(file, os.R_OK):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            yield file.relative_to(folder).as_posix(), f"sha256 {digest[:16]}"
