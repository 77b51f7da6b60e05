"""A run with a slow rank: what the terminal, run.json, metrics.jsonl and TensorBoard say of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2

from tests.helpers import results

YAML = """# @package _global_
defaults:
  - override /task: regression
model: {_target_: tests.helpers.naps.sleepy}
data: {datasets: {_target_: tests.helpers.naps.datasets, size: 4000}, batch_size: 4, num_workers: 0}
trainer: {max_steps: 95, log_every_n_steps: 16, num_threads: 1}
checkpoint: {monitor: null}
callbacks:
  naps: {_target_: tests.helpers.naps.observer}
"""


@pytest.mark.multiproc
def test_it_is_named_at_once_and_at_the_end_in_words_numbers_and_charts(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "sleepy.yaml").write_text(YAML)
    monkeypatch.setenv("NAPS", "data:1:0.02")
    monkeypatch.setenv("NAPS_USUAL", "0.02")
    run = train("recipe=sleepy", "topology.procs_per_node=2")

    (slow,) = results.results(run)["slow_ranks"]
    assert (slow["rank"], slow["kind"], slow["throughout"]) == (1, "data", True)
    assert slow["place"] == f"{socket.gethostname()}, cpu"
    assert 0.1 < slow["share"] < 0.6
    told = f"rank 1 ({slow['place']}) is {slow['share'] * 100:.0f} % slower in data"
    assert f"\n  {told}\n" in capfd.readouterr().out
    begins = f"Rank 1 ({slow['place']}) is "
    log = results.log(run)
    assert (log.count(f"WARNING {begins}"), log.count(f"\n{begins}")) == (1, 1)  # recorded, and printed

    events = results.events(run)
    names = {"time/data", "time/waiting", "skew/worst", "skew/slowest_rank", "skew/rank_0", "skew/rank_1"}
    assert names <= set(events.Tags()["scalars"])
    assert set(results.curve(run, "skew/slowest_rank").values()) == {1.0}
    assert begins in events.Tensors("slow_rank/text_summary")[0].tensor_proto.string_val[0].decode()
    (charts,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(charts.tensor_proto.string_val[0])
    assert [chart.multiline.tag for category in layout.category for chart in category.chart] == [
        ["skew/(worst|rank_\\d+)"],
        ["time/.*"],
    ]
