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

from framework.api.nodes import KEY, Nodes, is_maker, override_value, unused_name
from framework.command.request import JobResult, PythonCall
from framework.config.keys import known_keys
from framework.config.other_names import advice
from framework.config.overrides import key_of
from framework.config.schema import Config
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, RequestError, RunError
from framework.launch.cluster_environment import detect
from framework.launch.fork_server import PRELOAD, ForkServer, OwnForkServer
from framework.monitoring.report import FailureReport, render
from framework.types import Datasets

_NO_ARGUMENTS = ("recipe", "job", "resume", "objects", "trust")
_SECTIONS = tuple(field.name for field in fields(Config) if field.name not in _NO_ARGUMENTS)
_ONE_NODE = ("model", "peft", "task", "strategy", "optimizer")
_NAMED_NODES = ("callbacks", "logger")

# A string is their value; for the other sections it chooses an option.
_TEXTS = ("seed", "init_from", "tags")

# Overrides that the run's methods set, or that are for the command alone.
_FOR_THE_COMMAND = ("job", "resume", "rerun", "checkpoint.path", "trust")

# At most one server, which has torch loaded for the next call.
_kept_servers: list[ForkServer] = []


class RunFailedError(RunError):
    """A process of the run failed; the message is the failure report that the command prints.

    Attributes:
        report: The report's fields: `report.first.rank`, `.phase`, `.step`, `.exception`, `.traceback`, …
        directory: The run directory; `framework.load(directory).resume()` continues from the last checkpoint.
    """

    def __init__(self, text: str, *, report: FailureReport, directory: Path) -> None:
        super().__init__(text)
        self.report = report
        self.directory = directory


def execute(overrides: Sequence[str], nodes: Nodes, *, name: str | None = None) -> JobResult:
    """Run the job that the overrides ask for, in processes of its own.

    Args:
        name: Replaces the recipe's name in paths and titles.

    Raises:
        RunFailedError: A rank failed.
        FrameworkError: The request is wrong.
    """
    _check_caller()
    # The server imports torch while this process pickles and composes.
    with _fork_server() as server:
        from framework.command import compose

        result = compose.run_call(overrides, PythonCall(nodes.pickled(), name), fork_server=server)
    if result.failure is not None:
        assert result.run_dir is not None, "ranks have a run directory"
        failed = RunFailedError(render(result.failure), report=result.failure, directory=result.run_dir.path)
        raise failed from result.error
    return result


def section_overrides(
    nodes: Nodes,
    sections: Mapping[str, Any],
    typed: Sequence[str] = (),
    *,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield the overrides that set these sections of the configuration, then the `typed` ones.

    A string chooses an option of a group. A dict without `_target_` sets keys. Anything else is a part of the run and
    replaces the recipe's. Raises ConfigError for mistakes that only Python code can make.
    """
    arguments = {section: value for section, value in sections.items() if value is not None}
    if loss is not None or metrics is not None:
        arguments["task"] = _supervised(nodes, loss, metrics, task=arguments.get("task"))
    for section, value in arguments.items():
        _check_section(section, value)
        if isinstance(value, str) and section not in _TEXTS:
            yield f"{section}={value}"
        elif section in _NAMED_NODES:
            yield from _named(nodes, section, value)
        elif section in _ONE_NODE:
            yield from _one_node(nodes, section, value)
        elif section == "data":
            yield from _data(nodes, value)
        elif section == "scheduler":
            keys = value if isinstance(value, Mapping) else {"schedule": _not_made(value, section)}
            yield from _keys(nodes, section, keys, parts_of_run=("schedule",))
        elif isinstance(value, Mapping):
            yield from _keys(nodes, section, value)
        else:
            yield f"{section}={override_value(_plain(value))}"

    if not isinstance(typed, (list, tuple)) or not all(isinstance(text, str) for text in typed):
        raise ConfigError(f'overrides={typed!r}: must be a list of strings, such as ["trainer.max_epochs=1"].')
    for text in typed:
        key = key_of(text)
        if text.startswith("-") or key.startswith("hydra") or key in _FOR_THE_COMMAND:
            raise ConfigError(f"overrides: {text} is for the command. Use framework.load and the run's methods.")
        if key in arguments:
            raise ConfigError(f"overrides: {text} can't go with the argument {key}. Leave one of them out.")
        yield text


def _check_section(section: str, value: Any) -> None:
    """Raise ConfigError with a suggestion if there is no such section."""
    if section in _SECTIONS:
        return
    text = advice(section, str(value))
    if text is not None:
        raise ConfigError(f"{section}: there is no such argument or section. {text}\nThat is an item of `overrides`.")
    # `max_epochs=5` was probably meant as trainer={"max_epochs": 5}.
    owners = [key.rpartition(".")[0] for key in known_keys() if key.endswith(f".{section}")]
    if owners and "." not in owners[0]:
        hint = did_you_mean(f"{owners[0]}={{{section!r}: ...}}")
    else:
        hint = did_you_mean(nearest(section, _SECTIONS))
    raise ConfigError(f"{section}: there is no such argument or section.{hint} Sections: {', '.join(_SECTIONS)}.")


def _supervised(nodes: Nodes, loss: Any, metrics: Mapping[str, Any] | None, *, task: Any) -> dict[str, Any]:
    """Return the node of a `Supervised` task with this loss and these metrics."""
    if task is not None:
        raise ConfigError("loss and metrics can't go with task, which has its own. Leave either out.")
    if loss is None:
        raise ConfigError("metrics needs loss. Without one, metrics are those of the task.")
    if not callable(loss):
        raise ConfigError(f"loss={loss!r}: must be a function or module of (output, target): nn.CrossEntropyLoss()")
    if metrics is None:
        metrics = {}
    if not isinstance(metrics, Mapping):
        raise ConfigError('metrics: must be a dict of names and metrics, such as {"accuracy": Accuracy()}.')
    metric_nodes = {}
    for name, metric in metrics.items():
        metric_nodes[name] = nodes.function(metric, key=f"metrics.{name}")
        if not KEY.fullmatch(name):
            raise ConfigError(
                f"metrics: {name!r} can't be a name. Use letters, digits and _ - / . @ %, a letter first."
            )
    return {
        "_target_": "framework.tasks.Supervised",
        "loss": nodes.function(loss, key="loss"),
        "metrics": metric_nodes,
    }


def _is_part(value: Any) -> bool:
    """Return True for a class, function, partial or node."""
    return is_maker(value) or (isinstance(value, Mapping) and "_target_" in value)


def _one_node(nodes: Nodes, section: str, value: Any) -> Iterator[str]:
    """Yield the overrides of the model, task, strategy or optimizer: keys, or a part that replaces the recipe's."""
    if isinstance(value, Mapping) and "_target_" not in value:
        if not all(_is_part(item) for item in value.values()):
            yield from _keys(nodes, section, value)
            return
        # Several optimizers by name.
        value = {name: nodes.part(part, key=f"{section}.{name}") for name, part in value.items()}
    if section == "optimizer":
        value = _not_made(value, section)
    yield f"~{section}"
    yield f"++{section}={override_value(nodes.part(value, key=section))}"


def _not_made(value: Any, section: str) -> Any:
    """Return the value. Raises ConfigError for an optimizer or scheduler that is made already, for another model."""
    is_made = not isinstance(value, Mapping) and not is_maker(value) and callable(getattr(value, "step", None))
    if not is_made:
        return value
    name = type(value).__name__
    # torch.optim.SGD is in torch.optim.sgd.
    place = type(value).__module__.removesuffix(f".{name.lower()}")
    arguments = "..."
    groups = getattr(value, "param_groups", None)
    if groups:
        arguments = f"lr={groups[0]['lr']}"
    raise ConfigError(
        f"{section}: this {name} was made for your copy of the model. Pass what makes one: "
        f"partial({place}.{name}, {arguments})"
    )


def _named(nodes: Nodes, section: str, value: Any) -> Iterator[str]:
    """Yield the overrides of callbacks or loggers: options, with keys, and objects under the names of their classes."""
    items = _by_name(value)
    # An option is given by its name; its value is a dict of the keys that differ.
    options = [name for name, item in items.items() if isinstance(item, Mapping) and "_target_" not in item]
    if options:
        yield f"{section}=[{','.join(options)}]"
    for name, item in items.items():
        key = f"{section}.{name}"
        if name in options:
            yield from _keys(nodes, key, item)
        else:
            yield from _replaced(key, nodes.part(item, key=key))


def _by_name(value: Any) -> dict[str, Any]:
    """Return callbacks or loggers by name: a dict has names, a list of options and objects gets them."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (list, tuple)):
        value = [value]
    items: dict[str, Any] = {}
    for item in value:
        if isinstance(item, str):
            items[unused_name(item, items)] = {}
        else:
            items[unused_name(_name_of(item), items)] = item
    return items


def _name_of(part: Any) -> str:
    """Return `early_stopping` for an `EarlyStopping`, its class, or a partial of it."""
    made = part.func if isinstance(part, partial) else part
    name = getattr(made, "__name__", type(made).__name__)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    # `<lambda>` is no identifier.
    if not words.isidentifier():
        return "function"
    return words


def _data(nodes: Nodes, value: Any) -> Iterator[str]:
    """Yield the overrides of the data: keys of the section, or the parts of the data."""
    from torch.utils.data import IterableDataset

    keys = {"datasets": value}
    if isinstance(value, Mapping) and "_target_" not in value:
        names_parts = value.keys() <= {"train", "val", "test"}
        if not names_parts:
            keys = dict(value)
    if "datasets" in keys:
        datasets = _datasets(keys["datasets"])
        keys["datasets"] = datasets
        # A stream has its own order.
        if isinstance(datasets, Datasets) and isinstance(datasets.train, IterableDataset):
            keys.setdefault("shuffle", False)
    yield from _keys(nodes, "data", keys, parts_of_run=("datasets", "sampler"), functions=("collate_fn",))


def _datasets(value: Any) -> Any:
    """Return the data as `Datasets`, with DataLoaders taken apart; a function or node that makes it, as it is."""
    if _is_part(value):
        return value
    from framework.data.from_dataloader import unpack_dataloaders

    if isinstance(value, (list, tuple)):
        if not 1 <= len(value) <= 3:
            raise ConfigError(f"data: {len(value)} parts were given. Give train, (train, val) or (train, val, test).")
        value = Datasets(*value)
    elif isinstance(value, Mapping):
        if "train" not in value:
            raise ConfigError("data: there is no train part.")
        value = Datasets(**value)
    elif not isinstance(value, Datasets):
        value = Datasets(value)
    return unpack_dataloaders(value)


def _keys(
    nodes: Nodes,
    section: str,
    values: Any,
    *,
    parts_of_run: Sequence[str] = (),
    functions: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the overrides that set the keys of a section; those of `parts_of_run` and `functions` are nodes."""
    for name, value in values.items():
        key = f"{section}.{name}"
        if value is None or isinstance(value, str):
            yield f"++{key}={override_value(nodes.value(value, key=key))}"
        elif name in functions:
            yield from _replaced(key, nodes.function(value, key=key))
        elif name in parts_of_run:
            yield from _replaced(key, nodes.part(value, key=key))
        else:
            yield f"++{key}={override_value(nodes.value(_plain(value), key=key))}"


def _plain(value: Any) -> Any:
    """Return paths as strings and tuples as lists, which the framework's own keys take."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def _replaced(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the overrides that replace a node; a mapping alone would be merged with the old one."""
    yield f"++{key}=null"
    yield f"++{key}={override_value(node)}"


def _check_caller() -> None:
    """Raise RequestError if the caller is itself a rank, of ours or of another launcher."""
    cluster = detect(os.environ)
    # The framework sets this variable for its ranks.
    if cluster is None and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
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
        with closing(OwnForkServer(PRELOAD)) as server:
            yield server
        return
    if not (_kept_servers and _kept_servers[0].alive):
        _kept_servers[:] = [OwnForkServer(PRELOAD)]
        atexit.register(_kept_servers[0].close)
    yield _kept_servers[0]
