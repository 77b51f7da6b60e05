"""`job=why`: where a run went wrong, or where two runs begin to differ.

`job` finds the steps to repeat and says what was found; `watch` is what looks on in each rank; `two_runs` compares.
"""

from framework.jobs.why.job import Why

__all__ = ["Why"]
