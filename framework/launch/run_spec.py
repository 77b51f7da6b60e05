"""What to run, as member 0 of a rendezvous sends it to the others."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from framework.config.topology import Topology
from framework.errors import ConfigError
from framework.monitoring.node_monitor import Limits
from framework.system.files import read_text
from framework.system.run_dir import RunDir, write_atomically


@dataclass(frozen=True)
class RunSpec:
    """What to run."""

    entry: str
    run_dir: str
    topology: Topology
    limits: Limits
    # See `NodeSetup`.
    is_resumable: bool
    # The texts of files of the run directory. `secrets` is empty if there is no such file.
    config: str
    overrides: str
    secrets: str

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RunSpec:
        parsed = {"topology": Topology(**plain["topology"]), "limits": Limits(**plain["limits"])}
        return RunSpec(**{**plain, **parsed})


def make_visible(run_dir: RunDir, spec: RunSpec) -> None:
    """Make the run directory if this node, with a disk of its own, doesn't see rank 0's. Raises ConfigError.

    Every rank of the node does it, each file atomically and with the same content, so none has to wait for another.
    """
    with suppress(FileNotFoundError):
        if read_text(run_dir.config_file) == spec.config:
            return
    try:
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        if spec.secrets:
            write_atomically(run_dir.secrets_file, spec.secrets, is_private=True)
        write_atomically(run_dir.overrides_file, spec.overrides)
        write_atomically(run_dir.config_file, spec.config)
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} can't make the run directory {run_dir.path}: {error.strerror or error}.\n"
            "Use a folder that every node can write: path.outputs=FOLDER"
        ) from error
