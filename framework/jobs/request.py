"""What the command hands a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework.config.schema import Config

if TYPE_CHECKING:
    from framework.launch.warm import WarmServer


@dataclass(frozen=True)
class Request:
    """One configuration that was composed, parsed and checked.

    raw: what `config` was parsed from, resolved plain values: what `config.yaml` gets. Parsing it gives `config` again.
    overrides: what was typed, without `resume`; after what was typed for the run that is resumed, where there is one.
    choices: group → option, for the groups of which one option was chosen.
    warm: the fork server that was started meanwhile, if one was.
    """

    config: Config
    raw: Mapping[str, Any]
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    warm: WarmServer | None = None
