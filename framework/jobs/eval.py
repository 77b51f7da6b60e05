"""`job=eval checkpoint.path=CHECKPOINT`: the metrics of a trained model over one part of the data. No torch here."""

from __future__ import annotations

import re
from itertools import groupby
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
            lines += ["", name, _with_plain_tables(text)]
        return self.closing(config, run_dir, results="\n".join(lines))


def _with_plain_tables(text: str) -> str:
    """Return a text with its Markdown tables in columns, as a terminal shows them."""
    blocks = []
    for is_table, group in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        lines = list(group)
        if is_table:
            rows = [_cells(line) for line in lines]
            blocks.append(format_table([row for row in rows if set("".join(row)) != {"-"}]))
        else:
            blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]
