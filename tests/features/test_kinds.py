"""Each kind of training that docs/kinds.md shows runs as it is shown, and gives the same numbers on two processes."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from tests.helpers import results
from tests.helpers.documents import shown_files, write_shown_files
from tests.helpers.source import ROOT

pytestmark = pytest.mark.multiproc

PAGE = ROOT / "docs/kinds.md"
PRELOADED = ("sklearn.datasets", "torchvision.models.detection", "torchmetrics.detection")
KINDS = [name for file in shown_files(PAGE.read_text()) for name in re.findall(r"conf/recipe/(\w+)\.yaml", file)]
SHORT = (
    "logger=jsonl",
    "data.global_batch_size=16",
    "trainer.precision=64-true",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=4",
    "trainer.limit_test_batches=0",
    "checkpoint.monitor=null",
    "data.num_workers=0",
)


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS[1:])])
def test_a_shown_kind_does_not_depend_on_processes(train, tmp_path, kind):
    if kind == "boxes" and importlib.util.find_spec("pycocotools") is None:
        pytest.skip("pycocotools isn't installed")
    write_shown_files(tmp_path, pages=[PAGE])
    one = train(f"recipe={kind}", *SHORT)
    two = train(f"recipe={kind}", *SHORT, "topology.procs_per_node=2")
    assert results.results(one)["steps"] == 4
    weights = results.weights(one)
    results.assert_same(results.weights(two), weights, tolerance=1e-9)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert results.metrics(two) == pytest.approx(results.metrics(one), rel=1e-6, nan_ok=True)
    if kind == "boxes":
        # A detector has no loss in evaluation.
        assert "val/loss" not in results.metrics(one)


def test_a_rollout_resumes_exactly(train, tmp_path):
    """It is used in the steps before and after."""
    write_shown_files(tmp_path, pages=[PAGE])
    whole = train("recipe=ppo", *SHORT, "trainer.max_steps=4")
    stopped = train("recipe=ppo", *SHORT, "trainer.max_steps=2")
    resumed = train(f"resume={stopped}", "trainer.max_steps=4")
    results.assert_same(results.weights(resumed), results.weights(whole))


def test_a_momentum_encoder_resumes_exactly(train, tmp_path):
    write_shown_files(tmp_path, pages=[PAGE])
    whole = train("recipe=momentum", *SHORT, "trainer.max_steps=4")
    stopped = train("recipe=momentum", *SHORT, "trainer.max_steps=2")
    resumed = train(f"resume={stopped}", "trainer.max_steps=4")
    results.assert_same(results.weights(resumed), results.weights(whole))
    results.assert_same(results.saved(resumed)["training"]["task"], results.saved(whole)["training"]["task"])
