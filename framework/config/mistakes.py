"""Mistakes of a configuration, of which all are reported together."""

from __future__ import annotations

from collections.abc import Sequence

from framework.errors import ConfigError


def raise_mistakes(mistakes: list[str]) -> None:
    """Raise one ConfigError that lists all of `mistakes`; do nothing if there are none."""
    if mistakes:
        raise ConfigError(as_text(mistakes))


def as_text(mistakes: Sequence[str]) -> str:
    """Return a message with all of `mistakes`, of which there is at least one."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = [f"The configuration has {len(mistakes)} mistakes:"]
    for mistake in mistakes:
        lines.append("  - " + mistake.replace("\n", "\n    "))
    return "\n".join(lines)
