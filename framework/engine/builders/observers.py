"""Build callbacks and loggers, and refuse methods that nothing would call: misspelt ones, those of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping

from framework.config.observers import is_misspelt, methods_of, misspelt_hook
from framework.config.schema import Node, ProgressMode
from framework.distributed.context import Context
from framework.engine.builders.objects import build_object, described
from framework.errors import TargetError
from framework.system.run_dir import RunDir
from framework.types import Callback, Logger, hooks

_LOGGER_OF_EARLIER_VERSIONS = """
{key}: {target} has `metrics`, the method of loggers of earlier versions. Give it one method for numbers and media:

  class {name}(framework.Logger):
      def log(self, values, *, step, epoch):
          for name, value in values.items():
              if isinstance(value, framework.Text): ...  # was text(tag, text, *, step)
              elif isinstance(value, float): ...         # was metrics(values, *, step, epoch)

`fit_start(info)` is now `start(info)`, `step(info)` is `on_train_step_end(info)`, and `hparams(config, metrics)` is
`on_results(metrics)`. See docs/loggers.md.
"""


def build_callbacks(nodes: Mapping[str, Node], *, context: Context, run_dir: RunDir) -> dict[str, Callback]:
    """Return the callbacks by name, in the config's order. Raises TargetError for a misspelt hook.

    Those that take `context` or `run_dir` get it.
    """
    callbacks: dict[str, Callback] = {}
    for name, node in nodes.items():
        key = f"callbacks.{name}"
        callback = build_object(key, node, context=context, run_dir=run_dir)
        _check_callback(callback, key=key, target=node["_target_"])
        callbacks[name] = callback
    return callbacks


def build_loggers(nodes: Mapping[str, Node], *, run_dir: RunDir, progress: ProgressMode = "auto") -> dict[str, Logger]:
    """Return the loggers by name, in the config's order. Call it on rank 0 only: they open files.

    Those that take `run_dir` or `progress` get it, unless the config sets it.
    """
    loggers: dict[str, Logger] = {}
    for name, node in nodes.items():
        key = f"logger.{name}"
        logger = build_object(key, node, run_dir=run_dir, progress=progress)
        _check_logger(logger, key=key, target=node["_target_"])
        loggers[name] = logger
    return loggers


def _check_callback(callback: object, *, key: str, target: str) -> None:
    """Raise TargetError if the object has no hook, one that is misspelt, or those of Lightning."""
    if any(cls.__module__.endswith(".callbacks.callback") for cls in type(callback).__mro__):
        raise TargetError(
            f"{key}: {target} is a callback of Lightning, whose hooks get other arguments. Return it from "
            "configure_callbacks of the LightningModule, or write a framework.Callback."
        )
    names = methods_of(Callback)
    _refuse_misspelt(callback, names, own_methods=_own_methods(callback, Callback), key=key, target=target)
    observing = [name for name in names if name.startswith("on_") or name == "evaluation_weights"]
    if not any(hooks([callback], name) for name in observing):
        raise TargetError(
            f"{key}: {target} returned {described(callback)}. It must return a callback, with one of "
            f"{', '.join(observing)}."
        )


def _check_logger(logger: object, *, key: str, target: str) -> None:
    """Raise TargetError if the object has no `log`, or a method that is misspelt."""
    if not hooks([logger], "log"):
        if callable(getattr(logger, "metrics", None)):
            name = type(logger).__name__
            raise TargetError(_LOGGER_OF_EARLIER_VERSIONS.format(key=key, target=target, name=name).strip())
        raise TargetError(
            f"{key}: {target} returned {described(logger)}. It must return a logger, with log(values, *, step, epoch)."
        )
    if isinstance(logger, Logger):
        names = methods_of(Logger)
        _refuse_misspelt(logger, names, own_methods=_own_methods(logger, Logger), key=key, target=target)


def _refuse_misspelt(observer: object, names: list[str], *, own_methods: set[str], key: str, target: str) -> None:
    """Raise TargetError for a method `on_…` that isn't among `names`, and for an own method with nearly such a name."""
    for name in dir(observer):
        if is_misspelt(name, names, is_own=name in own_methods) and callable(getattr(observer, name)):
            raise TargetError(misspelt_hook(key, target, name, names))


def _own_methods(observer: object, base: type) -> set[str]:
    """Return the methods of the base and its subclasses. Those of other classes it inherits from may have any name."""
    methods: set[str] = set()
    for cls in type(observer).__mro__:
        if issubclass(cls, base):
            methods.update(methods_of(cls))
    return methods
