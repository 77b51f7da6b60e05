"""Where compiled code is kept, so that a model is compiled once: by resumes, restarts, trials and ranks alike.

torch keeps it in the temporary directory, which a restart of the machine or of a container empties, and in which
somebody else may have made the folder first: what is read from it is executed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from framework.config.schema import Config
from framework.distributed.context import accelerator_name
from framework.errors import ConfigError
from framework.system.private_folder import private_folders, private_places
from framework.system.versions import installed_versions

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NAME = "compiled"
# Bytes that have to be free: a compiler that can't write its files ends the run.
_ROOM = 100_000_000
_CPU_INFO = Path("/proc/cpuinfo")
# The lines of /proc/cpuinfo that say what `-march=native` compiles for: x86's, then Arm's.
_CPU_LINES = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")


@contextmanager
def compile_cache(config: Config, device: torch.device) -> Iterator[None]:
    """With `trainer.compile`, have this process keep what it compiles in the user's cache.

    The folder is for this version of torch and this kind of device. TORCHINDUCTOR_CACHE_DIR, if the user has set it,
    wins. Raises ConfigError if there is no folder that only this user can write and that has room.
    """
    before = os.environ.get(_VARIABLE)
    if config.trainer.compile is None or not _is_torchs_own(before):
        yield
        return
    os.environ[_VARIABLE] = str(compile_cache_folder(device))
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        if before is not None:
            os.environ[_VARIABLE] = before


def compile_cache_folder(device: torch.device) -> Path:
    """Return the folder for what is compiled for a device, by versions and the kinds of CPU and device.

    Several processes may use it at once: torch locks what it compiles.
    """
    folder = None
    for candidate in private_folders(_NAME):
        has_room = shutil.disk_usage(candidate).free >= _ROOM
        if has_room and _can_be_in_a_command(candidate):
            folder = candidate
            break
    if folder is None:
        first, second = private_places(_NAME)
        raise ConfigError(
            f"trainer.compile keeps compiled code, but neither {first} nor {second} is a folder that this user alone "
            "can write, with no space in its path and 100 MB free.\nSet XDG_CACHE_HOME to a folder of yours, or "
            "TORCHINDUCTOR_CACHE_DIR for compiled code alone."
        )
    build = [torch.__version__, torch.version.git_version, sys.implementation.cache_tag, *_triton()]
    key = "\n".join([*build, _cpu(), accelerator_name(device)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return folder / f"torch_{torch.__version__}_{device.type}_{digest}"


def _is_torchs_own(value: str | None) -> bool:
    """Return True if the user hasn't set the variable: torch sets it when it compiles, also in a notebook's process."""
    if value is None:
        return True
    # Imported here, as only runs that compile need it.
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return value == default_cache_dir()


def _can_be_in_a_command(folder: Path) -> bool:
    """Return False for a path that torch couldn't give to the C++ compiler: it doesn't quote spaces."""
    return shlex.quote(str(folder)) == str(folder)


def _triton() -> list[str]:
    versions = installed_versions(("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"))
    return [f"{name} {version}" for name, version in versions.items()]


def _cpu() -> str:
    """Return what code compiled with `-march=native` depends on. torch's own keys don't have it.

    Nodes with different CPUs may share a home directory, and code for the newer one would crash the other.
    """
    try:
        # The first core's. Reading on would ask every core for its frequency.
        with _CPU_INFO.open() as file:
            first_core = list(iter(file.readline, "\n"))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    described = [line for line in first_core if line.partition(":")[0].strip() in _CPU_LINES]
    return platform.machine() + "".join(described)
