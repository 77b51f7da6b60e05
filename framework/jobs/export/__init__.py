"""`job=export`: a trained model as a plain file.

Start with `job` (no torch), then `model_file`: it loads a `source` and writes its `weights` or its `graph`.
"""

from framework.jobs.export.job import Export

__all__ = ["Export"]
