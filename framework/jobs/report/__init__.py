"""`job=report`: runs as one HTML page. Start with `job`; `page` makes the page, `curves` its charts. No torch here."""

from framework.jobs.report.job import main

__all__ = ["main"]
