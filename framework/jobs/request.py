"""What the command hands a job, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config.schema import Config
from framework.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.leader import Leader
    from framework.launch.warm import WarmServer


@dataclass(frozen=True)
class Place:
    """Where a job of a sweep belongs: its directory is `folder`/`number`."""

    folder: Path
    number: int


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `score`: the monitored metric at its best, None where nothing was monitored or reached."""

    status: int
    run_dir: RunDir | None = None
    score: float | None = None


@dataclass(frozen=True)
class Request:
    """One configuration that was composed, parsed and checked.

    raw: what `config` was parsed from, resolved plain values: what `config.yaml` gets. Parsing it gives `config` again.
    overrides: what was typed, without `resume`; after what was typed for the run that is resumed, where there is one.
    replaced: chosen options that differ from the recipe's, such as model=toy → the recipe's own.
    arguments: `python -m framework ARGUMENTS` starts the same run again; of a job of a sweep, that job alone.
    warm: the fork server that was started meanwhile, if one was.
    place: None but for a job of a sweep, which then says nothing on the terminal itself.
    leader: in rank 0 of ranks that something else has started: its dealings with the others.
    home: the run whose checkpoint is used, in which an evaluation gets its directory; None for `path.outputs`.
    """

    config: Config
    raw: Mapping[str, Any]
    overrides: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    warm: WarmServer | None = None
    place: Place | None = None
    leader: Leader | None = None
    home: Path | None = None
