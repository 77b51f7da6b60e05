"""Which of the user's modules this process has imported, and what is in them. No torch."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from framework.system.files import read_bytes

# Parts of the paths of installed packages.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")


def hashes_of_loaded_modules() -> dict[str, str]:
    """Return the SHA-256 of the file of each imported module, by the module's name, to see later if it has changed.

    Python's own modules, installed packages and the framework are left out. It takes a few milliseconds; what is
    changed between the import and this call is taken for what was imported.
    """
    hashes = {}
    for name, file in sorted(_files_of_users_modules()):
        # It is gone, or no file: a module in an archive.
        with suppress(OSError):
            hashes[name] = hashlib.sha256(read_bytes(Path(file))).hexdigest()
    return hashes


def _files_of_users_modules() -> Iterator[tuple[str, str]]:
    """Yield the names and files of the imported modules that aren't installed."""
    folders = _folders_of_others()
    # Other threads may import while this runs.
    for name, module in list(sys.modules.items()):
        # Asking some modules for an attribute imports others.
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or any(part in file for part in _INSTALLED):
            continue
        if not file.startswith(folders):
            yield name, file


def _folders_of_others() -> tuple[str, ...]:
    """Return the folders of Python and of the framework, each ending with a separator."""
    framework = str(Path(__file__).parents[1])
    folders: dict[str, None] = {}
    for folder in (framework, *map(sysconfig.get_path, _PYTHON)):
        # The path of a module has the symlink, or what it points to.
        folders[f"{folder}{os.sep}"] = None
        folders[f"{os.path.realpath(folder)}{os.sep}"] = None
    return tuple(folders)
