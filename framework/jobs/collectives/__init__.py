"""`job=collectives`: show what ranks exchange. Start with `demo`, which reads from top to bottom."""

from framework.jobs.collectives.job import Collectives

__all__ = ["Collectives"]
