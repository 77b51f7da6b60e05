"""The pickled Python objects of a run that `framework.train` started, as attributes of this module.

`_target_: framework.config.objects.Net` refers to one, in a process that has called `load_objects`. Loading the pickles
runs code, as importing the user's modules does.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from framework.errors import ConfigError, describe_error
from framework.system.run_dir import RunDir

_loaded: dict[str, Any] = {}


@final
class ObjectFactory:
    """Stands for an object where a configuration names a callable: calling it returns the object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


Given = ObjectFactory
"""The name in the pickles of earlier versions."""


def load_objects(files: Sequence[str]) -> None:
    """Load the objects of a run in place of any loaded before. If files share a name, the last one wins.

    Raises RequestError if a file isn't what its run wrote, or needs a module that can't be imported here.
    """
    _loaded.clear()
    for name in files:
        file = Path(name)
        content = RunDir(file.parent).read_unchanged(file)
        try:
            _loaded.update(pickle.loads(content))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{file} has Python objects of the run, and they need what can't be imported here: {error}.\n"
                "Use the folder and the environment that the run was started from."
            ) from error
        # A damaged pickle, and the user's classes, can raise anything.
        except Exception as error:
            raise ConfigError(
                f"{file} has Python objects of the run, and they can't be loaded: {describe_error(error)}"
            ) from error


def __getattr__(name: str) -> Any:
    try:
        return _loaded[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return list(_loaded)
