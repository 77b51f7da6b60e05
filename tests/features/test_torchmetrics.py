"""torchmetrics on several processes: the values of one, also if ranks hold lists of different lengths, or nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.retrieval import RetrievalMAP

from framework.errors import TargetError
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, StatefulMetrics, sync_through
from tests.helpers.rank_pool import RankPool

BATCHES = 5
SAMPLES = 6
CLASSES = 4
SHARES = {2: [[0, 2, 4], [1, 3]], 3: [[0, 1, 2], [], [3, 4]]}


class Metrics:
    """A task with metrics of every kind of state."""

    def __init__(self) -> None:
        pair = torchmetrics.regression
        self.metrics: dict[str, Any] = {
            "map": RetrievalMAP(),
            "spearman": pair.SpearmanCorrCoef(),
            "pearson": pair.PearsonCorrCoef(),
            "nrmse": pair.NormalizedRootMeanSquaredError(),
            "smallest": torchmetrics.aggregation.MinMetric(),
            "auroc": torchmetrics.classification.MulticlassAUROC(CLASSES),
            "classes": torchmetrics.wrappers.ClasswiseWrapper(
                torchmetrics.classification.MulticlassRecall(CLASSES, average=None)
            ),
            "range": torchmetrics.wrappers.MinMaxMetric(pair.KendallRankCorrCoef()),
            "unsynced": torchmetrics.classification.MulticlassRecall(CLASSES, sync_on_compute=False),
            "ratio": pair.MeanSquaredError() + pair.SpearmanCorrCoef(),
        }

    def updates(self, batch: int) -> dict[str, tuple[Any, ...]]:
        generator = torch.Generator().manual_seed(batch)
        given = torch.rand(SAMPLES, generator=generator)
        true = given + 0.5 * torch.rand(SAMPLES, generator=generator)
        scores = torch.rand(SAMPLES, CLASSES, generator=generator).softmax(dim=1)
        classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        relevant = torch.randint(2, (SAMPLES,), generator=generator)
        queries = torch.randint(3, (SAMPLES,), generator=generator)
        named = dict.fromkeys(("spearman", "pearson", "nrmse", "range", "ratio"), (given, true))
        return named | {
            "map": (given, relevant, queries),
            "smallest": (given,),
            "auroc": (scores, classes),
            "classes": (scores, classes),
            "unsynced": (scores, classes),
        }


class Recalls(torchmetrics.Metric):
    """Numbers, and vectors beside them."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(3), dist_reduce_fx="sum")

    def update(self, value: torch.Tensor) -> None:
        self.total += value

    def compute(self) -> dict[str, torch.Tensor]:
        return {"mean": self.total.mean(), "classes": self.total, "none": self.total[:0]}


def values(context: Context, shares: list[list[int]]) -> dict[str, float]:
    with warnings.catch_warnings():
        # torchmetrics warns of memory, and of ranks without samples.
        warnings.simplefilter("ignore")
        task = Metrics()
        metrics = StatefulMetrics(task, context)
        for batch in shares[context.rank]:
            metrics.update(task.updates(batch))
        return metrics.compute(context)


@pytest.mark.parametrize("ranks", SHARES)
def test_values_are_those_of_one_process(rank_pool: RankPool, ranks: int) -> None:
    whole = values(cpu_context(), [list(range(BATCHES))])
    for found in rank_pool.run(values, SHARES[ranks], ranks=ranks):
        assert found == pytest.approx(whole, abs=1e-6)


def called_in_steps(context: Context) -> float:
    metric = torchmetrics.MeanMetric(dist_sync_on_step=True, sync_on_compute=False)
    sync_through(metric, context)
    for value in range(2 * context.rank + 1):
        assert float(metric(float(value))) == value
    return float(metric.compute())


def test_ranks_may_call_metrics_unequally_often(rank_pool: RankPool) -> None:
    """`dist_sync_on_step` is ignored: with it, a metric would wait for the other ranks in each step."""
    assert rank_pool.run(called_in_steps) == [0.75, 0.75]


def refused(context: Context) -> list[str]:
    inner = torchmetrics.regression.MeanSquaredError()
    texts = []
    for metric in (
        torchmetrics.wrappers.BootStrapper(inner),
        torchmetrics.wrappers.Running(inner),
        torchmetrics.aggregation.RunningMean(),
        torchmetrics.wrappers.MinMaxMetric(torchmetrics.wrappers.Running(inner)),
    ):
        task = type("Own", (), {"metrics": {"own": metric}})()
        with pytest.raises(TargetError) as error:
            StatefulMetrics(task, context)
        texts.append(str(error.value))
    return texts


def test_random_and_ordered_metrics_are_refused_by_name(rank_pool: RankPool) -> None:
    boot, running, mean, nested = rank_pool.run(refused)[0]
    assert "BootStrapper draws samples" in boot
    assert "Running depends on the order" in running
    assert "RunningMean depends on the order" in mean
    assert "Running depends on the order" in nested


def test_a_vector_beside_numbers_is_a_table() -> None:
    task = type("Own", (), {"metrics": {"recall": Recalls()}})()
    metrics = StatefulMetrics(task, cpu_context())
    metrics.update({"recall": (torch.tensor([1.0, 2.0, 3.0]),)})
    assert metrics.compute(cpu_context()) == {"recall/mean": 2.0}
    media: dict[str, Any] = metrics.media()
    assert media["recall/classes"].rows == [[0, 1.0], [1, 2.0], [2, 3.0]]
    assert media["recall/none"].rows == []
