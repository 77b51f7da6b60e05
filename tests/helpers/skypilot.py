"""SkyPilot's published schema of a task, read without what SkyPilot depends on; `make test-all` installs its files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.requirements import missing

FOLDER = Path(sys.prefix, "skypilot")


def schemas(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The schemas of a task and of its resources, which the task's leaves out."""
    versions = [file.stem.split("-")[1] for file in FOLDER.glob("skypilot-*.dist-info")]
    if not versions:
        missing("skypilot", f"{FOLDER} isn't there; make test-all installs it")
    # The package's own __init__ imports all of SkyPilot.
    package = ModuleType("sky")
    package.__path__ = [str(FOLDER / "sky")]
    package.__dict__["__version__"] = versions[0]
    # It imports the package's logging and usage reports. The schema takes the values of one enumeration from it.
    autostop = ModuleType("sky.skylet.autostop_lib")
    autostop.__dict__["AutostopWaitFor"] = SimpleNamespace(supported_modes=list)
    monkeypatch.setitem(sys.modules, "sky", package)
    monkeypatch.setitem(sys.modules, "sky.skylet.autostop_lib", autostop)
    for name in ("sky.utils", "sky.utils.schemas", "sky.skylet", "sky.skylet.constants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("sky.utils.schemas")
    # Settings of the user's SkyPilot within a task, whose schema needs its database.
    module._task_config_schema = dict  # type: ignore[attr-defined]
    read = module.get_task_schema(), module.get_resources_schema()
    for name in [name for name in sys.modules if name.startswith("sky.")]:
        if name != "sky.skylet.autostop_lib":
            del sys.modules[name]
    return read
