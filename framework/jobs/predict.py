"""`job=predict checkpoint.path=CHECKPOINT`: a trained model's predictions for every sample, in one file. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.request import Request
from framework.config.schema import Config
from framework.system.files import checked_output
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Predict(Job):
    """Write the predictions of a trained model, on any number of processes."""

    needs_weights = True

    def check(self, request: Request) -> None:
        """Raise ConfigError, too, if `predict.output` exists or can't be written."""
        checked_output(request.config.predict.output, key="predict.output", suffixes=(".csv", ".pt"))
        super().check(request)

    def title(self, config: Config) -> str:
        return "Predicting with"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.inference import predict_rank

        predict_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        """Return where the predictions are, and of how many samples."""
        config = request.config
        if status != 0:
            return self.closing(config, run_dir, results="")

        samples = run_dir.read_run().get("results", {}).get("samples", 0)
        file = format_facts([("predictions", display_path(Path(config.predict.output)))])
        results = f"Predicted {samples:,} samples of {config.predict.part}\n{file}"
        return self.closing(config, run_dir, results=results)
