"""Small states of the shape a training gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from framework.checkpoint import write


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)},
        "training": {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}, "callbacks": {}},
        "generators": [{"torch": torch.get_rng_state()}],
    }


def write_small(
    folder: Path,
    step: int,
    *,
    value: float | None = None,
    metrics: dict[str, float] | None = None,
    config_text: str = "recipe: small\n",
) -> Path:
    return write(
        folder,
        small_state(float(step) if value is None else value),
        step=step,
        epoch=step // 10,
        metrics=metrics or {},
        config_text=config_text,
    )


def trained() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])
    for _ in range(3):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer, schedule
