"""Lightning's callbacks from `configure_callbacks` of a module: which are called, and which have a counterpart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from framework.errors import ConfigError

# Lightning's own callbacks that do what the framework does anyway.
_NEEDLESS = (
    "DeviceStatsMonitor",
    "LearningRateMonitor",
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
)
# What to use in place of others.
_INSTEAD = {
    "EarlyStopping": "callbacks=early_stopping callbacks.early_stopping.monitor=val/loss",
    "ModelCheckpoint": "checkpoint.monitor=val/loss checkpoint.save_top_k=1",
    "StochasticWeightAveraging": "callbacks=swa",
    "Timer": "callbacks=timer",
    "EMAWeightAveraging": "callbacks=ema",
    "WeightAveraging": "callbacks=ema",
}
# Hooks of callbacks that are called besides those of modules.
_STATE = ("state_dict", "load_state_dict")


def own_callbacks(module: Any) -> list[Any]:
    """Return the callbacks of the user's own that a module configures.

    Raises ConfigError, with all of them, for those of Lightning that the framework has a counterpart of.
    """
    configured = module.configure_callbacks()
    callbacks: Iterable[Any] = configured if isinstance(configured, (list, tuple)) else [configured]
    own = []
    lines = []
    for callback in callbacks:
        kind = type(callback)
        is_lightnings = kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        if not is_lightnings:
            own.append(callback)
        elif kind.__name__ not in _NEEDLESS:
            lines.append(f"  {kind.__name__}: {_INSTEAD.get(kind.__name__, 'no counterpart; leave it out')}")
    if lines:
        raise ConfigError(
            "\n".join([f"{type(module).__name__}.configure_callbacks returned callbacks of Lightning. Use:", *lines])
        )
    return own


def callback_hooks(
    callbacks: Iterable[Any], trainer: Any, module: Any, *, called: set[str]
) -> dict[str, list[Callable[..., Any]]]:
    """Return what the callbacks override, by the hook's name, with trainer and module bound.

    called: names of the hooks that the task calls. Raises ConfigError for another.
    """
    hooks: dict[str, list[Callable[..., Any]]] = {}
    lines = []
    for callback in callbacks:
        for name in _overridden(callback):
            if name in _STATE:
                continue
            if name not in called:
                lines.append(f"  {type(callback).__name__}.{name}")
                continue
            hooks.setdefault(name, []).append(partial(getattr(callback, name), trainer, module))
    if lines:
        raise ConfigError("\n".join(["Lightning callbacks override hooks that have no counterpart here:", *lines]))
    return hooks


def _overridden(callback: Any) -> list[str]:
    """Return the names of the hooks that a callback overrides."""
    for cls in type(callback).__mro__:
        if cls.__name__ == "Callback" and cls.__module__.endswith("callbacks.callback"):
            names = [name for name in dir(cls) if not name.startswith("_") and name != "state_key"]
            return [name for name in names if getattr(type(callback), name) is not getattr(cls, name)]
    raise ConfigError(f"configure_callbacks returned a {type(callback).__name__}, which is no Callback of Lightning.")
