"""What makes training faster or shows where its time goes: what is computed stays the same."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch

from tests.helpers import results

SHORT = ("logger=jsonl", "trainer.limit_test_batches=0", "trainer.limit_val_batches=1")
TWO = ("topology.procs_per_node=2", "trainer.max_steps=2")


def recorded_steps(trace: dict) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")}


@pytest.mark.multiproc
def test_the_profiler_writes_a_trace_of_some_steps_on_every_rank(train):
    pair = ("topology.procs_per_node=2", "trainer.max_steps=20")
    run_dir = train("recipe=toy", *SHORT, "trainer.profiler=pytorch", *pair)
    traces = sorted((run_dir / "profile").iterdir())
    assert [trace.name.split(".")[0] for trace in traces] == ["rank_0", "rank_1"]
    for trace in traces:
        content = json.loads(trace.read_text())
        assert recorded_steps(content) == {f"ProfilerStep#{step}" for step in range(12, 17)}
        assert any(event["name"] == "aten::addmm" for event in content["traceEvents"])
    assert f"Traces of the profiler are in {run_dir / 'profile'}" in results.log(run_dir)


@pytest.mark.exhaustive
def test_the_profilers_steps_can_be_chosen(train):
    chosen = ("callbacks=[profiler]", "callbacks.profiler.wait=1", "callbacks.profiler.warmup=1")
    run_dir = train("recipe=toy", *SHORT, *chosen, "trainer.max_steps=4")
    (trace,) = (run_dir / "profile").iterdir()
    assert recorded_steps(json.loads(trace.read_text())) >= {"ProfilerStep#2", "ProfilerStep#3"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_early_says_so_or_leaves_the_trace_of_its_last_steps(train, tmp_path, fails):
    (tmp_path / "falls.py").write_text(
        "class AtStep:\n"
        "    def on_train_step_end(self, report):\n"
        "        if report.step == 15:\n"
        "            raise RuntimeError('it fell')\n"
    )
    profiled = ("recipe=toy", *SHORT, "trainer.profiler=pytorch", "+callbacks.falls._target_=falls.AtStep")
    if not fails:
        run_dir = train(*profiled, "trainer.max_steps=4")
        assert not (run_dir / "profile").exists()
        assert "TorchProfiler recorded nothing: training ended before step 17" in results.log(run_dir)
        return
    run_dir = train(*profiled, "trainer.max_steps=20", status=1)
    (trace,) = (run_dir / "profile").iterdir()
    assert recorded_steps(json.loads(trace.read_text())) >= {"ProfilerStep#13", "ProfilerStep#14"}


@pytest.mark.exhaustive
def test_channels_last_gives_the_same_weights(train):
    steps = ("recipe=digits", *SHORT, "trainer.max_steps=5", "model.conv_dropout=0", "model.dropout=0")
    plain, changed = (results.weights(train(*steps, f"trainer.channels_last={value}")) for value in ("false", "true"))
    for name, weight in plain.items():
        torch.testing.assert_close(changed[name], weight, rtol=1e-4, atol=1e-5)


class WarningsAreErrors:
    """Makes every warning of a rank's training an error."""

    def on_fit_start(self, info):
        warnings.simplefilter("error")


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_ddp_takes_gradients_with_the_channels_last_as_they_are(train):
    """DDP warns where a gradient's strides differ from its bucket's: digits have one channel, and many strides fit."""
    strict = f"+callbacks.strict._target_={__name__}.WarningsAreErrors"
    train("recipe=digits", *SHORT, *TWO, "strategy=ddp", "checkpoint=none", "trainer.channels_last=true", strict)


@pytest.mark.exhaustive
def test_a_compiled_model_gives_the_same_weights_and_its_checkpoint_is_a_plain_one(train):
    steps = ("recipe=toy", *SHORT, "trainer.max_steps=5")
    compiled, plain = train(*steps, "trainer.compile=default"), train(*steps)
    for name, weight in results.weights(plain).items():
        torch.testing.assert_close(results.weights(compiled)[name], weight)
    resumed = train(f"resume={compiled}", "trainer.max_steps=7", "trainer.compile=null")
    assert results.results(resumed)["steps"] == 7


@pytest.mark.exhaustive
def test_the_memory_format_may_change_over_a_resume(train):
    steps = ("recipe=digits", *SHORT, "model.conv_dropout=0", "model.dropout=0", "scheduler=none")
    whole = train(*steps, "trainer.max_steps=8")
    stopped = train(*steps, "trainer.max_steps=4")
    resumed = train(f"resume={stopped}", "trainer.max_steps=8", "trainer.channels_last=true")
    for name, weight in results.weights(whole).items():
        torch.testing.assert_close(results.weights(resumed)[name], weight, rtol=1e-3, atol=1e-4)


class Cores:
    """Notes on which cores each rank may run when its training begins."""

    def __init__(self, *, context, run_dir):
        self.file = run_dir.path / f"cores_{context.rank}"

    def on_fit_start(self, info):
        self.file.write_text(json.dumps(sorted(os.sched_getaffinity(0))))


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_keep_to_cores_of_their_own(train):
    noted = f"+callbacks.cores._target_={__name__}.Cores"
    pair = ("recipe=toy", *SHORT, *TWO, noted)
    run_dir = train(*pair, "trainer.cpu_affinity=true")
    first, second = (set(json.loads((run_dir / f"cores_{rank}").read_text())) for rank in range(2))
    assert first
    assert second
    assert not first & second
    run_dir = train(*pair)
    assert set(json.loads((run_dir / "cores_1").read_text())) == os.sched_getaffinity(0)


@pytest.mark.multiproc
@pytest.mark.exhaustive
@pytest.mark.skipif(len(os.sched_getaffinity(0)) > 8, reason="needs more ranks than a test should start")
def test_processes_that_outnumber_the_cores_share_them(train):
    many = len(os.sched_getaffinity(0)) + 1
    noted = f"+callbacks.cores._target_={__name__}.Cores"
    run_dir = train("recipe=toy", *SHORT, *TWO, noted, "trainer.cpu_affinity=true", f"topology.procs_per_node={many}")
    assert f"there are fewer cores than the {many} processes" in results.log(run_dir)
    assert set(json.loads((run_dir / "cores_0").read_text())) == os.sched_getaffinity(0)
