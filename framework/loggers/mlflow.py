"""MLflow. Needs the extra `mlflow`."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, final

from filelock import FileLock

from framework.config.parse import flatten
from framework.errors import ConfigError
from framework.loggers.tracker import Row, Tracker, check_installed
from framework.system.rank_log import show, warn
from framework.system.run_dir import RunDir
from framework.system.shown_text import MASK, masked_text

_MAX_PARAMS = 100  # in one call
_MAX_PARAM_CHARS = 6000
_LOCK_TIMEOUT_S = 60.0


@final
class MLflowLogger(Tracker):
    """Log to MLflow: one MLflow run for a run directory, however often that is resumed.

    MLflow can't replace a value, so a resumed run leaves out the steps that a metric has already. Nor can it change
    parameters: they are those of the first start. Images, tables and texts are artifacts in `media/`.

    Args:
        tracking_uri: By default MLFLOW_TRACKING_URI, else a SQLite file `mlflow.db` in the outputs folder, with
            artifacts in `mlartifacts`.
        experiment: Created if there is none.
        name: By default the run directory's.
        log_checkpoints: best or all: upload these at the end.
        close_timeout_s: How long the end of the run waits for MLflow.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        *,
        run_dir: RunDir,
        tracking_uri: str | None = None,
        experiment: str = "framework",
        name: str | None = None,
        log_checkpoints: str | None = None,
        close_timeout_s: float = 60.0,
    ) -> None:
        check_installed(self.name)
        super().__init__(run_dir, log_checkpoints=log_checkpoints, close_timeout_s=close_timeout_s)
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._display_name = name or self.run_name
        self._outputs = Path(self.config["path"]["outputs"]).absolute()
        self._last_steps: dict[str, int] = {}  # of each metric that the run has already

    def begin(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._make_metric = Metric
        known = self.identity
        own_store = f"sqlite:///{self._outputs / 'mlflow.db'}"
        uri = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or known.get("tracking_uri") or own_store
        if MASK in uri:
            raise ConfigError(f"the run was logged to {uri}, whose password isn't stored. Set MLFLOW_TRACKING_URI.")
        shown_uri = masked_text(uri)
        is_own = uri == own_store
        # Several runs may begin at once, and one of them creates the tables.
        lock = FileLock(self._outputs / ".mlflow.lock", timeout=_LOCK_TIMEOUT_S) if is_own else nullcontext()
        with lock:
            self._client: Any = MlflowClient(tracking_uri=uri)
            location = (self._outputs / "mlartifacts" / self._experiment).as_uri() if is_own else None
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is None:
                experiment_id = self._client.create_experiment(self._experiment, location)
            else:
                experiment_id = experiment.experiment_id
        # Earlier versions recorded the password.
        if masked_text(known.get("tracking_uri", "")) == shown_uri:
            self._run_id = known["run_id"]
            run = self._client.get_run(self._run_id)
            self._client.update_run(self._run_id, status="RUNNING")
            params = set(run.data.params)
            for key in run.data.metrics:
                history = self._client.get_metric_history(self._run_id, key)
                self._last_steps[key] = max(each.step for each in history)
        else:
            run = self._client.create_run(experiment_id, run_name=self._display_name)
            self._run_id, params = run.info.run_id, set()
            self.identity = {"run_id": self._run_id, "tracking_uri": shown_uri, "experiment": self._experiment}
        for tag in self.tags:
            self._client.set_tag(self._run_id, tag, "true")
        if self.sweep is not None:
            self._client.set_tag(self._run_id, "group", self.sweep)
        new = {key: value for name, value in flatten(self.config).items() if (key := _allowed(name)) not in params}
        pairs = [Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in new.items()]
        for at in range(0, len(pairs), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=pairs[at : at + _MAX_PARAMS])
        self._client.log_artifact(self._run_id, str(self.run_dir.config_file))
        show(f"mlflow  run {self._run_id} in {shown_uri}")

    def write_numbers(self, row: Row) -> None:
        self._write_numbers(row["values"], step=row["step"], unix_s=row["time"])

    def write_text(self, row: Row) -> None:
        self._client.log_text(self._run_id, row["text"], f"{_place(row)}.txt")

    def write_images(self, row: Row) -> None:
        for name in row["files"]:
            self._client.log_artifact(self._run_id, str(self.file_of(name)), str(Path(_place(row)).parent))

    def write_histogram(self, row: Row) -> None:
        """Do nothing: MLflow has no histograms."""

    def write_table(self, row: Row) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([row["columns"], *row["rows"]])
        self._client.log_text(self._run_id, text.getvalue(), f"{_place(row)}.csv")

    def write_artifact(self, row: Row) -> None:
        self._keep(Path(row["path"]), _allowed(row["tag"]))

    def write_final(self, metrics: Mapping[str, float]) -> None:
        """Write the `best/` metrics; the others are the last values of their curves."""
        best = {name: value for name, value in metrics.items() if name.startswith("best/")}
        self._last_steps = {name: step for name, step in self._last_steps.items() if name not in best}
        self._write_numbers(best, step=self._step, unix_s=time.time())

    def write_checkpoint(self, folder: Path, names: Sequence[str]) -> None:
        self._keep(folder, f"checkpoints/{folder.name}")
        for name in names:
            self._client.set_tag(self._run_id, f"checkpoint.{name}", folder.name)

    def finish(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if has_failed else "FINISHED")

    def _write_numbers(self, values: Mapping[str, float], *, step: int, unix_s: float) -> None:
        new = {key: value for name, value in values.items() if step > self._last_steps.get(key := _allowed(name), -1)}
        metrics = [self._make_metric(key, value, int(unix_s * 1000), step) for key, value in new.items()]
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def _keep(self, path: Path, place: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), place)
        elif path.exists():
            self._client.log_artifact(self._run_id, str(path), place)
        else:
            warn(f"logger.mlflow: {path} is gone, so it isn't uploaded.")


def _allowed(name: str) -> str:
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    return "/".join(part for part in parts if part.strip(".")) or "_"


def _place(row: Row) -> str:
    return f"media/{_allowed(row['tag'])}/{row['step']:08}"
