"""`job=plan`: show what a run would be. Start with `job`; `estimate` needs torch."""

from framework.jobs.plan.job import check, main

__all__ = ["check", "main"]
