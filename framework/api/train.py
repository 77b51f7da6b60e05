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
    functions and partials are called in every process. Objects are copied to the processes, so yours don't change: get
    the trained model from `run.best_model()`.

    Args:
        recipe: a recipe to start from; without one, model, data and loss (or task) are needed.
        model: an `nn.Module`, or a class, function or partial that makes one.
        data: `(train, val, test)` or fewer, each a Dataset or DataLoader; `framework.Datasets`; or a function that
            returns one of these. A dict sets keys of the section `data`.
        loss: `loss(output, target)`, the mean over the batch. For other losses give a `task`.
        metrics: name → metric, with `loss`.
        optimizer: a class of `torch.optim`, or a partial with its arguments. A dict names several.
        name: the folder below `outputs`; by default the name of the recipe or script.
        overrides: as on the command line.
        sections: other sections of the configuration, such as `trainer={"max_epochs": 5}`: a dict sets keys, a string
            chooses an option, as in `strategy="fsdp"`. callbacks and logger also take lists of names and objects.

    Returns:
        The run, finished, or stopped with a checkpoint if it was interrupted.

    Raises:
        RequestError: an argument is wrong; nothing was started.
        RunFailedError: the run failed; the exception has its report.
        KeyboardInterrupt: on the second interrupt, and on the first before training has begun.
    """
    if recipe is not None and not isinstance(recipe, str):
        raise ConfigError(f"recipe={recipe!r}: must be the name of a recipe. Did you mean model=...?")
    given = {"model": model, "data": data, "optimizer": optimizer, **sections}
    if recipe is None:
        needed = {"model": model, "data": data, "loss (or task)": sections.get("task") if loss is None else loss}
        if missing := [name for name, value in needed.items() if value is None and not overrides]:
            raise ConfigError(
                f"framework.train needs a recipe, or model, data and loss. Missing: {', '.join(missing)}."
            )
    if name is not None and (not name.strip(". ") or Path(name).is_absolute() or ".." in Path(name).parts):
        raise ConfigError(f"name={name!r}: must be the name of a folder below outputs, such as 'digits'.")
    nodes = Nodes()
    typed = section_overrides(nodes, given, overrides, loss=loss, metrics=metrics)
    result = execute([f"recipe={recipe or BLANK}", *typed], nodes, name=name or (None if recipe else _program_name()))
    assert result.run_dir is not None, "a training has a run directory"
    return Run(result.run_dir.path, trust=True)  # made by this call


def _program_name() -> str:
    """Return the name of the running script or package; `interactive` in a notebook or REPL."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or script.startswith("<"):
        return "interactive"
    path = Path(script)
    return path.parent.name if path.stem == "__main__" else path.stem
