"""Lightning's callbacks from `configure_callbacks` of a module: which are called, and which have a counterpart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from framework.callbacks import EarlyStopping
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.tasks.lightning.averaging import LightningAveraging
from framework.tasks.lightning.log import metric_name, short_name
from framework.types import Callback

# Lightning's own callbacks that show what the framework shows anyway, and subclasses of them.
_DISPLAYS = (
    "ModelSummary",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "TQDMProgressBar",
)
# What to use in place of others.
_INSTEAD = {
    "StochasticWeightAveraging": "use callbacks=swa, which averages the weights at the end of each epoch",
    "Timer": "use callbacks=timer",
}
# Hooks of callbacks that are called besides those of modules.
_STATE = ("state_dict", "load_state_dict")
# What a subclass of WeightAveraging may override.
_OF_AVERAGING = ("__init__", "should_update")


@dataclass
class Configured:
    """What `configure_callbacks` asks for."""

    # The user's own callbacks, whose hooks are called.
    own: list[Any] = field(default_factory=list)
    # The counterparts of Lightning's, by name.
    counterparts: dict[str, Callback] = field(default_factory=dict)
    # Keys of the section `checkpoint`.
    checkpoint: dict[str, Any] = field(default_factory=dict)
    # What has no effect, for warnings.
    notes: list[str] = field(default_factory=list)


def configured_callbacks(module: Any, config: Config, *, val_dataloaders: Any) -> Configured:
    """Sort what `configure_callbacks` of a module returns.

    Args:
        val_dataloaders: of the data module, whose names are in those of metrics.

    Raises:
        ConfigError: with all callbacks, and options of them, that have no counterpart.
    """
    returned = module.configure_callbacks()
    callbacks: Iterable[Any] = returned if isinstance(returned, (list, tuple)) else [returned]
    configured = Configured()
    mistakes: list[str] = []
    for callback in callbacks:
        kind = _lightnings_class(callback)
        if kind is None:
            configured.own.append(callback)
            continue
        name = kind.__name__
        if name in _DISPLAYS:
            continue
        if kind is not type(callback) and name not in ("WeightAveraging", "EMAWeightAveraging"):
            mistakes.append(
                f"{type(callback).__name__} inherits from Lightning's {name}, which needs Lightning's Trainer: inherit "
                "from Callback"
            )
        elif name == "EarlyStopping":
            mistakes += _early_stopping_mistakes(callback, config)
            counterpart = _early_stopping(callback, val_dataloaders=val_dataloaders)
            _add(configured.counterparts, name, counterpart)
        elif name in ("WeightAveraging", "EMAWeightAveraging"):
            mistakes += _averaging_mistakes(callback)
            _add(configured.counterparts, name, LightningAveraging(callback, module.trainer))
        elif name == "ModelCheckpoint":
            mistakes += _checkpoint_mistakes(callback, config)
            if configured.checkpoint:
                mistakes.append("a second ModelCheckpoint: return one, which also keeps the last checkpoints")
            configured.checkpoint = _checkpoint_keys(callback, val_dataloaders=val_dataloaders)
            configured.notes += _checkpoint_notes(callback)
        elif name == "LearningRateMonitor":
            mistakes += _rate_mistakes(callback)
        elif name != "DeviceStatsMonitor":
            mistakes.append(f"{name}: {_INSTEAD.get(name, 'no counterpart; leave it out')}")
    if mistakes:
        name = type(module).__name__
        lines = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise ConfigError(f"{name}.configure_callbacks returned callbacks that can't be used as they are:\n{lines}")
    return configured


def _lightnings_class(callback: Any) -> type | None:
    """Return the class of Lightning's that a callback is, or inherits from; None for one of the user's own."""
    for cls in type(callback).__mro__:
        is_lightnings = cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        if is_lightnings:
            is_base = cls.__name__ == "Callback"
            return None if is_base else cls
    return None


def _add(counterparts: dict[str, Callback], name: str, callback: Callback) -> None:
    """Add a callback under its name, with a number if there is another one."""
    number = len([other for other in counterparts if other.startswith(name)])
    counterparts[f"{name}_{number + 1}" if number else name] = callback


# Options of each


def _validates_each_epoch(config: Config) -> bool:
    interval = config.trainer.val_check_interval
    # A float is a share of the epoch.
    is_whole_epoch = interval is None or (isinstance(interval, float) and interval == 1)
    return is_whole_epoch and config.trainer.check_val_every_n_epoch == 1


def _metric_mistakes(monitor: str | None, *, owner: str) -> list[str]:
    if monitor is None or short_name(monitor, "train") == monitor:
        return []
    return [f"{owner}(monitor={monitor!r}): monitor a metric that validation_step logs"]


def _early_stopping(callback: Any, *, val_dataloaders: Any) -> EarlyStopping:
    return EarlyStopping(
        monitor=metric_name(callback.monitor, val_dataloaders),
        mode=callback.mode,
        patience=callback.patience,
        # Lightning gives it the sign of the comparison.
        min_delta=abs(callback.min_delta),
        check_finite=callback.check_finite,
        stopping_threshold=callback.stopping_threshold,
        divergence_threshold=callback.divergence_threshold,
    )


def _early_stopping_mistakes(callback: Any, config: Config) -> list[str]:
    mistakes = _metric_mistakes(callback.monitor, owner="EarlyStopping")
    if not callback.strict:
        mistakes.append(f"EarlyStopping(strict=False): log {callback.monitor} in every validation, and leave it out")
    if callback._check_on_train_epoch_end and not _validates_each_epoch(config):
        mistakes.append("EarlyStopping(check_on_train_epoch_end=True): leave it out; it checks after each validation")
    return mistakes


def _averaging_mistakes(callback: Any) -> list[str]:
    mistakes = []
    if callback._device is not None:
        mistakes.append("WeightAveraging(device=...): leave it out; the average is on the model's devices")
    for cls in type(callback).__mro__:
        if cls is _lightnings_class(callback):
            break
        methods = [name for name, value in vars(cls).items() if callable(value) and name not in _OF_AVERAGING]
        mistakes += [f"{cls.__name__}.{name}: of WeightAveraging, override should_update only" for name in methods]
    return mistakes


def _rate_mistakes(callback: Any) -> list[str]:
    mistakes = []
    for option in ("log_momentum", "log_weight_decay"):
        if getattr(callback, option):
            mistakes.append(
                f"LearningRateMonitor({option}=True): leave it out, and self.log the value in on_train_batch_start"
            )
    return mistakes


def _checkpoint_mistakes(callback: Any, config: Config) -> list[str]:
    mistakes = _metric_mistakes(callback.monitor, owner="ModelCheckpoint")
    if callback.monitor is not None and config.checkpoint.monitor is not None:
        mistakes.append(
            f"ModelCheckpoint(monitor={callback.monitor!r}) besides checkpoint.monitor={config.checkpoint.monitor}: "
            "set checkpoint.monitor=null"
        )
    if callback.save_on_exception:
        mistakes.append("ModelCheckpoint(save_on_exception=True): leave it out, and set checkpoint.every_n_minutes")
    if callback._save_on_train_epoch_end and not _validates_each_epoch(config):
        mistakes.append("ModelCheckpoint(save_on_train_epoch_end=True): leave it out; the best is found when validated")
    if callback.monitor is not None:
        remedies = {
            "every_n_train_steps": (callback._every_n_train_steps, "trainer.val_check_interval"),
            "train_time_interval": (callback._train_time_interval, "trainer.val_check_interval"),
            "every_n_epochs": (callback._every_n_epochs > 1, "trainer.check_val_every_n_epoch"),
        }
        for option, (value, key) in remedies.items():
            if value:
                mistakes.append(
                    f"ModelCheckpoint({option}=...) with a monitor: set {key}, since each validation is considered"
                )
    return mistakes


def _checkpoint_keys(callback: Any, *, val_dataloaders: Any) -> dict[str, Any]:
    """Return the keys of the section `checkpoint` that do what a ModelCheckpoint does."""
    keys: dict[str, Any] = {"save_top_k": callback.save_top_k}
    if callback.monitor is not None:
        keys["monitor"] = metric_name(callback.monitor, val_dataloaders)
        keys["mode"] = callback.mode
        return keys
    keys["every_n_steps"] = callback._every_n_train_steps or None
    keys["every_n_epochs"] = callback._every_n_epochs or None
    interval = callback._train_time_interval
    keys["every_n_minutes"] = interval.total_seconds() / 60 if interval is not None else None
    return keys


def _checkpoint_notes(callback: Any) -> list[str]:
    options = [name for name in ("dirpath", "filename") if getattr(callback, name) is not None]
    if not options:
        return []
    return [
        f"{' and '.join(options)} of ModelCheckpoint have no effect: checkpoints are in the run's folder, one for each "
        "step, and `best` and `last` name two of them."
    ]


# Hooks of the user's own


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
