"""`job=parity`: does training give the same weights with one process and with several? If not, what differs first?

Start with `job`, which runs three trainings; `recording` is the callback that records them,
`comparison` compares them, `causes` guesses why they differ, and `page` says so.
"""

from framework.jobs.parity.job import Parity

__all__ = ["Parity"]
