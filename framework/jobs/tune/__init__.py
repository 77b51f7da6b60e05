"""`job=tune`: the largest batch that fits on every rank, and a learning rate to train it with.

Start with `job` (the parent's side, without torch), then `rank`, which calls `batch_size` and `lr_range`.
"""

from framework.jobs.tune.job import Tune

__all__ = ["Tune"]
