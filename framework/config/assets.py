"""Find the folders of YAML files, of the documentation and of the user's modules."""

from __future__ import annotations

import sys
from pathlib import Path

from framework.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_CONFIG_NAME = "config.yaml"


def config_dir() -> Path:
    """Return the folder of the framework's own YAML: in the package if installed, else in the repository.

    Raises ConfigError if the installation has neither.
    """
    places = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for place in places:
        if (place / _CONFIG_NAME).is_file():
            return place
    raise ConfigError(
        f"This installation is incomplete: there is no {_CONFIG_NAME} in {places[0]} or {places[1]}.\nInstall it again."
    )


def docs_dir() -> Path:
    """Return the folder of the documentation: in the package if installed, else in the repository."""
    installed = _PACKAGE / "docs"
    if installed.is_dir():
        return installed
    return _PACKAGE.parent / "docs"


def user_config_dir(working_dir: Path) -> Path | None:
    """Return the user's own `conf` in `working_dir`, whose files take precedence; None if there is none."""
    place = working_dir / "conf"
    if not place.is_dir() or place.samefile(config_dir()):
        return None
    return place.resolve()


def import_from_working_dir() -> None:
    """Put the working directory on sys.path, as `python -m` does, so that the user's modules are found."""
    working_dir = str(Path.cwd())
    # An empty entry is the working directory, too.
    if working_dir not in sys.path and "" not in sys.path:
        sys.path.insert(0, working_dir)
