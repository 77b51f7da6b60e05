"""Where configuration comes from: the folders of YAML, and the launchers and jobs there are. Imports none of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from framework.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_CONFIG_NAME = "config.yaml"


def config_dir() -> Path:
    """The folder with the framework's own YAML: inside the package when installed, else the repository's.

    Raises ConfigError where the installation has neither.
    """
    places = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for place in places:
        if (place / _CONFIG_NAME).is_file():
            return place
    raise ConfigError(
        f"This installation is incomplete: there is no {_CONFIG_NAME} in {places[0]} or {places[1]}.\nInstall it again."
    )


def user_config_dir(working_dir: Path) -> Path | None:
    """The user's own `conf` in `working_dir`, whose files come before the framework's; None where there isn't one."""
    place = working_dir / "conf"
    return place.resolve() if place.is_dir() and not place.samefile(config_dir()) else None


def option_file(group: str, option: str, *, folders: Sequence[Path]) -> Path | None:
    """Return the file of a group's option, from the first of `folders` that has one."""
    files = (folder / group / f"{option}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), None)


def import_from_working_dir() -> None:
    """Let recipes and classes of the user's be found in the working directory, as `python -m` finds them."""
    working_dir = str(Path.cwd())
    if not {working_dir, ""} & set(sys.path):
        sys.path.insert(0, working_dir)


def launcher_names() -> tuple[str, ...]:
    """What `launcher.name` can be: `auto` and the modules of `framework.launch` that define `launch`."""
    return ("auto", *_modules_defining("launch", folder=_PACKAGE / "launch"))


def job_names() -> tuple[str, ...]:
    """What `job` can be: the modules of `framework.jobs` that define `main`."""
    return _modules_defining("main", folder=_PACKAGE / "jobs")


def _modules_defining(function: str, *, folder: Path) -> tuple[str, ...]:
    # Read, not imported: a module may import torch, which takes seconds, and the answer is needed before that.
    definition = re.compile(rf"^def {function}\(", re.MULTILINE)
    return tuple(
        sorted(file.stem for file in folder.glob("[!_]*.py") if definition.search(file.read_text(encoding="utf-8")))
    )
