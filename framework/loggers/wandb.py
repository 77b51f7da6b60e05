"""Weights & Biases. Needs the extra `wandb`."""

from __future__ import annotations

import html
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, final

import psutil

from framework.loggers.tracker import Row, Tracker, check_installed
from framework.system.rank_log import show, warn
from framework.system.run_dir import RunDir
from framework.system.shown_text import masked_text
from framework.types import FitInfo

_INIT_TIMEOUT_S = 30.0
# Of W&B's run, besides `log`. What they return isn't passed on, since they run on the thread.
_METHODS = ("alert", "define_metric", "log_artifact", "log_code", "save", "unwatch", "watch")


@final
class WandbExperiment:
    """The methods of W&B's run, called by the logger's thread: `self.logger.experiment` of a LightningModule.

    They return nothing. `log` without a step is for the current one.
    """

    def __init__(self, logger: WandbLogger) -> None:
        self._logger = logger
        self.config = _Entries(logger, "config")
        self.summary = _Entries(logger, "summary")

    def log(self, data: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log numbers as the run's own, which a resumed run has once, and objects of W&B as they are."""
        self._logger.log_objects(data, step=step)

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(
                f"self.logger.experiment of W&B has log, {', '.join(_METHODS)}, config.update and summary.update, and "
                f"no {name}. Its run is on another thread."
            )
        return partial(self._logger.call, name)


@final
class _Entries:
    """`config` or `summary` of W&B's run."""

    def __init__(self, logger: WandbLogger, name: str) -> None:
        self._logger = logger
        self._name = name

    def update(self, *arguments: Any, **keywords: Any) -> None:
        self._logger.call(f"{self._name}.update", *arguments, **keywords)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})


@final
class WandbLogger(Tracker):
    """Log to Weights & Biases: one W&B run for a run directory, however often that is resumed.

    Without an API key (unless WANDB_MODE is set), or if the server can't be reached, the run is offline, and `wandb
    sync` uploads it later. Offline, W&B writes a folder for each process: a resumed run writes the whole curve up to
    the step it resumes from to its own folder and removes the earlier ones, unless they were synced. Online, W&B takes
    no step twice, so repeated steps keep their first values.

    Args:
        project, entity, group: As for `wandb.init`; the group is by default the sweep's name.
        name: By default the run directory's.
        mode: online, offline, shared or disabled; None as above.
        settings: Further `wandb.Settings`, by name. By default, what the run prints is not uploaded.
        log_checkpoints: best or all: upload these at the end.
        close_timeout_s: How long the end of the run waits for W&B.
    """

    name: ClassVar[str] = "wandb"

    def __init__(
        self,
        *,
        run_dir: RunDir,
        project: str = "framework",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        mode: str | None = None,
        settings: Mapping[str, Any] | None = None,
        log_checkpoints: str | None = None,
        close_timeout_s: float = 60.0,
    ) -> None:
        check_installed(self.name)
        super().__init__(run_dir, log_checkpoints=log_checkpoints, close_timeout_s=close_timeout_s)
        self._arguments = {
            "project": project,
            "entity": entity,
            "name": name or self.run_name,
            "group": group or self.sweep,
            "tags": self.tags or None,
            "config": dict(self.config),
            "dir": str(run_dir.path),
            "resume": "allow",
            "reinit": "create_new",
        }
        self._mode = mode
        self._settings: dict[str, Any] = {"console": "off", "silent": True, "init_timeout": _INIT_TIMEOUT_S}
        self._settings.update(settings or {})
        self._run: Any = None
        # Calls through `experiment` that came before the thread began.
        self._waiting: list[Callable[[], object]] = []
        self._present_step: Callable[[], int] | None = None

    # For `self.logger.experiment`

    @property
    def experiment(self) -> WandbExperiment:
        return WandbExperiment(self)

    def follow(self, present_step: Callable[[], int]) -> None:
        """Note what returns the present step."""
        self._present_step = present_step

    def call(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Have the thread call a method of W&B's run, such as `config.update`."""
        self._on_thread(lambda: attrgetter(method)(self._run)(*arguments, **keywords))

    def log_objects(self, data: Mapping[str, Any], *, step: int | None) -> None:
        """Log numbers by the journal, and everything else directly: W&B's objects can't be kept in it."""
        if step is None:
            step = self._step if self._present_step is None else self._present_step()
        numbers = {}
        others = {}
        for name, value in data.items():
            if isinstance(value, (int, float)) or getattr(value, "shape", None) == ():
                numbers[name] = float(value)
            else:
                others[name] = value
        if numbers:
            # W&B isn't told the epoch.
            self.log(numbers, step=step, epoch=0)
        if others:
            row = {"step": step}
            self._on_thread(lambda: self._put(row, others))

    def start(self, info: FitInfo) -> None:
        super().start(info)
        waiting = self._waiting
        self._waiting = []
        for call in waiting:
            self._on_thread(call)

    def _on_thread(self, call: Callable[[], object]) -> None:
        if self._worker is None:
            self._waiting.append(call)
        else:
            self._worker.submit(call)

    # On the thread

    def begin(self) -> None:
        import wandb

        self._wandb: Any = wandb
        earlier = self.identity
        self._id = earlier.get("id") or secrets.token_hex(6)
        self._was_online = earlier.get("mode") == "online"
        self._offline_before = sorted((self.run_dir.path / "wandb").glob(f"offline-run-*-{self._id}"))
        self._run = self._start_run()
        if self._run.disabled:
            return

        facts = {"id": self._id, "project": self._arguments["project"], "mode": "offline"}
        if self._run.offline:
            facts["folder"] = self._run.settings.sync_dir
            show(f"wandb  offline; to upload it: wandb sync {self._folder_shown()}")
        else:
            facts["url"] = masked_text(self._run.url)
            show(f"wandb  {self._run.url}")
        if self._was_online or not self._run.offline:
            facts["mode"] = "online"
        self.identity = facts

    def write_earlier(self, rows: Sequence[Row]) -> None:
        if not rows:
            # The earlier folders have what a lost journal had.
            return
        was_synced = any(list(folder.glob("*.synced")) for folder in self._offline_before)
        if self._run.offline and (self._was_online or was_synced):
            return
        super().write_earlier(rows)
        if self._run.offline:
            for folder in self._offline_before:
                shutil.rmtree(folder, ignore_errors=True)

    def write_numbers(self, row: Row) -> None:
        self._put(row, row["values"])

    def write_text(self, row: Row) -> None:
        shown = self._wandb.Html(f"<pre>{html.escape(row['text'])}</pre>")
        self._put(row, {row["tag"]: shown})

    def write_images(self, row: Row) -> None:
        pairs = zip(row["files"], row["captions"], strict=True)
        images = [self._wandb.Image(str(self.file_of(name)), caption=caption or None) for name, caption in pairs]
        if len(images) == 1:
            self._put(row, {row["tag"]: images[0]})
        else:
            self._put(row, {row["tag"]: images})

    def write_histogram(self, row: Row) -> None:
        self._put(row, {row["tag"]: self._wandb.Histogram(np_histogram=(row["counts"], row["edges"]))})

    def write_table(self, row: Row) -> None:
        self._put(row, {row["tag"]: self._wandb.Table(row["columns"], row["rows"], allow_mixed_types=True)})

    def write_artifact(self, row: Row) -> None:
        self._keep(Path(row["path"]), kind="file", name=row["tag"], aliases=[f"step_{row['step']}"])

    def write_final(self, metrics: Mapping[str, float]) -> None:
        self._run.summary.update(dict(metrics))

    def write_checkpoint(self, folder: Path, names: Sequence[str]) -> None:
        self._keep(folder, kind="model", name="checkpoint", aliases=[folder.name, *names])

    def finish(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))
        self._wandb.teardown()

    def abandon(self) -> None:
        """Kill W&B's service process, which its library would wait for at exit. What it has written stays."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if "wandb-core" in child.name():
                    child.kill()
        # The library complains that the process is gone.
        with suppress(Exception, SystemExit):
            self._wandb.teardown()

    def _put(self, row: Row, values: Mapping[str, Any]) -> None:
        # The server has the steps before.
        if row["step"] >= self._run.starting_step:
            # W&B drops values of an earlier step than its last one, such as a drawing that has waited.
            self._run.log(dict(values), step=max(row["step"], self._run.step))

    def _keep(self, path: Path, *, kind: str, name: str, aliases: Sequence[str]) -> None:
        if not path.exists():
            warn(f"logger.wandb: {path} is gone, so it isn't uploaded.")
            return
        allowed_name = re.sub(r"[^a-zA-Z0-9_.-]", "-", name)
        artifact = self._wandb.Artifact(f"{allowed_name}-{self._id}", type=kind)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=list(aliases))

    def _start_run(self) -> Any:
        """Return W&B's run, offline if there is no API key or the server can't be reached."""
        mode = self._mode or os.environ.get("WANDB_MODE")
        if mode is not None:
            first_mode = mode
        else:
            first_mode = "online" if self._wandb.login(prompt=False, verify=False) else "offline"
        try:
            return self._init(first_mode)
        except Exception as error:
            if mode not in (None, "online"):
                raise
            warn(f"logger.wandb: {' '.join(str(error).split())}. It continues offline.")
            # Otherwise the run is in use.
            self._wandb.teardown()
            return self._init("offline")

    def _init(self, mode: str) -> Any:
        settings = self._wandb.Settings(**self._settings)
        return self._wandb.init(id=self._id, mode=mode, settings=settings, **self._arguments)

    def _folder_shown(self) -> str:
        folder = Path(self._run.settings.sync_dir)
        with suppress(ValueError):
            return str(folder.relative_to(Path.cwd()))
        return str(folder)
