"""A run with a slow rank: what the terminal, run.json, metrics.jsonl and TensorBoard show of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.helpers import results

SLEEPY = """
import os, time
from recipes.toy import toy_regression
from framework import Datasets

class Sleepy:
    \"\"\"Takes so long on rank 1 that other load on the machine doesn't matter.\"\"\"
    def __init__(self): self.data = toy_regression().train
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        time.sleep(0.1 * (os.environ["RANK"] == "1"))
        return self.data[index]

def datasets(num_samples, seed): return Datasets(train=Sleepy())
"""
SHORT = ("trainer.max_steps=42", "trainer.log_every_n_steps=6", "data.global_batch_size=2", "checkpoint=none")


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_a_slow_rank_is_named_and_charted(train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    data = ("data.datasets._target_=sleepy.datasets", "data.num_workers=0", "logger=[console,jsonl,tensorboard]")
    run = train("recipe=toy", "topology.procs_per_node=2", *SHORT, *data)

    # The slowest rank comes first.
    slow = results.results(run)["slow_ranks"][0]
    assert (slow["rank"], slow["kind"], slow["throughout"]) == (1, "data", True)
    assert slow["place"] == f"{socket.gethostname()}, cpu"
    assert f"\n  rank 1 ({slow['place']}) is {slow['share'] * 100:.0f} % slower in data\n" in capfd.readouterr().out
    begins = f"Rank 1 ({slow['place']}) is "
    log = results.log(run)
    # The warning is recorded once and printed once.
    assert (log.count(f"WARNING {begins}"), log.count(f"\n{begins}")) == (1, 1)

    events = results.events(run)
    names = {"time/data", "time/waiting", "skew/worst", "skew/slowest_rank", "skew/rank_0", "skew/rank_1"}
    assert names <= set(events.Tags()["scalars"])
    assert set(results.curve(run, "skew/slowest_rank").values()) == {1.0}
    assert begins in events.Tensors("slow_rank/text_summary")[0].tensor_proto.string_val[0].decode()
    charts = events.Tensors("custom_scalars__config__")[-1]
    layout = layout_pb2.Layout.FromString(charts.tensor_proto.string_val[0])
    tags = set()
    for category in layout.category:
        tags |= {chart.multiline.tag[0] for chart in category.chart}
    assert {"time/", "skew/(worst|rank_\\d+)$", "device/memory_gb"} <= tags
