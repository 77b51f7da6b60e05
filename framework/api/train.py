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
        The run, finished or stopped on request. `run.resume()` continues it.

    Raises:
        RequestError: an argument is wrong; nothing was started.
        RunFailedError: the run failed; the exception has its report.
        KeyboardInterrupt: on the second interrupt, and on the first before training has begun.
    """
    if recipe is not None and not isinstance(recipe, str):
        raise ConfigError(f"recipe={recipe!r}: must be the name of a recipe. Did you mean model=...?")
    if recipe is None and not overrides:
        _check_complete(model=model, data=data, loss=loss, task=sections.get("task"))
    if name is not None and not _is_folder_name(name):
        raise ConfigError(f"name={name!r}: must be the name of a folder below outputs, such as 'digits'.")
    if name is None and recipe is None:
        name = _program_name()

    nodes = Nodes()
    all_sections = {"model": model, "data": data, "optimizer": optimizer, **sections}
    typed = section_overrides(nodes, all_sections, overrides, loss=loss, metrics=metrics)
    result = execute([f"recipe={recipe or BLANK}", *typed], nodes, name=name)
    assert result.run_dir is not None, "a training has a run directory"
    # This call has made the run, so its code is the caller's.
    return Run(result.run_dir.path, trust=True)


def _check_complete(*, model: Any, data: Any, loss: Any, task: Any) -> None:
    """Raise ConfigError if a call without a recipe lacks a part."""
    missing = []
    if model is None:
        missing.append("model")
    if data is None:
        missing.append("data")
    if loss is None and task is None:
        missing.append("loss (or task)")
    if missing:
        raise ConfigError(f"framework.train needs a recipe, or model, data and loss. Missing: {', '.join(missing)}.")


def _is_folder_name(name: str) -> bool:
    """Return True for a relative path that stays below the folder it is appended to."""
    has_letters = bool(name.strip(". "))
    return has_letters and not Path(name).is_absolute() and ".." not in Path(name).parts


def _program_name() -> str:
    """Return the name of the running script or package; `interactive` in a notebook or REPL."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or script.startswith("<"):
        return "interactive"
    path = Path(script)
    return path.parent.name if path.stem == "__main__" else path.stem
