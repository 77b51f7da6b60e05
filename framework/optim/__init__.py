"""Parameter groups, schedules, several optimizers of one task, clipping and precision. Start with `schedule`."""

from framework.optim.schedule import cosine

__all__ = ["cosine"]
