"""A sweep is a loop: three learning rates for a recipe, the best of which becomes a recipe of its own.

python examples/learning_rates.py
python -m framework recipe=best_rate
"""

from functools import partial
from pathlib import Path

import torch

import framework

runs = []
for lr in (1e-4, 1e-3, 1e-2):
    run = framework.train(
        "digits",
        optimizer=partial(torch.optim.AdamW, lr=lr),
        scheduler="none",
        trainer={"max_epochs": 1, "gpus": 0},
        seed=1,
    )
    runs.append(run)

best = max(runs, key=lambda run: run.metrics["val/accuracy"])
for run in runs:
    lr = run.config["optimizer"]["lr"]
    accuracy = run.metrics["val/accuracy"]
    mark = "  best" if run is best else ""
    print(f"lr {lr:<7} accuracy {accuracy:.3f}{mark}")

recipe = Path("conf/recipe/best_rate.yaml")
recipe.unlink(missing_ok=True)
best.to_yaml(recipe)
print(recipe.read_text())
