"""What job=tune leaves: its files in the run directory, and what is printed of tune.json. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RESULT = "tune.json"
PLOT = "learning_rate.svg"

_LIMITS = {
    "memory": "by memory, of which {margin:.0%} stays free",
    "data": "a step takes no more samples than the dataset has",
}


def batch_lines(batch: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what was found of the batch size: `batch_size` of tune.json."""
    if batch is None:
        return
    limit = _LIMITS.get(batch["limited_by"], f"as much as {batch['limited_by']} allows").format(**batch)
    line = (
        f"Largest batch: {batch['batch_size']:,} for each process ({limit}); a step takes "
        f"{batch['global_batch_size']:,} samples"
    )
    passes = batch["accumulate_grad_batches"]
    if passes > 1:
        line += f", {passes} passes"
    yield line
    if len(batch["proposals"]) > 1:
        yield f"For a global batch of {batch['global_batch_size']:,}"
        for proposal in batch["proposals"]:
            typed = " ".join(f"{key}={value}" for key, value in proposal["overrides"].items())
            rate = f"{proposal['samples_per_s']:,.0f} samples/s"
            yield f"  {rate} with micro-batches of {proposal['batch_size']:,}: {typed}"


def lr_lines(lr: Mapping[str, Any] | None, *, has_schedule: bool) -> Iterator[str]:
    """Yield what was found of the learning rate: `lr` of tune.json."""
    if lr is None:
        return
    suggestion = lr["suggestion"]
    if suggestion is None:
        stopped = f" ({lr['stopped']})" if lr["stopped"] else ""
        yield (
            f"No learning rate: the loss didn't fall by more than its noise{stopped}. Look at the plot, and try a "
            "larger batch, more steps (tune.num_training), or other rates: tune.min_lr, tune.max_lr"
        )
        return

    best = suggestion["lr"]
    begins = suggestion["begins"]
    minimum = suggestion["minimum"]
    samples = f"{lr['global_batch_size']:,} samples"
    yield f"Learning rate: {best:.2g} for steps of {samples}, where the loss falls fastest"
    yield f"  The loss falls with rates from {begins:.2g} to {minimum:.2g}, and rises above"
    yield f"  More careful: {minimum / 10:.2g}, a tenth of the highest of these rates"
    if has_schedule:
        yield "  Found without the schedule, which starts at this rate or leads up to it"
