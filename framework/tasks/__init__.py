"""What a step computes: a model's loss and metrics, chosen by config. A user's own class takes the same place."""

from framework.tasks.metrics import (
    F1,
    Accuracy,
    Classes,
    ConfusionMatrix,
    MeanAbsoluteError,
    Metric,
    Perplexity,
    PredictedAgainstTrue,
    WorstMistakes,
)
from framework.tasks.model_loss import ModelLoss
from framework.tasks.supervised import Supervised

__all__ = [
    "F1",
    "Accuracy",
    "Classes",
    "ConfusionMatrix",
    "MeanAbsoluteError",
    "Metric",
    "ModelLoss",
    "Perplexity",
    "PredictedAgainstTrue",
    "Supervised",
    "WorstMistakes",
]
