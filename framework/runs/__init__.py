"""A run on disk: its record `run.json`, the list and the comparison of runs, and the page of a report. No torch here.

Start with `record`.
"""
