"""Compiled models on a GPU, with and without CUDA graphs. They take longest, so they run last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import cases
from tests.helpers import results

pytestmark = pytest.mark.timeout(300)

TOY = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "checkpoint.monitor=null")
WITH_LOSS = (f"model._target_={cases.__name__}.WithLoss", *cases.task("TakesItsLoss"))


def models(gpus: int) -> list[tuple[str, ...]]:
    """Return the overrides of each model. A CPU captures nothing that the toy's own would show."""
    return [(), WITH_LOSS] if gpus else [WITH_LOSS]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_give_the_same_losses(train: Callable[..., Path], gpus: int, mode: str) -> None:
    """The second model ends in its loss, which a CUDA graph overwrites in the next step; it is logged after ten."""
    if mode == "reduce-overhead" and gpus == 0:
        pytest.skip("on a CPU, nothing is captured: it compiles as the default does")
    length = ("trainer.max_steps=40", "trainer.log_every_n_steps=10", "trainer.limit_val_batches=1")
    for model in models(gpus):
        plain = train(*TOY, *length, *model, f"trainer.gpus={gpus}")
        compiled = train(*TOY, *length, *model, f"trainer.gpus={gpus}", f"trainer.compile={mode}")
        expected = results.curve(plain, "train/loss")
        assert results.curve(compiled, "train/loss") == pytest.approx(expected, rel=1e-3)


def test_validating_after_every_step_changes_no_captured_graph(train: Callable[..., Path], gpus: int) -> None:
    """Graphs of training and of validation take turns, and there are several batches in each validation."""
    length = ("trainer.max_steps=12", "trainer.log_every_n_steps=1", "trainer.val_check_interval=1")
    sizes = ("data.eval_batch_size=50", "trainer.limit_val_batches=3", "trainer.num_sanity_val_steps=2")
    for model in models(gpus):
        plain = train(*TOY, *length, *sizes, *model, f"trainer.gpus={gpus}")
        compiled = train(*TOY, *length, *sizes, *model, f"trainer.gpus={gpus}", "trainer.compile=reduce-overhead")
        for name in ("train/loss", "val/loss"):
            found = results.curve(compiled, name)
            assert len(found) == 12
            assert found == pytest.approx(results.curve(plain, name), rel=1e-3)
