"""`job=plan`: show what a run would be. Start with `job`; `estimate` needs torch, `page` prints it."""

from framework.jobs.plan.job import Plan

__all__ = ["Plan"]
