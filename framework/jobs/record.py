"""What `run.json` says of a run: its command, code, versions, hardware, how it stands and how it ended."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from framework.hardware import cpu_count, visible_gpus
from framework.run_dir import RunDir
from framework.topology import Topology
from framework.versions import installed_versions

_PACKAGES = ("framework", "torch", "torchvision", "hydra-core", "omegaconf", "numpy")
_GIT_TIMEOUT_S = 5.0
_MAX_DIFF_CHARS = 1_000_000


def record_start(run_dir: RunDir, topology: Topology, *, arguments: Sequence[str]) -> None:
    """Note how the run was started, by a command with `arguments`. A resumed run keeps earlier starts as `earlier`."""
    facts: dict[str, Any] = {
        "status": "running",
        "started": _now(),
        "process": {"pid": os.getpid(), "host": socket.gethostname()},
        "command": shlex.join(["python", "-m", "framework", *arguments]),
        "topology": {**asdict(topology), "world_size": topology.world_size},
        "git": _git(),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "hardware": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpu_cores": cpu_count(),
            "gpus": [gpu.name for gpu in visible_gpus()],
        },
    }
    if run_dir.run_file.exists():
        before = run_dir.read_run()
        earlier = before.pop("earlier", [])
        kept = {key: before.get(key) for key in ("status", "started", "ended", "command")}
        facts |= {"earlier": [*earlier, kept], "ended": None}
    run_dir.update_run(facts)


def record_end(run_dir: RunDir, *, status: str, late: Sequence[Mapping[str, Any]] = ()) -> None:
    """Note how the run ended. late: ranks that others waited for and that came at last."""
    run_dir.update_run({"status": status, "ended": _now(), "late": [dict(each) for each in late]})


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git() -> dict[str, str] | None:
    """Revision and uncommitted changes of the repository around the working directory, or None outside of one."""
    revision = _run_git("rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision.strip(), "diff": (_run_git("diff", "HEAD") or "")[:_MAX_DIFF_CHARS]}


def _run_git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, errors="replace", timeout=_GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
