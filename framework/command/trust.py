"""Decide which saved runs are the user's own, and list what in another run would run code. No torch here.

Building a run's model imports and calls what its configuration names, and loads its pickles. A run is yours if it lies
below `path.outputs` of the command and, on a local disk, its files belong to you and nobody else can write them.
"""

from __future__ import annotations

import grp
import importlib.util
import os
import pwd
import stat
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.config.find_run import is_run
from framework.config.nested import walk
from framework.config.overrides import key_of
from framework.config.saved import SavedRun, objects_of
from framework.errors import ConfigError
from framework.system.formatting import display_path
from framework.system.private_folder import is_own_group

# Where owners and permissions are the kernel's own. Network file systems and those of virtual machines may show
# everybody's files as yours, or yours as somebody else's.
_LOCAL_FILE_SYSTEMS = frozenset(
    {
        "aufs",
        "bcachefs",
        "btrfs",
        "ecryptfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "fuse.fuse-overlayfs",
        "jfs",
        "overlay",
        "ramfs",
        "reiserfs",
        "tmpfs",
        "xfs",
        "zfs",
    }
)
_SHOWN = 20


def check_trust(found: SavedRun, *, outputs: Sequence[Path], asked_by: str) -> None:
    """Raise ConfigError that lists what would run code unless the run is the user's own.

    Args:
        outputs: the user's own `path.outputs`, not the run's.
        asked_by: what to type, for the message.
    """
    reason = why_foreign(found, outputs=outputs)
    if reason is None:
        return
    code = list(_what_runs_code(found))
    lines = [
        f"{display_path(found.run_dir.path)} isn't known to be yours: {reason}.",
        f"{found.key} would run code that it names or brings along, with your rights:",
        *code[:_SHOWN],
    ]
    if len(code) > _SHOWN:
        lines.append(f"  and {len(code) - _SHOWN} more")
    lines.append(f"If you trust all who could have written to it, {asked_by}.")
    raise ConfigError("\n".join(lines))


def why_foreign(found: SavedRun, *, outputs: Sequence[Path]) -> str | None:
    """Return why a run isn't the user's own; None if it is."""
    places = []
    if is_run(found.run_dir.path):
        places.append(found.run_dir.path)
    if found.checkpoint is not None:
        places.append(found.checkpoint)
    # The objects of a rerun, or of a copy without them, are in another run.
    objects = [Path(file) for file in objects_of(found.run_dir, found.raw)]
    tops = [folder.resolve() for folder in outputs]
    for place in (*places, *objects):
        if not any(place.resolve().is_relative_to(top) for top in tops):
            what = display_path(place) if place in objects else "it"
            folders = " or ".join(map(display_path, outputs))
            return f"{what} isn't below {folders}, the path.outputs of this command"
    for place in (*places, *objects):
        if reason := why_not_owned(place):
            return reason
    return None


def why_not_owned(place: Path, *, checks_writers: bool = True) -> str | None:
    """Return which file of a run isn't the user's, or which others can write; None on a disk that isn't local.

    checks_writers: false looks at the owners only.
    """
    if not place.exists() or not _is_local(place):
        return None
    for file in _files(place):
        try:
            status = file.stat()
        except OSError:
            # It was removed at this moment, or is a symlink that leads nowhere.
            continue
        if status.st_uid != os.geteuid():
            return f"{display_path(file)} belongs to {_user_name(status.st_uid)}"
        if checks_writers and status.st_mode & stat.S_IWOTH:
            return f"everybody can write {display_path(file)}"
        if checks_writers and status.st_mode & stat.S_IWGRP and not is_own_group(file, status.st_gid):
            return f"the group {_group_name(status.st_gid)} can write {display_path(file)}"
    return None


def _files(place: Path) -> Iterator[Path]:
    """Yield a file, or a folder and all that is below it. Symlinks to folders aren't followed."""
    yield place
    for folder, folders, files in os.walk(place):
        # W&B's folder has links to its logs, which may be another user's. Nothing in it is used.
        folders[:] = [name for name in folders if name != "wandb"]
        for name in (*folders, *files):
            yield Path(folder, name)


def _is_local(place: Path) -> bool:
    import psutil

    place = place.resolve()
    kind = None
    depth = -1
    for mount in psutil.disk_partitions(all=True):
        parts = len(Path(mount.mountpoint).parts)
        # Of two at one place, the later one hides the other.
        if place.is_relative_to(mount.mountpoint) and parts >= depth:
            kind = mount.fstype
            depth = parts
    return kind is None or kind in _LOCAL_FILE_SYSTEMS


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _what_runs_code(found: SavedRun) -> Iterator[str]:
    targets = _targets(found.raw)
    for name, keys in targets.items():
        yield f"  target  {name}  ({', '.join(keys)})"
    for file in objects_of(found.run_dir, found.raw):
        yield f"  pickle  {display_path(Path(file))}"
    for text in found.overrides:
        if key_of(text) == "hydra.searchpath":
            yield f"  config  {text}"
    for root in dict.fromkeys(name.partition(".")[0] for name in targets):
        place = _module_place(root)
        if place is not None:
            yield f"  module  {display_path(place)}"


_GETTERS = ("framework.config.targets.get_object", "hydra.utils.")


def _targets(raw: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the dotted names that a configuration has Python import, and the keys that have them."""
    targets: dict[str, list[str]] = {}
    for key, node in walk(raw):
        if not isinstance(node, Mapping) or "_target_" not in node:
            continue
        names = [str(node["_target_"])]
        # These import what `path` names. Earlier runs have those of Hydra.
        if names[0].startswith(_GETTERS) and isinstance(node.get("path"), str):
            names.append(node["path"])
        for name in names:
            targets.setdefault(name, []).append(key)
    return targets


def _module_place(root: str) -> Path | None:
    """Return where a module would be imported from, unless it is an installed one. Imports nothing."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else spec.origin or "")
    is_installed = bool({"site-packages", "dist-packages"}.intersection(place.parts))
    is_installed = is_installed or place.is_relative_to(sysconfig.get_path("stdlib"))
    if is_installed or root == "framework" or spec.origin in ("built-in", "frozen"):
        return None
    return place
