"""`job=eval checkpoint.path=CHECKPOINT`: the metrics of a trained model over one part of the data. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.request import Request
from framework.config.schema import Config
from framework.system.formatting import format_table
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Eval(Job):
    """Evaluate a trained model on any number of processes."""

    needs_weights = True

    def title(self, config: Config) -> str:
        return "Evaluating"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.inference import evaluate_rank

        evaluate_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        """Return the metrics, and the texts of metrics that are tables."""
        config = request.config
        if status != 0:
            return self.closing(config, run_dir, results="")

        results = run_dir.read_run().get("results", {})
        rows = [(name, f"{value:.4f}") for name, value in results.get("metrics", {}).items()]
        lines = [f"Evaluated {config.recipe} on {config.eval.part}", format_table(rows)]
        for name, text in results.get("texts", {}).items():
            lines += ["", name, text]
        return self.closing(config, run_dir, results="\n".join(lines))
