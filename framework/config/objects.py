"""The pickled Python objects of a run that `framework.train` started, as attributes of this module.

`_target_: framework.config.objects.Net` refers to one, in a process that has called `load_objects`. Loading the pickles
runs code, as importing the user's modules does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from framework.errors import ConfigError

_loaded: dict[str, Any] = {}


@final
class Given:
    """Stands for an object where a configuration names a callable: calling it returns the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def load_objects(files: Sequence[str]) -> None:
    """Load the objects of a run in place of any loaded before. If files share a name, the last one wins.

    Raises ConfigError if a file is missing, or needs a module that can't be imported here.
    """
    _loaded.clear()
    for file in files:
        try:
            _loaded.update(pickle.loads(Path(file).read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"{file} can't be read: {error.strerror}. It has the Python objects that the run was started with."
            ) from error
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{file} has Python objects of the run, and they need what can't be imported here: {error}.\n"
                "Use the folder and the environment that the run was started from."
            ) from error


def __getattr__(name: str) -> Any:
    try:
        return _loaded[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return list(_loaded)
