"""The same seed gives the same numbers bit for bit, another seed others; `deterministic` reaches every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import results

TOY = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.max_epochs=1",
    "trainer.limit_test_batches=0",
    "trainer.log_every_n_steps=10",
)
DIGITS = ("recipe=digits", "logger=jsonl", "trainer.max_steps=3", "trainer.limit_test_batches=0")
WATCHER = '''
import json, os
from pathlib import Path
import torch

class Watcher:
    """Writes down what the rank's switches are when training starts."""
    def on_fit_start(self, info):
        seen = [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
                torch.backends.cudnn.benchmark, torch.get_num_threads()]
        Path(f"seen_{os.environ['RANK']}").write_text(json.dumps(seen))
'''


def same(one: Path, other: Path) -> bool:
    """Everything a checkpoint holds of weights, and the losses on the way."""
    curves = [results.curve(run_dir, "train/loss") for run_dir in (one, other)]
    return curves[0] == curves[1] and not results.differ(results.weights(one), results.weights(other))


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=pytest.mark.multiproc)])
def test_a_seed_repeats_and_another_one_differs(train, procs):
    overrides = (*TOY, f"topology.procs_per_node={procs}")
    one, again, other = train(*overrides, "seed=3"), train(*overrides, "seed=3"), train(*overrides, "seed=4")
    assert same(one, again)
    assert not same(one, other)
    first = [results.curve(run_dir, "train/loss")[10] for run_dir in (one, other)]
    assert first[0] != pytest.approx(first[1], rel=1e-3)


def test_deterministic_mode_repeats_with_dropout_and_convolutions(train):
    one, again = train(*DIGITS, "trainer=deterministic"), train(*DIGITS, "trainer=deterministic")
    assert same(one, again)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("overrides", "seen"),
    [
        (("trainer=deterministic", "trainer.num_threads=3"), [True, True, False, 3]),
        (("trainer.benchmark=false", "trainer.num_threads=1"), [False, False, False, 1]),
        (("trainer.num_threads=1",), [False, False, True, 1]),
    ],
)
def test_the_switches_are_set_on_every_rank(train, tmp_path, overrides, seen):
    (tmp_path / "watcher.py").write_text(WATCHER)
    watch = ("+callbacks.watcher._target_=watcher.Watcher", "topology.procs_per_node=2", "trainer.max_steps=1")
    train("recipe=toy", "logger=none", "checkpoint=none", *watch, *overrides)
    for rank in range(2):
        assert json.loads((tmp_path / f"seen_{rank}").read_text()) == seen
