"""A sweep on disk: its plan `sweep.json`, who runs which trial, what the trials reached. No torch here.

Start with `folder`.
"""
