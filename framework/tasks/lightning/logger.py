"""`self.logger` of a LightningModule: the run's loggers under the names of Lightning's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from framework.errors import ConfigError
from framework.loggers.media import log_to_loggers
from framework.media import Image, Table, Text
from framework.types import Logger, hooks


@final
class LoggerView:
    """All loggers of the run as one. Only rank 0 has any, so elsewhere the methods do nothing.

    What is logged before training starts is kept until then.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # None: not known yet.
        self._loggers: Mapping[str, Logger] | None = None
        self._folder: Path | None = None
        self._waiting: list[tuple[dict[str, Any], int]] = []

    def observe_run(self, loggers: Mapping[str, Logger], folder: Path) -> None:
        """Note the loggers, and log what waits."""
        self._loggers = loggers
        for follow in hooks(loggers.values(), "follow"):
            follow(self._present_step)
        self._folder = folder
        waiting = self._waiting
        self._waiting = []
        for values, step in waiting:
            self._log(values, step=step)

    # Where things are

    @property
    def name(self) -> str:
        """The recipe's name, as the run's folder has it."""
        return "framework" if self._folder is None else self._folder.parent.name

    @property
    def version(self) -> str:
        return "" if self._folder is None else self._folder.name

    @property
    def save_dir(self) -> str:
        """The folder of the run, which is there when training starts."""
        return str(self._trainer.default_root_dir)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    @property
    def root_dir(self) -> str:
        return self.save_dir

    # What is logged

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers under their own names, without a part in front."""
        self._log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_hyperparams(self, params: Any = None, *_: Any, **__: Any) -> None:
        """Log the settings as a text `hyperparameters`: the run's configuration is kept anyway."""
        if params is None:
            return
        settings = dict(params) if isinstance(params, Mapping) else vars(params)
        lines = [f"{name}: {value}" for name, value in settings.items()]
        self._log({"hyperparameters": Text("\n".join(lines))})

    def log_image(self, key: str, images: Iterable[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images as W&B's logger of Lightning does: tensors or arrays, with a list `caption`."""
        captions = kwargs.get("caption")
        values = []
        for number, image in enumerate(images):
            caption = captions[number] if captions else ""
            values.append(Image(_channels_first(image), caption=caption))
        self._log({key: values}, step=step)

    def log_text(self, key: str, columns: Any = None, data: Any = None, step: int | None = None, **_: Any) -> None:
        self.log_table(key, columns, data, step)

    def log_table(self, key: str, columns: Any = None, data: Any = None, step: int | None = None, **_: Any) -> None:
        self._log({key: Table(columns=list(columns), rows=[list(row) for row in data])}, step=step)

    def log_graph(self, *_: Any, **__: Any) -> None:
        """Do nothing: `logger.tensorboard.graph=true` writes the model's graph."""

    def watch(self, *_: Any, **__: Any) -> None:
        """Do nothing: `logger.tensorboard.histograms_every_n_steps` writes histograms of weights and gradients."""

    def save(self) -> None:
        """Do nothing: loggers write by themselves, and before each checkpoint."""

    def finalize(self, status: str = "success") -> None:
        """Do nothing: loggers are closed at the end of the run."""

    @property
    def experiment(self) -> Any:
        """The SummaryWriter of TensorBoard or the run of W&B, of the first such logger.

        Ranks other than 0 get what ignores all calls.
        """
        if not self._trainer.is_global_zero:
            return _Nothing()
        loggers = list(self._with_experiment().values())
        if not loggers:
            raise self._refused("experiment")
        return loggers[0].experiment

    def views(self) -> list[LoggerView]:
        """Return one view for each logger that has an `experiment`, if several have one; else this one."""
        views = []
        for name, logger in self._with_experiment().items():
            view = LoggerView(self._trainer)
            view._loggers = {name: logger}
            view._folder = self._folder
            views.append(view)
        return views if len(views) > 1 else [self]

    def _with_experiment(self) -> dict[str, Any]:
        return {name: logger for name, logger in (self._loggers or {}).items() if hasattr(logger, "experiment")}

    def _present_step(self) -> int:
        return int(self._trainer.global_step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._refused(name)

    def _refused(self, name: str) -> LoggerAttributeError:
        configured = ", ".join(self._loggers or {}) or "none yet: it is known from on_fit_start on"
        return LoggerAttributeError(
            f"There is no self.logger.{name} with these loggers: {configured}.\nFor `experiment`, choose "
            "logger=tensorboard or logger=wandb. self.log, log_metrics, log_image and log_table work with each."
        )

    def _log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        if not self._trainer.is_global_zero:
            return
        if step is None:
            step = self._trainer.global_step
        if self._loggers is None:
            self._waiting.append((dict(values), step))
            return
        log_to_loggers(self._loggers.values(), values, step=step, epoch=self._trainer.current_epoch)


class LoggerAttributeError(ConfigError, AttributeError):
    """Raised for what `self.logger` doesn't have. `hasattr` is False then."""


@final
class _Nothing:
    """Takes any call, as Lightning's dummy experiment does on all processes but the first."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __getitem__(self, key: Any) -> Any:
        return self


def _channels_first(image: Any) -> Any:
    """Return an image's pixels, of arrays that have channels last, too."""
    shape: tuple[int, ...] = tuple(getattr(image, "shape", ()))
    has_channels_last = len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] not in (1, 3, 4)
    if not has_channels_last:
        return image
    if hasattr(image, "permute"):
        return image.permute(2, 0, 1)
    return image.transpose(2, 0, 1)
