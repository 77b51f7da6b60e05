"""`job=export`: a checkpoint's model as a plain file or folder. Start with `job`; `model_file` needs torch."""

from framework.jobs.export.job import main

__all__ = ["main"]
