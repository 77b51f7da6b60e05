"""`job=export`: a trained model as a plain file. `job` is its entry; `model_file` needs torch."""

from framework.jobs.export.job import Export

__all__ = ["Export"]
