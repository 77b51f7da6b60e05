"""A sweep on disk: its plan `sweep.json`, who runs which trial, how a search chooses them, what they reached. No torch.

Start with `folder`, the plan, and with `results`, `ranking` and `table`: what the trials reached and which is best.
"""
