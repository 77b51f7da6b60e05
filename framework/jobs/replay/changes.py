"""What has changed since a run made a step, and may give other numbers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from framework.runs.compare import cell, compare_origins
from framework.runs.record import code_and_versions
from framework.runs.segments import Segment


def changes_since(segment: Segment) -> list[str]:
    """Return a line for each version that has changed, for the repository's code, and for what isn't known."""
    sections = compare_origins([{"git": segment.git, "versions": segment.versions}, code_and_versions()])
    changes = []
    if segment.doubt is not None:
        changes.append(segment.doubt)
    for name, (then, now) in {**sections["versions"], **sections["code"]}.items():
        changes.append(f"{name} was {cell(then)}, and is {cell(now)} now")
    return changes


def changed_modules(segment: Segment, modules: Mapping[str, str]) -> list[str]:
    """Return a line for each of the user's modules that has changed. modules: the hashes of the present ones."""
    changes = []
    for name, digest in modules.items():
        before = segment.modules.get(name)
        if before is not None and before != digest:
            changes.append(f"the module {name} has changed")
    return changes
