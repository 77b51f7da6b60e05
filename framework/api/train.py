"""`framework.train`: what the command does, as a call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.api.call import execute, section_overrides
from framework.api.nodes import BLANK, Nodes
from framework.api.run import Run
from framework.errors import ConfigError

_NO_SCRIPT = "interactive"


def train(
    recipe: str | None = None,
    *,
    model: Any = None,
    data: Any = None,
    loss: Any = None,
    metrics: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    name: str | None = None,
    overrides: Sequence[str] = (),
    **sections: Any,
) -> Run:
    """Train as `python -m framework` does, in processes of their own, and return the run.

    A part (model, data, optimizer, …) is a class, a function, a `functools.partial` of one, or an object. Classes,
    functions and partials are called in every process; objects are copied to them, so yours stay as they are: the
    trained weights are those of `run.best_model()`.

    Args:
        recipe: a recipe to start from; without one, model, data and loss (or task) are needed.
        model: an `nn.Module`, or what makes one.
        data: `(train, val, test)` or fewer, each a Dataset or DataLoader; `framework.Datasets`; or a function that
            returns one of these. A dict sets keys of the section `data`.
        loss: `loss(output, target)`, the mean over the batch. For other losses give a `task`.
        metrics: name → metric, with `loss`.
        optimizer: a class of `torch.optim`, or a partial with its arguments. A dict names several.
        name: of the folder below `outputs`; by default the recipe's or the script's.
        overrides: as on the command line.
        sections: other sections of the configuration, such as `trainer={"max_epochs": 5}`: a dict sets keys, a text
            chooses an option, as in `strategy="fsdp"`. callbacks and logger also take lists of names and objects.

    Returns:
        The run, finished, or stopped with a checkpoint if it was interrupted.

    Raises:
        RequestError: a mistake in the arguments; nothing was started.
        RunFailedError: the run failed; the exception has its report.
    """
    nodes = Nodes()
    given = {"model": model, "data": data, "optimizer": optimizer, **sections}
    if loss is not None:
        if "task" in sections:
            raise ConfigError("loss can't go with task, which has its own. Leave one of them out.")
        given["task"] = {
            "_target_": "framework.tasks.Supervised",
            "loss": nodes.function(loss, key="loss"),
            "metrics": {key: nodes.function(each, key=f"metrics.{key}") for key, each in (metrics or {}).items()},
        }
    elif metrics is not None:
        raise ConfigError("metrics needs loss. Without one, metrics are those of the task.")
    typed = [f"recipe={recipe or BLANK}", *section_overrides(nodes, given, overrides)]
    result = execute(typed, nodes, name=name or (None if recipe else _program_name()))
    assert result.run_dir is not None, "a training has a run directory"
    return Run(result.run_dir.path)


def _program_name() -> str:
    """Return the name of the script or package that runs, or a word for a notebook or an interactive session."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return _NO_SCRIPT
    path = Path(script)
    return path.parent.name if path.stem == "__main__" else path.stem
