"""From what was typed to a run: compose, check, choose the launcher, start ranks. No torch here.

Start with `compose` (the command), then `run_ranks`. What a command does is a job, in `framework.jobs`.
"""
