"""What a step computes: a model's loss and metrics, chosen by config. A user's own class takes the same place."""

from framework.tasks.metrics import Accuracy, Classes, MeanAbsoluteError, Metric
from framework.tasks.model_loss import ModelLoss
from framework.tasks.supervised import Supervised

__all__ = ["Accuracy", "Classes", "MeanAbsoluteError", "Metric", "ModelLoss", "Supervised"]
