"""MLflow. Needs the extra `mlflow`."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, ClassVar, final

from filelock import FileLock

from framework.config.nested import flatten
from framework.errors import ConfigError
from framework.loggers.media import shortened
from framework.loggers.tracker import Row, Tracker, check_installed
from framework.system.rank_log import show, warn
from framework.system.run_dir import RunDir
from framework.system.shown_text import MASK, masked_text

# In one call.
_MAX_PARAMS = 100
_MAX_PARAM_CHARS = 6000
_LOCK_TIMEOUT_S = 60.0
_DIGEST_CHARS = 8
_SQLITE = "sqlite:///"
# MLflow's tag that makes a run the child of another one.
_PARENT = "mlflow.parentRunId"
# Only the run of a whole sweep has it.
_OF_SWEEP = "sweep"
# MLflow takes 250 characters.
_MAX_NAME_BYTES = 200


@final
class MLflowLogger(Tracker):
    """Log to MLflow: one MLflow run for a run directory, however often that is resumed.

    MLflow can't replace a value, so a resumed run leaves out the steps that a metric has already. Nor can it change
    parameters: they are those of the first start. Images, tables and texts are artifacts in `media/`. The trials of a
    sweep are children of one run, which has the sweep's name.

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
        # The metric behind each of MLflow's names, which have fewer characters.
        self._names: dict[str, str] = {}
        # The last step of each metric that the run has already.
        self._last_steps: dict[str, int] = {}

    def begin(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._make_metric = Metric

        earlier = self.identity
        own_store = f"{_SQLITE}{self._outputs / 'mlflow.db'}"
        uri = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or earlier.get("tracking_uri") or own_store
        if MASK in uri:
            raise ConfigError(f"the run was logged to {uri}, whose password isn't stored. Set MLFLOW_TRACKING_URI.")
        experiment_id = self._connect(uri, is_own=uri == own_store)

        shown_uri = masked_text(uri)
        # Earlier versions recorded the password, so that is masked, too.
        if masked_text(earlier.get("tracking_uri", "")) == shown_uri:
            self._run_id = earlier["run_id"]
            known_params = self._continue_run()
        else:
            run = self._client.create_run(experiment_id, run_name=self._display_name)
            self._run_id = run.info.run_id
            known_params = set()
            self.identity = {"run_id": self._run_id, "tracking_uri": shown_uri, "experiment": self._experiment}

        for tag in self.tags:
            self._client.set_tag(self._run_id, tag, "true")
        if self.sweep is not None:
            self._client.set_tag(self._run_id, "group", self.sweep)
            self._client.set_tag(self._run_id, _PARENT, self._run_of_sweep(self.sweep, experiment_id))
        self._log_params(known=known_params)
        self._client.log_artifact(self._run_id, str(self.run_dir.config_file))
        show(f"mlflow  run {self._run_id} in {shown_uri}")

    def _connect(self, uri: str, *, is_own: bool) -> Any:
        """Open the store and return the id of the experiment, which is created if there is none.

        is_own: the store is the file in the outputs folder. Several runs may begin at once, and one of them creates the
            tables, under a lock.
        """
        from mlflow.tracking import MlflowClient

        lock = FileLock(self._outputs / ".mlflow.lock", timeout=_LOCK_TIMEOUT_S) if is_own else nullcontext()
        with lock:
            if uri.startswith(_SQLITE):
                _check_database(uri.removeprefix(_SQLITE).partition("?")[0])
            self._client: Any = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(self._experiment)
            if experiment is not None:
                return experiment.experiment_id
            location = (self._outputs / "mlartifacts" / self._experiment).as_uri() if is_own else None
            return self._client.create_experiment(self._experiment, location)

    def _run_of_sweep(self, sweep: str, experiment_id: str) -> str:
        """Return the id of the run whose children the sweep's trials are, in the same experiment.

        The first trial creates it. The store is asked, not a file, so that every worker finds it, and a resumed trial
        gets another one if it was deleted.
        """
        # Without quotes, which a filter can't have.
        name = _allowed(sweep)
        # Trials begin at the same time, on any machine that sees the sweep's folder.
        with FileLock(self.run_dir.path.parent / ".mlflow.lock", timeout=_LOCK_TIMEOUT_S):
            known = self._client.search_runs([experiment_id], f"tags.{_OF_SWEEP} = '{name}'", max_results=1)
            if known:
                return str(known[0].info.run_id)
            parent = self._client.create_run(experiment_id, run_name=sweep, tags={_OF_SWEEP: name})
            # It computes nothing, and a sweep that is killed couldn't end it.
            self._client.set_terminated(parent.info.run_id)
            return str(parent.info.run_id)

    def _continue_run(self) -> set[str]:
        """Note the last step of each metric of the earlier run, and return the names of its parameters."""
        run = self._client.get_run(self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        for key in run.data.metrics:
            history = self._client.get_metric_history(self._run_id, key)
            self._last_steps[key] = max(point.step for point in history)
        return set(run.data.params)

    def _log_params(self, *, known: set[str]) -> None:
        """Log the configuration as parameters, but for the known ones, which can't be changed."""
        from mlflow.entities import Param

        params = []
        for name, value in flatten(self.config).items():
            key = _allowed(name)
            if key not in known:
                params.append(Param(key, str(value)[:_MAX_PARAM_CHARS]))
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[begin : begin + _MAX_PARAMS])

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
        """Write the values of a step, but for metrics that have this step already."""
        metrics = []
        for name, value in values.items():
            key = self._distinct(name)
            if step > self._last_steps.get(key, -1):
                metrics.append(self._make_metric(key, value, int(unix_s * 1000), step))
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def _distinct(self, name: str) -> str:
        """Return the name that MLflow has for a metric. If two differ only in what it refuses, the second is marked.

        A resumed run replays its journal, so it gives the same names.
        """
        key = _allowed(name)
        if self._names.setdefault(key, name) == name:
            return key
        return f"{key}_{hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]}"

    def _keep(self, path: Path, place: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), place)
        elif path.exists():
            self._client.log_artifact(self._run_id, str(path), place)
        else:
            warn(f"logger.mlflow: {path} is gone, so it isn't uploaded.")


def _check_database(path: str) -> None:
    """Raise ConfigError for a database that can't be opened: MLflow would try again for minutes."""
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise ConfigError(
            f"{path} can't be opened: {error}. Restore it from a copy, or move it away to begin a new one."
        ) from error


def _allowed(name: str) -> str:
    """Return the name with what MLflow allows in names."""
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    name = "/".join(part for part in parts if part.strip(".")) or "_"
    return shortened(name, max_bytes=_MAX_NAME_BYTES).replace("~", "_")


def _place(row: Row) -> str:
    """Return where a medium of the row is kept, without its suffix."""
    return f"media/{_allowed(row['tag'])}/{row['step']:08}"
