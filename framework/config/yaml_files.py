"""The YAML files of a run: written, and read with errors that name the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from framework.errors import ConfigError
from framework.system.files import check_nesting, read_text

# PyYAML's loader in C, if there is one: it saves 40 ms of each rank's start.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(file: Path) -> Any:
    """Load a YAML file.

    Raises OSError, ValueError or yaml.YAMLError if it can't be read.
    """
    return load_yaml_text(read_text(file))


def load_as(file: Path, kind: type) -> Any:
    """Load a YAML file with a mapping or list, as `kind` says. Raises ConfigError."""
    return checked(file, kind, lambda: load_yaml(file))


def load_yaml_text(text: str) -> Any:
    """Load YAML. Raises ValueError or yaml.YAMLError."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    # PyYAML's constructors don't expect what a damaged file may have after a tag: `!!int ''` is an IndexError.
    except Exception as error:
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error
    check_nesting(content)
    return content


def checked(file: Path, kind: type, load: Callable[[], Any]) -> Any:
    """Return what `load` makes of the file. Raises ConfigError if it fails, or returns something else than `kind`."""
    try:
        content = load()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        # YAML's errors have several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file} can't be read: {reason}") from error
    if not isinstance(content, kind):
        what = "mapping" if kind is dict else "list"
        raise ConfigError(f"{file} must hold a {what}. It was changed: restore it, or start a new run.")
    return content


def dump_yaml(value: Any) -> str:
    """Return YAML as it is in the files of a run."""
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    return text
