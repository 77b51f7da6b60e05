"""The same seed gives the same numbers bit for bit, another seed others; `deterministic` reaches every rank."""

from __future__ import annotations

import json

import pytest

from tests.helpers import results

DIGITS = ("recipe=digits", "logger=jsonl", "trainer.max_steps=3", "trainer.val_check_interval=3")
DETERMINISTIC = (*DIGITS, "trainer=deterministic", "trainer.limit_test_batches=0")
TWO = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.max_steps=10",
    "trainer.val_check_interval=10",
    "topology.procs_per_node=2",
)
WATCHER = '''
import json, os
from pathlib import Path
import torch

class Watcher:
    """Writes down the rank's switches when training starts, and the next random number."""
    def on_fit_start(self, info):
        seen = [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark, torch.get_num_threads()]
        Path(f"seen_{os.environ['RANK']}").write_text(json.dumps([seen, torch.rand(()).item()]))
'''


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(TWO, marks=pytest.mark.multiproc),
        # With dropout and convolutions. The switch has torch load its compiler, for seconds.
        pytest.param(DETERMINISTIC, marks=pytest.mark.exhaustive),
    ],
    ids=["two processes", "deterministic"],
)
def test_a_seed_repeats_and_another_one_differs(train, overrides):
    one = train(*overrides, "seed=3")
    again = train(*overrides, "seed=3")
    other = train(*overrides, "seed=4")
    assert not results.differ(results.weights(one), results.weights(again))
    losses = [results.metrics(run_dir) for run_dir in (one, again, other)]
    assert losses[0] == losses[1]
    assert results.differ(results.weights(one), results.weights(other))
    assert losses[0] != losses[2]


@pytest.mark.multiproc
def test_ranks_share_switches_and_draw_different_numbers(train, tmp_path):
    (tmp_path / "watcher.py").write_text(WATCHER)
    watch = ("+callbacks.watcher._target_=watcher.Watcher", "topology.procs_per_node=2", "trainer.max_steps=1")
    train("recipe=toy", "logger=none", "checkpoint=none", *watch, "trainer.benchmark=false", "trainer.num_threads=1")
    switches, draws = zip(*(json.loads((tmp_path / f"seen_{rank}").read_text()) for rank in range(2)), strict=True)
    assert switches == ([False, False, False, 1],) * 2
    assert len(set(draws)) == 2
