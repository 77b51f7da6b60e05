"""Observers of training that come with the framework. Names and meanings of their settings are Lightning's."""

from framework.callbacks.early_stopping import EarlyStopping
from framework.callbacks.ema import EMAWeightAveraging
from framework.callbacks.swa import StochasticWeightAveraging
from framework.callbacks.timer import Timer
from framework.callbacks.unfreeze import Unfreeze

__all__ = ["EMAWeightAveraging", "EarlyStopping", "StochasticWeightAveraging", "Timer", "Unfreeze"]
