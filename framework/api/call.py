"""Run the command for Python code: arguments become overrides, a job runs, a failure becomes an exception."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from framework.api.nodes import Nodes, override_value
from framework.config.schema import Config
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, RequestError, RunError
from framework.jobs.request import JobResult, PythonCall
from framework.launch.environment import detect
from framework.launch.fork_server import PRELOAD, ForkServer
from framework.monitoring.report import FailureReport, render

_SECTIONS = tuple(field.name for field in fields(Config) if field.name not in ("recipe", "job", "resume", "objects"))
_ONE_NODE = ("model", "task", "strategy", "optimizer")
_NAMED_NODES = ("callbacks", "logger")
_kept_servers: list[ForkServer] = []  # at most one, which has torch loaded for the next call


class RunFailedError(RunError):
    """The processes of a run have failed; the text is the report that the command prints.

    report: the same, with fields: `report.first.rank`, `.phase`, `.step`, `.exception`, `.traceback`, … directory: that
    of the run, which `framework.load(directory).resume()` continues from its last checkpoint.
    """

    def __init__(self, text: str, *, report: FailureReport, directory: Path) -> None:
        super().__init__(text)
        self.report, self.directory = report, directory


def execute(overrides: Sequence[str], nodes: Nodes, *, name: str | None = None) -> JobResult:
    """Run the job of these overrides in processes of its own.

    name: stands for the recipe's in paths and titles. Raises FrameworkError: RunFailedError if the ranks failed.
    """
    _check_caller()
    with _fork_server() as server:  # it imports torch while this process pickles and composes
        from framework import cli

        result = cli.run_call(overrides, PythonCall(nodes.pickled(), name), fork_server=server)
    if result.failure is not None:
        assert result.run_dir is not None, "ranks have a run directory"
        raise RunFailedError(render(result.failure), report=result.failure, directory=result.run_dir.path)
    return result


def section_overrides(nodes: Nodes, sections: Mapping[str, Any], typed: Sequence[str] = ()) -> Iterator[str]:
    """Yield the overrides that set these sections of the configuration, then those that were typed.

    Raises ConfigError for an unknown section, and for typed ones that start more than one training.

    A text chooses an option of a group. A dict without `_target_` sets keys. Anything else is a part of the run, and
    replaces what the recipe has.
    """
    for section, value in sections.items():
        if section not in _SECTIONS:
            hint = did_you_mean(nearest(section, _SECTIONS))
            raise ConfigError(f"{section}: there is no such section.{hint} There is {', '.join(_SECTIONS)}.")
        if value is None:
            continue
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and section in ("seed", "init_from")):
            yield f"{section}={override_value(value)}"
        elif isinstance(value, str):
            yield f"{section}={value}"
        elif section in _NAMED_NODES:
            yield from _named(nodes, section, value)
        elif section in _ONE_NODE:
            yield from _one_node(nodes, section, value)
        elif section == "data":
            yield from _data(nodes, value)
        elif section == "scheduler":
            parts = value if isinstance(value, Mapping) else {"schedule": value}
            yield from _keys(nodes, section, parts, parts_of_run=("schedule",))
        else:
            yield from _keys(nodes, section, value)
    for text in typed:
        if text.startswith("-") or text.lstrip("+").startswith(("job=", "resume=", "rerun=")):
            raise ConfigError(f"overrides: {text} is for the command. Use framework.load and the run's methods.")
        yield text


def _one_node(nodes: Nodes, section: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and "_target_" not in value:
        if all(isinstance(part, (partial, type)) for part in value.values()):  # several optimizers by name
            value = {name: nodes.part(part, key=f"{section}.{name}") for name, part in value.items()}
        else:
            yield from _keys(nodes, section, value)
            return
    if section == "optimizer" and hasattr(value, "param_groups"):
        kind = type(value).__name__
        raise ConfigError(
            f"optimizer: this {kind} was made for your copy of the model. Pass what makes one: "
            f"partial(torch.optim.{kind}, lr={value.param_groups[0].get('lr')})"
        )
    yield from _replaced(section, nodes.part(value, key=section), is_group=True)


def _named(nodes: Nodes, section: str, value: Any) -> Iterator[str]:
    """Yield the overrides of callbacks or loggers: names of options, and objects under the names of their classes."""
    if isinstance(value, Mapping):
        own = dict(value)
    else:
        each = value if isinstance(value, (list, tuple)) else [value]
        options = [item for item in each if isinstance(item, str)]
        if options:
            yield f"{section}=[{','.join(options)}]"
        own = {_name_of(item): item for item in each if not isinstance(item, str)}
    for name, item in own.items():
        node = nodes.part(item, key=f"{section}.{name}")
        yield from _replaced(f"{section}.{name}", node)


def _name_of(part: Any) -> str:
    """Return `early_stopping` for an `EarlyStopping`, its class, or a partial of it."""
    made = part.func if isinstance(part, partial) else part
    name = getattr(made, "__name__", type(made).__name__)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _data(nodes: Nodes, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and "_target_" not in value:
        given = {name: _datasets(part) if name == "datasets" else part for name, part in value.items()}
        yield from _keys(nodes, "data", given, parts_of_run=("datasets", "sampler"), functions=("collate_fn",))
    else:
        yield from _keys(nodes, "data", {"datasets": _datasets(value)}, parts_of_run=("datasets",))


def _datasets(value: Any) -> Any:
    """Return what was given as `Datasets`, with DataLoaders taken apart; what makes the data stays as it is."""
    if callable(value) or isinstance(value, Mapping):
        return value
    from framework.data.from_loader import take_loaders_apart
    from framework.types import Datasets

    if isinstance(value, (list, tuple)):
        if not 1 <= len(value) <= 3:
            raise ConfigError(f"data: {len(value)} parts were given. Give train, (train, val) or (train, val, test).")
        value = Datasets(*value)
    elif not isinstance(value, Datasets):
        value = Datasets(value)
    return take_loaders_apart(value)


def _keys(
    nodes: Nodes,
    section: str,
    values: Any,
    *,
    parts_of_run: Sequence[str] = (),
    functions: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the overrides that set the keys of a section; those of `parts_of_run` and `functions` are nodes."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}={values!r}: must be a dict of keys and values, or the name of an option.")
    for name, value in values.items():
        key = f"{section}.{name}"
        if value is not None and not isinstance(value, str) and name in (*parts_of_run, *functions):
            make = nodes.function if name in functions else nodes.part
            yield from _replaced(key, make(value, key=key))
        else:
            yield f"++{key}={override_value(nodes.value(value, key=key))}"


def _replaced(key: str, node: Mapping[str, Any], *, is_group: bool = False) -> Iterator[str]:
    """Yield the overrides that put a node in the place of another one; a mapping alone would be merged with it."""
    yield f"~{key}" if is_group else f"++{key}=null"
    yield f"++{key}={override_value(node)}"


def _check_caller() -> None:
    """Raise RequestError for a call that one of several ranks makes."""
    cluster = detect(os.environ)
    if cluster is None and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:  # set for our ranks
        raise RequestError(
            "This call was made by a process that trains: it imports the module that makes the call.\n"
            'Put the call under `if __name__ == "__main__":`, or define model and data in a module of their own.'
        )
    if cluster is not None:
        raise RequestError(
            f"This process is rank {cluster.rank} of {cluster.world_size} that {cluster.starter} has started, and the "
            "call starts processes of its own.\nRun the script with `python`, or write the run as a recipe "
            f"(run.to_yaml) and start `python -m framework` with {cluster.starter}."
        )


@contextmanager
def _fork_server() -> Iterator[ForkServer]:
    """Yield a fork server; that of the main thread is kept for the next call, which then starts in half a second."""
    if threading.current_thread() is not threading.main_thread():
        with closing(ForkServer(PRELOAD)) as server:
            yield server
        return
    if not (_kept_servers and _kept_servers[0].alive):
        _kept_servers[:] = [ForkServer(PRELOAD)]
        atexit.register(_kept_servers[0].close)
    yield _kept_servers[0]
