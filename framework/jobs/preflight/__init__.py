"""`job=preflight`: can the ranks of a run communicate, and how fast? Values are checked, exchanges timed.

Start with `job` (the parent's side, without torch), then `rank`, which `preflight=true` also runs before training. The
checks are in `machine`, `barriers`, `links` and `exchanges`, over `peers`; `report` judges and prints their results.
"""

from framework.jobs.preflight.job import Preflight

__all__ = ["Preflight"]
