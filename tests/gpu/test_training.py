"""Training on a GPU through the command: formats, compiled code, data, checkpoints, jobs.

Numbers are compared with those of the CPU, within what TF32 and another order of sums may change.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import cases
from tests.gpu.cases import RECORDED, on
from tests.helpers import results
from tests.helpers.command import run_framework

Run = Callable[..., Path]
CASES = cases.__name__
SHORT = ("logger=jsonl", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=0")
TOY = ("recipe=toy", *SHORT)
DIGITS = ("recipe=digits", *SHORT, "optimizer=sgd", "scheduler=none", "model.conv_dropout=0", "model.dropout=0")


def device_line(gpus: int) -> str:
    """Match what rank 0 says of its process: the GPU has a name, too."""
    return r"1 process, cuda:0 \(.+\), nccl, " if gpus else "1 process, cpu, gloo, "


def losses(run_dir: Path) -> list[float]:
    return list(results.curve(run_dir, "train/loss").values())


def peak_tflop_per_s(run_dir: Path) -> float | None:
    """The peak that `train/mfu` was computed with; None if the GPU's isn't known."""
    rows = [row for row in results.rows(run_dir) if "train/tflop_per_s" in row]
    assert rows
    last = rows[-1]
    return round(last["train/tflop_per_s"] / last["train/mfu"], 1) if "train/mfu" in last else None


def write_lightning_recipe(folder: Path, size: int = 200) -> None:
    """Make `recipe=lit` in a user's folder."""
    case = "tests.gpu.lightning_case"
    recipe = folder / "conf" / "recipe" / "lit.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - override /task: lightning\n"
        f"model: {{_target_: {case}.Classifier}}\n"
        "data:\n"
        "  datasets:\n"
        "    _target_: framework.tasks.lightning.datamodule\n"
        f"    module: {{_target_: {case}.Data, size: {size}}}\n"
        "trainer: {max_epochs: 2}\n"
    )


def records(run_dir: Path, *names: str) -> list[list[Any]]:
    """Return these entries of every step that the recorder wrote."""
    lines = (run_dir / "record" / "rank_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [list(map(row.get, names)) for row in rows]


@pytest.fixture(scope="module")
def digits_on_cpu(shared_run: Run) -> Path:
    """What the runs of ten steps are compared with."""
    return shared_run(*DIGITS, "trainer.max_steps=10")


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("32-true", torch.float32, 0.01),
        ("bf16-mixed", torch.float32, 0.05),
        ("bf16-true", torch.bfloat16, 0.2),
        ("16-mixed", torch.float32, 0.05),
    ],
)
def test_every_precision_trains_as_the_cpu_does(
    train: Run, gpus: int, digits_on_cpu: Path, precision: str, dtype: torch.dtype, tolerance: float
) -> None:
    run_dir = train(*DIGITS, on(gpus), "trainer.max_steps=10", f"trainer.precision={precision}")
    assert losses(run_dir) == pytest.approx(losses(digits_on_cpu), rel=tolerance, abs=tolerance)
    assert {tensor.dtype for tensor in results.weights(run_dir).values()} == {dtype}
    assert re.search(device_line(gpus), results.log(run_dir))


def test_in_the_commands_own_process(gpus: int, tmp_path: Path) -> None:
    place = ("launcher=in_process", "trainer.max_steps=10", "trainer.limit_test_batches=0", on(gpus))
    done = run_framework("recipe=toy", *place, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    assert results.run_file(run_dir)["status"] == "finished"
    assert re.search(device_line(gpus), done.stdout)


def test_an_overflow_skips_the_step_and_schedule(train: Run, gpus: int) -> None:
    schedule = ("scheduler=step", "scheduler.interval=step", "scheduler.schedule.step_size=1")
    task = (*cases.task("Overflowing"), "+task.step=3")
    run_dir = train(*TOY, on(gpus), *RECORDED, *schedule, *task, "trainer.precision=16-mixed", "trainer.max_steps=5")
    (one, two, three, four, five) = records(run_dir, "weights")
    assert one != two
    assert two == three
    assert three != four != five
    rates = list(results.curve(run_dir, "train/lr").values())
    # Step 4 has the rate of step 3, which was skipped.
    assert rates == pytest.approx([1e-3, 1e-4, 1e-5, 1e-5, 1e-6])
    assert all(map(math.isfinite, losses(run_dir)))
    assert results.saved(run_dir)["training"]["scaler"]["scale"] == 2.0**15


def test_channels_last(train: Run, gpus: int, digits_on_cpu: Path) -> None:
    run_dir = train(*DIGITS, on(gpus), "trainer.max_steps=10", "trainer.channels_last=true")
    assert losses(run_dir) == pytest.approx(losses(digits_on_cpu), rel=0.01, abs=0.01)


def test_activation_checkpointing_draws_the_same_again(train: Run, gpus: int) -> None:
    steps = ("recipe=digits", "trainer=deterministic", *SHORT, on(gpus), "trainer.max_steps=10")
    plain = train(*steps)
    recomputed = train(*steps, "trainer.activation_checkpointing=[Sequential]")
    assert losses(recomputed) == pytest.approx(losses(plain), rel=1e-3)


def test_keyword_calls_recompute_the_same_dropout(train: Run, gpus: int) -> None:
    """Another dropout in the recomputation would give other gradients, which no loss of that step shows."""
    model = (f"model._target_={CASES}.CallsByKeyword", "optimizer.lr=0.01")
    steps = ("recipe=toy", "trainer=deterministic", *SHORT, on(gpus), *model, "trainer.max_steps=20")
    plain = train(*steps)
    recomputed = train(*steps, "trainer.activation_checkpointing=[Block]")
    results.assert_same(results.weights(recomputed), results.weights(plain), tolerance=1e-6)


@pytest.mark.parametrize("allows", [f"model._target_={CASES}.AllowsTf32", "trainer.matmul_precision=high"])
def test_tf32_is_allowed_by_model_or_key(train: Run, gpus: int, allows: str) -> None:
    """The peak that `train/mfu` is a share of is TF32's, if the GPU is known."""
    steps = (*TOY, on(gpus), "trainer.max_steps=10")
    plain = train(*steps)
    allowed = train(*steps, allows)
    assert losses(allowed) == pytest.approx(losses(plain), rel=0.01)
    if gpus and peak_tflop_per_s(plain) is not None:
        assert peak_tflop_per_s(allowed) != peak_tflop_per_s(plain)


def test_a_loss_with_tensors_of_its_own(train: Run, gpus: int) -> None:
    weighted = (f"task.loss._target_={CASES}.weighted_loss", "trainer.max_steps=3")
    assert len(losses(train(*DIGITS, on(gpus), *weighted))) == 3


@pytest.mark.parametrize(
    "what",
    [
        "recipe=toy data.datasets.num_samples=20000",
        "recipe=toy data.datasets.num_samples=20000 data.loader=dataloader data.num_workers=0",
        "recipe=toy data.datasets.num_samples=20000 trainer.precision=bf16-mixed callbacks=ema optimizer=adam"
        " trainer.gradient_clip_val=1 trainer.accumulate_grad_batches=2",
        f"recipe=toy data.datasets.num_samples=20000 {' '.join(cases.task('WeighedByNumber'))}",
    ],
    ids=["resident", "loaded", "bf16-mixed", "weighted by a number"],
)
def test_no_step_between_logs_waits_for_the_gpu(train: Run, gpus: int, what: str, tmp_path: Path) -> None:
    quiet = (f"+callbacks.quiet._target_={CASES}.Quiet", "+callbacks.quiet.every=100")
    train(*what.split(), *quiet, on(gpus), "trainer.log_every_n_steps=100", "trainer.max_steps=300")
    assert json.loads((tmp_path / "guarded.json").read_text()) == 278


def test_memory_and_utilization_are_logged(train: Run, gpus: int) -> None:
    busy = f"+callbacks.busy._target_={CASES}.Busy"
    run_dir = train(*TOY, on(gpus), busy, "trainer.max_steps=100")
    rows = [row for row in results.rows(run_dir) if any(name.startswith("device/") for name in row)]
    assert rows
    for row in rows:
        assert 0.05 < row["device/memory_gb"] < 10
        assert ("device/utilization" in row) == bool(gpus)
    if gpus:
        assert max(row["device/utilization"] for row in rows) > 0.3


def test_the_profiler_sees_kernels(train: Run, gpus: int) -> None:
    run_dir = train(*TOY, on(gpus), "trainer.profiler=pytorch", "trainer.max_steps=20")
    (trace,) = (run_dir / "profile").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(event["name"] == "aten::addmm" for event in events)
    assert any(event.get("cat") == "kernel" for event in events) == bool(gpus)


def test_a_run_resumes_on_either_device(train: Run, gpus: int) -> None:
    steps = ("recipe=digits", *SHORT, "scheduler=none", "trainer=deterministic", "callbacks=ema")
    whole = train(*steps, on(gpus), "trainer.max_steps=12")
    stopped = train(*steps, on(gpus), "trainer.max_steps=6")
    resumed = train(f"resume={stopped}", on(gpus), "trainer.max_steps=12")
    results.assert_same(results.weights(resumed), results.weights(whole))
    # Without a GPU, they are the same.
    for first, second in {(gpus, 0), (0, gpus)}:
        plain = (*DIGITS, "trainer.log_every_n_steps=2")
        stopped = train(*plain, on(first), "trainer.max_steps=6")
        resumed = train(f"resume={stopped}", on(second), "trainer.max_steps=12")
        alone = train(*plain, on(first), "trainer.max_steps=12")
        assert losses(resumed) == pytest.approx(losses(alone), rel=0.02)


def test_a_run_in_16_mixed_resumes_exactly(train: Run, gpus: int) -> None:
    """The loss scale, which an overflow has lowered, is restored as well."""
    task = (*cases.task("Overflowing"), "+task.step=3")
    steps = (*TOY, *task, "trainer=deterministic", "trainer.precision=16-mixed", "optimizer=adam", on(gpus))
    whole = train(*steps, "trainer.max_steps=8")
    stopped = train(*steps, "trainer.max_steps=4")
    resumed = train(f"resume={stopped}", on(gpus), "trainer.max_steps=8")
    results.assert_same(results.weights(resumed), results.weights(whole))
    scalers = [results.saved(run_dir)["training"]["scaler"] for run_dir in (resumed, whole)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] == 2.0**15


def test_saving_while_training_goes_on_saves_that_moment(train: Run, gpus: int) -> None:
    saving = ("checkpoint.every_n_steps=3", "checkpoint.save_top_k=-1", "trainer.max_steps=24", "trainer=deterministic")
    runs = [
        train("recipe=digits", *SHORT, on(gpus), "optimizer=adam", *saving, f"checkpoint.asynchronous={value}")
        for value in ("true", "false")
    ]
    assert results.saved_steps(runs[0])[:4] == [3, 6, 9, 12]
    for step in (3, 12, 24):
        beside, waited = (results.saved(run_dir, f"step_{step:08d}") for run_dir in runs)
        results.assert_same(beside["model"], waited["model"])
        for name, kept in waited["training"]["optimizer"]["state"][0].items():
            assert torch.equal(beside["training"]["optimizer"]["state"][0][name], kept)


def test_evaluating_predicting_and_exporting(
    train: Run, command: Callable[..., int], gpus: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = train("recipe=digits", "logger=jsonl", on(gpus), "trainer.max_epochs=1")
    (of_test,) = results.curve(trained, "test/loss").values()
    checkpoint = f"checkpoint.path={trained / 'checkpoints' / 'best'}"
    capfd.readouterr()
    assert command("job=eval", "recipe=digits", checkpoint, on(gpus)) == 0
    shown = re.search(r"test/loss +([0-9.]+)", capfd.readouterr().out)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(of_test, rel=1e-3, abs=1e-4)
    assert command("job=predict", "recipe=digits", checkpoint, on(gpus), "predict.output=said.csv") == 0
    # The first line names the columns.
    assert len((tmp_path / "said.csv").read_text().splitlines()) == 361
    assert command("job=export", checkpoint, "export.format=torch_export", "export.output=net.pt2") == 0
    exported = torch.export.load(tmp_path / "net.pt2").module()
    assert exported(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_fsdp_with_one_rank(train: Run, gpus: int, digits_on_cpu: Path) -> None:
    # Offloading needs a GPU.
    offloads = ("false", "true") if gpus else ("false",)
    for offload in offloads:
        fsdp = ("strategy=fsdp", f"strategy.cpu_offload={offload}", "strategy.min_num_params=1000")
        run_dir = train(*DIGITS, on(gpus), *fsdp, "trainer.max_steps=10")
        assert losses(run_dir) == pytest.approx(losses(digits_on_cpu), rel=0.01, abs=0.01)


def test_ddp_knows_the_gpu_of_its_replica(train: Run, gpus: int, tmp_path: Path) -> None:
    ddp = (f"strategy={{_target_: {CASES}.NotedDDP}}", "trainer.max_steps=2")
    train("recipe=toy", *ddp, on(gpus))
    assert json.loads((tmp_path / "device_ids.json").read_text()) == ([0] if gpus else None)
    spread = ("recipe=toy_model_parallel", "topology.gpus_per_process=2", f"topology.share_gpus={bool(gpus)}")
    # Both ranks share the one GPU.
    train(*spread, *ddp, on(gpus))
    assert json.loads((tmp_path / "device_ids.json").read_text()) is None


def test_a_model_over_a_gpu_and_the_cpu(train: Run, gpus: int) -> None:
    steps = (*TOY, "trainer.max_steps=10")
    halves = train(*steps, on(gpus), f"model._target_={CASES}.HalfOnCpu")
    assert losses(halves) == pytest.approx(losses(train(*steps)), rel=1e-3)


@pytest.mark.multiproc
def test_two_processes_share_a_gpu(train: Run, gpus: int) -> None:
    steps = (*TOY, "data.global_batch_size=20", "trainer.max_steps=10")
    pair = ("topology.procs_per_node=2", "topology.gpus_per_process=1", f"topology.share_gpus={bool(gpus)}")
    shared = train(*steps, on(gpus), *pair)
    assert losses(shared) == pytest.approx(losses(train(*steps)), rel=1e-3)
    assert ", gloo, " in results.log(shared)


@pytest.mark.multiproc
def test_one_process_and_two_compare_equal(
    command: Callable[..., int], gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pair = ("parity.processes=2", "topology.gpus_per_process=1", f"topology.share_gpus={bool(gpus)}")
    assert command("job=parity", "recipe=toy", on(gpus), *pair) == 0
    assert "The same: " in capfd.readouterr().out


def test_a_lightning_module_that_logs(on_both: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    write_lightning_recipe(tmp_path)
    there, here = on_both("recipe=lit", "logger=jsonl", "trainer.log_every_n_steps=1")
    for name in ("train/loss", "train/scale", "val/loss", "val/acc"):
        expected = list(results.curve(here, name).values())
        assert list(results.curve(there, name).values()) == pytest.approx(expected, rel=0.01, abs=0.01)


def test_lightning_logging_does_not_wait_for_the_gpu(train: Run, gpus: int, tmp_path: Path) -> None:
    write_lightning_recipe(tmp_path, size=10_000)
    quiet = (f"+callbacks.quiet._target_={CASES}.Quiet", "+callbacks.quiet.every=100")
    train("recipe=lit", on(gpus), *quiet, "trainer.log_every_n_steps=100", "trainer.max_steps=300")
    assert json.loads((tmp_path / "guarded.json").read_text()) == 278


@pytest.mark.timeout(300)
def test_tune_finds_the_batch_by_running_out(train: Run, gpus: int) -> None:
    hungry = (f"model._target_={CASES}.Hungry", "tune.find_lr=false", "tune.margin=0.9", "tune.max_batch_size=512")
    run_dir = train("job=tune", "recipe=toy", on(gpus), *hungry)
    found = json.loads((run_dir / "tune.json").read_text())["batch_size"]
    refused = [trial for trial in found["trials"] if not trial["fits"]]
    if gpus:
        assert 10 <= found["batch_size"] <= 40
        assert refused
    else:
        assert (found["batch_size"], refused) == (512, [])


def test_preflight_and_plan_know_the_gpu(
    train: Run, command: Callable[..., int], gpus: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = train("job=preflight", "recipe=toy", on(gpus), f"preflight.seconds={2 if gpus else 0.1}")
    found = json.loads((run_dir / "preflight.json").read_text())
    (rank,) = found["ranks"]
    assert found["passed"]
    assert rank["matmul"][0]["device"] == ("cuda:0" if gpus else "cpu")
    assert (rank["driver"] is not None) == bool(gpus)
    capfd.readouterr()
    assert command("job=plan", "recipe=toy", "plan.format=json") == 0
    planned = json.loads(capfd.readouterr().out)["topology"]["gpus_per_node"]
    assert planned == torch.cuda.device_count() or not gpus
