"""`job=replay`: run the steps of a run again, exactly, and show what happened in them.

Start with `job`; `training` repeats the steps, for other jobs too.
"""

from framework.jobs.replay.job import Replay

__all__ = ["Replay"]
