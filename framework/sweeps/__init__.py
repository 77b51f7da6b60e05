"""A sweep on disk: its plan `sweep.json`, who runs which trial, how a search chooses them. No torch here.

Start with `folder`.
"""
