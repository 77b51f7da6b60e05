"""A run directory as a Python object: metrics, models, and jobs on them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, final

from framework.api.call import execute, section_overrides
from framework.api.nodes import Nodes, is_maker, override_value
from framework.api.recipe import write_recipe
from framework.checkpoint.layout import BEST, LAST
from framework.command.trust import check_trust
from framework.config.find_run import is_run
from framework.config.overrides import key_of
from framework.config.parse import parse
from framework.config.saved import SavedRun, load_config, load_run, objects_of
from framework.config.yaml_files import load_yaml
from framework.errors import ConfigError
from framework.runs.record import RunRecord, read_rows, read_run
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from torch import Tensor, nn


def load(directory: str | Path, *, trust: bool = False) -> Run:
    """Return the run in `directory`, whether `framework.train` or the command made it.

    Metrics, configuration and history of any run can be read. Its models and jobs run code that the run names or brings
    along, and are refused if the run isn't known to be yours (see `docs/trust.md`).

    Args:
        trust: run that code, whoever has made the run.

    Raises:
        ConfigError: it isn't a run directory.
    """
    path = Path(directory).expanduser().absolute()
    if not is_run(path):
        raise ConfigError(f"{path} is not a run directory: it has no config.yaml and overrides.yaml.")
    return Run(path, trust=trust)


@final
class Run:
    """A run. Its files are read at each access, so a run that is still training can be inspected."""

    def __init__(self, directory: Path, *, trust: bool = False) -> None:
        self.directory = directory
        self._trust = trust
        self._run_dir = RunDir(directory)

    def __repr__(self) -> str:
        return f"<Run {self.directory}: {self.status}>"

    @property
    def config(self) -> dict[str, Any]:
        """The whole configuration, as in `config.yaml`: passwords and tokens are masked."""
        content: dict[str, Any] = load_yaml(self._run_dir.config_file)
        return {**content, "objects": objects_of(self._run_dir, content) or None}

    @property
    def record(self) -> dict[str, Any]:
        """What `run.json` says: command, code, versions, hardware, results."""
        return self._run_dir.read_run()

    @property
    def status(self) -> str:
        """`finished`, `stopped` (on request, to be resumed), `failed`, `interrupted`, `running` or `crashed`."""
        return self._read().status

    @property
    def metrics(self) -> dict[str, float]:
        """The last validation's metrics, or the best one's if `checkpoint.monitor` is set; and those of the test."""
        return self._read().metrics

    @property
    def history(self) -> Any:
        """All that was logged: a pandas DataFrame indexed by step; without pandas, a list of dicts."""
        rows: dict[int, dict[str, Any]] = {}
        for row in read_rows(self._run_dir, report=partial(warnings.warn, stacklevel=3)):
            values = {name: value for name, value in row.items() if name != "nonfinite"}
            rows.setdefault(row["step"], {}).update(values)
        try:
            import pandas
        except ImportError:
            return list(rows.values())
        table = pandas.DataFrame(list(rows.values()))
        if not rows:
            return table
        return table.set_index("step")

    def best_model(self) -> nn.Module:
        """Return the model with the best weights by `checkpoint.monitor`, else the last: on the CPU, in eval mode."""
        return self._model(self._weights())

    def last_model(self) -> nn.Module:
        """Return the model with the last weights that were saved: on the CPU, in eval mode."""
        return self._model(LAST)

    def resume(
        self,
        *,
        loss: Any = None,
        metrics: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **sections: Any,
    ) -> Run:
        """Continue training from the last checkpoint, and return this run again; see `framework.train`."""
        nodes = Nodes()
        typed = section_overrides(nodes, sections, overrides, loss=loss, metrics=metrics)
        self._check_trust("resume")
        execute([f"resume={override_value(str(self.directory))}", "trust=true", *typed], nodes)
        return self

    def evaluate(
        self, data: Any = None, *, part: str = "test", overrides: Sequence[str] = (), **sections: Any
    ) -> dict[str, float]:
        """Return the metrics of the best weights on `data`, or on a part of the run's own data.

        Args:
            data: a DataLoader or Dataset, evaluated as the test part; or several parts, as for `framework.train`.
            part: train, val or test.
        """
        run_dir = self._job("eval", data, part, overrides, sections)
        metrics: dict[str, float] = run_dir.read_run()["results"]["metrics"]
        return metrics

    def predict(
        self, data: Any = None, *, part: str = "test", overrides: Sequence[str] = (), **sections: Any
    ) -> dict[str, Tensor]:
        """Return the task's predictions in the order of the data: name → tensor with a row for each sample.

        See `evaluate` for the arguments.
        """
        import torch

        with TemporaryDirectory() as folder:
            file = Path(folder, "predictions.pt")
            output = f"predict.output={override_value(str(file))}"
            self._job("predict", data, part, [output, *overrides], sections)
            predictions: dict[str, Tensor] = torch.load(file, weights_only=True)
        return predictions

    def to_yaml(self, path: str | Path) -> Path:
        """Write the run as a recipe: `conf/recipe/mine.yaml` for `python -m framework recipe=mine`.

        Raises ConfigError if the file exists, or if a recipe can't name an object; it says what to pass instead.
        """
        self._check_trust("to_yaml")
        return write_recipe(self._run_dir, Path(path))

    def _read(self) -> RunRecord:
        record = read_run(self.directory)
        if record is None:
            raise ConfigError(f"{self.directory} isn't a run any more: it was moved or removed.")
        return record

    def _weights(self) -> str:
        """Return the name of the best checkpoint, or of the last one if none is the best."""
        if (self._run_dir.checkpoints / BEST).exists():
            return BEST
        return LAST

    def _job(self, job: str, data: Any, part: str, overrides: Sequence[str], sections: dict[str, Any]) -> RunDir:
        """Run a job on the best weights, and return its run directory. data, part: as for `evaluate`."""
        self._check_trust(job)
        nodes = Nodes()
        if data is not None:
            has_parts = isinstance(data, (tuple, list, dict)) or is_maker(data) or hasattr(data, "parts")
            if not has_parts:
                data = _as_test(data)
            sections = {"data": data, **sections}
        settings = list(section_overrides(nodes, sections, overrides))
        if any(key_of(text) == "data.datasets" for text in settings):
            # A fold is one of the run's own data.
            settings = ["++data.folds=null", "++data.fold=null", *settings]
        checkpoint = self._run_dir.checkpoints / self._weights()
        typed = [
            f"job={job}",
            f"checkpoint.path={override_value(str(checkpoint))}",
            "trust=true",
            f"{job}.part={part}",
            *settings,
        ]
        result = execute(typed, nodes)
        assert result.run_dir is not None, "ranks have a run directory"
        return result.run_dir

    def _check_trust(self, what: str) -> None:
        """Raise ConfigError for a run that isn't known to be the user's, unless `trust` was given."""
        if self._trust:
            return
        from framework.command import compose

        raw, overrides = load_run(self._run_dir)
        saved = SavedRun(what, run_dir=self._run_dir, raw=raw, overrides=tuple(map(str, overrides)), checkpoint=None)
        outputs = compose.default_outputs(recipe=raw.get("recipe"))
        check_trust(saved, outputs=outputs, asked_by="load it with framework.load(path, trust=True)")

    def _model(self, which: str) -> nn.Module:
        import torch

        self._check_trust("the model")
        from framework.jobs.export.source import load_source

        topology = self.record.get("topology", {})
        if "span" not in topology:
            raise ConfigError(f"{self._run_dir.run_file} doesn't say for how many devices the model is. Restore it.")
        raw = load_config(self._run_dir)
        raw["objects"] = objects_of(self._run_dir, raw) or None
        raw["checkpoint"]["path"] = str(self._run_dir.checkpoints / which)
        # Building a model draws random numbers, and the caller's generator must not notice.
        with torch.random.fork_rng(devices=[]):
            return load_source(parse(raw), span=topology["span"]).model


def _as_test(data: Any) -> Any:
    """Return one Dataset or DataLoader as the test part."""
    from framework.data.from_dataloader import unpack_dataloaders
    from framework.types import Datasets

    # There has to be a train part, which isn't read.
    dataset = data.dataset if hasattr(data, "dataset") else data
    return unpack_dataloaders(Datasets(dataset, test=data))
