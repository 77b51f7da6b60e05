"""`job=export`: a checkpoint's model as one plain file. Start with `job`; `model_file` needs torch."""

from framework.jobs.export.job import main

__all__ = ["main"]
