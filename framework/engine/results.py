"""What a training leaves in `run.json` when it ends, and gives to the loggers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from framework.engine.setup import RankSetup
from framework.media import markdown_texts
from framework.training.trainer import Trainer
from framework.types import hooks


def write_results(
    setup: RankSetup,
    trainer: Trainer,
    *,
    test: dict[str, Any] | None,
    is_untested: bool,
    seconds: float,
) -> None:
    """Write the results to `run.json`, where the parent reads them for the closing summary; give them to the loggers.

    `best` and `last` are validations; they and `test` have the step of their weights.

    Args:
        is_untested: there is a test part, and it was to be left out.
    """
    state = trainer.state
    results: dict[str, Any] = {
        "steps": trainer.progress.step,
        "epochs": trainer.progress.epoch,
        "seconds": seconds,
        "ended_by": _ended_by(setup, trainer),
        "score": None,
        "best": None,
        "last": None,
        "test": test,
        "untested": is_untested,
        "slow_ranks": [asdict(slow_rank) for slow_rank in trainer.logbook.slow_ranks.found()],
    }
    final_metrics = dict(state.val_metrics)
    if test is not None:
        final_metrics |= test["metrics"]

    checkpoints = trainer.checkpoints
    if checkpoints is not None and checkpoints.best is not None:
        best = checkpoints.best
        monitor = str(checkpoints.monitor)
        results["score"] = best.metrics[monitor]
        results["best"] = {"step": best.step, "metrics": best.metrics}
        final_metrics[f"best/{monitor}"] = best.metrics[monitor]
    if state.val_step is not None:
        texts = markdown_texts(state.val_texts)
        results["last"] = {"step": state.val_step, "metrics": state.val_metrics, "texts": texts}
    setup.run_dir.update_run({"results": results})

    # A run that was stopped on request has no final results yet.
    if not trainer.stop.on_request:
        for record in hooks(state.loggers.values(), "on_results"):
            record(final_metrics)


def _ended_by(setup: RankSetup, trainer: Trainer) -> str:
    """Return why training ended, for the results."""
    if trainer.stop.on_request:
        place = " during the test" if trainer.stop.stopped_test else ""
        return f"stopped on request ({trainer.stop.stopped_by}){place}"
    if trainer.stop.reason:
        return trainer.stop.reason
    max_epochs = setup.config.trainer.max_epochs
    if max_epochs is not None and trainer.progress.epoch >= max_epochs:
        return "trainer.max_epochs reached"
    return "trainer.max_steps reached"
