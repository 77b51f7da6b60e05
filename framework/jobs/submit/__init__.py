"""`job=submit`: hand a training to a cluster's own engine. Start with `job`, then read `slurm`."""

from framework.jobs.submit.job import Submit

__all__ = ["Submit"]
