"""Which versions of packages are installed; nothing is imported for it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package → version, `not installed` for one that isn't there."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
