"""Under a real SLURM of two nodes: srun's tasks are the ranks, and what SLURM sends stops them with a checkpoint."""

from __future__ import annotations

import csv
import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers import results, trouble
from tests.helpers.command import Started, run_framework
from tests.helpers.internals import quoted
from tests.helpers.requirements import require
from tests.helpers.slurm import Cluster, cluster
from tests.helpers.trouble import Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300), pytest.mark.exhaustive]

FRAMEWORK = (sys.executable, "-m", "framework", "trainer.gpus=0")
# Every task loads torch by itself, on few cores.
START_S = 120.0
TIMEOUT_S = 6.0
REPORT_S = 60.0
PAUSE_S = 0.05
LONG = ("trainer.max_steps=100000", "trainer.val_check_interval=1000", "checkpoint.every_n_steps=1000")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes, for all tests here."""
    require("slurm")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def wait_for_step(folder: Path, *, outputs: str = "outputs") -> None:
    """Return once the first metrics are written: training is on its way."""
    deadline = time.monotonic() + START_S
    while not any(file.stat().st_size for file in folder.glob(f"{outputs}/trouble/*/metrics.jsonl")):
        assert time.monotonic() < deadline, "\n".join(file.read_text() for file in folder.glob("*.out"))
        time.sleep(0.05)


@pytest.mark.parametrize("where", [("--nodes=2", "--ntasks-per-node=2"), ("--nodes=1", "--ntasks=4")])
def test_srun_tasks_equal_one_command(
    slurm: Cluster, shared_run: Callable[..., Path], tmp_path: Path, where: tuple[str, ...]
) -> None:
    result = slurm.srun(*where, *FRAMEWORK, "recipe=toy", "trainer.max_epochs=2", cwd=tmp_path, timeout=START_S)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    alone = shared_run("recipe=toy", "launcher=local", "topology.procs_per_node=4", "trainer.max_epochs=2")
    results.assert_same(results.weights(run_dir), results.weights(alone))
    logs = {file.name for file in (run_dir / "logs").glob("rank_*.log")}
    assert logs == {"rank_0.log", "rank_1.log", "rank_2.log", "rank_3.log"}
    assert results.run_file(run_dir)["status"] == "finished"
    assert result.stdout.count("Finished toy") == 1


def test_a_preflight_of_the_tasks_precedes_training(slurm: Cluster, tmp_path: Path) -> None:
    where = ("--nodes=2", "--ntasks-per-node=2")
    small = ("preflight=true", "preflight.max_bytes=65536")
    command = (*FRAMEWORK, "recipe=toy", "trainer.max_epochs=1", *small)
    result = slurm.srun(*where, *command, cwd=tmp_path, timeout=START_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Preflight passed in ") == 1
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    found = json.loads((run_dir / "preflight.json").read_text())
    hosts = [(rank["host"], rank["node"]) for rank in found["ranks"]]
    assert hosts == [("host1", 0), ("host1", 0), ("host2", 1), ("host2", 1)]
    assert sorted(link["ranks"] for link in found["links"]) == [[0, 1], [0, 2], [1, 3], [2, 3]]


SUBMIT = (sys.executable, "-m", "framework", "job=submit", "submit.format=slurm", "trainer.gpus=0")


def test_a_submitted_job_is_requeued_and_resumes(slurm: Cluster, tmp_path: Path) -> None:
    """SIGUSR1 comes by hand instead of near the end of its time."""
    steps = 100
    odd = 'it\'s "50 %" of $HOME\nänd `more`'
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    where = ("topology.nnodes=2", "topology.procs_per_node=2")
    options = ("submit.slurm={partition: all, time: '1:00:00'}", "submit.slurm.output=job.out")
    training = ("recipe=trouble", f"trainer.max_steps={steps}", f"tags=[{quoted(odd)}]")
    with slurm.started(*SUBMIT, *where, *options, *training, cwd=tmp_path) as submitted:
        assert submitted.wait(timeout=START_S) == 0, submitted.printed()
        assert re.fullmatch(r"Submitted trouble: SLURM job \d+", submitted.stdout().strip())
        wait_for_step(tmp_path, outputs="outputs/job_*")
        slurm.scancel("--signal=USR1", "--name=trouble")
        slurm.wait_for_jobs(timeout=2 * START_S)
    printed = (tmp_path / "job.out").read_text()
    (run_dir,) = tmp_path.glob("outputs/job_*/trouble/*")
    assert "SIGUSR1" in printed
    # srun puts tasks that end at about the same time in one line.
    assert re.search(r"host2: tasks? \S+: Exited with exit code 75", printed)
    assert "Finished trouble after" in printed
    assert results.pointed(run_dir, "last") == steps
    assert results.run_file(run_dir)["status"] == "finished"
    assert results.run_file(run_dir)["tags"] == [odd]


def test_what_slurm_refuses_is_reported(slurm: Cluster, tmp_path: Path) -> None:
    refused = slurm.run(*SUBMIT, "recipe=toy", "submit.slurm.partition=nowhere", cwd=tmp_path, timeout=START_S)
    assert refused.returncode == 1
    assert refused.stderr.startswith("sbatch has failed with status 1: sbatch: error: invalid partition specified")
    assert not list(tmp_path.iterdir())


KILLS = 6
TRIALS = 12
SWEEP = (
    "recipe=trouble",
    "trainer.gpus=0",
    f"seed=range({TRIALS})",
    "trainer.max_steps=60",
    "trainer.val_check_interval=20",
    "checkpoint.every_n_steps=5",
    "checkpoint.monitor=val/loss",
)


@pytest.mark.timeout(600)
def test_a_submitted_array_of_workers_survives_kills(slurm: Cluster, tmp_path: Path) -> None:
    """At random moments a worker is killed with all that it runs, and requeued, as if its node had failed.

    Another one is signalled as near the end of its time, and the script itself requeues it.
    """
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    array = ("submit.slurm.array=0-2", "submit.slurm.job_name=sweep")
    choose = random.Random(0)
    with slurm.started(*SUBMIT, "-m", *SWEEP, "sweep.jobs=1", *array, cwd=tmp_path) as submitted:
        assert submitted.wait(timeout=START_S) == 0, submitted.printed()
        (sweep,) = (tmp_path / "outputs" / "multirun").iterdir()
        number = submitted.stdout().split()[-1]
        task = choose.choice(wait_for_training(tmp_path))
        slurm.scancel("--signal=USR1", f"{number}_{task}")
        for _ in range(KILLS):
            time.sleep(choose.uniform(0.0, 3.0))
            task = choose.choice(wait_for_training(tmp_path))
            time.sleep(choose.uniform(0.0, 1.0))
            kill_worker(submitted, task)
            slurm.requeue(f"{number}_{task}")
        slurm.wait_for_jobs(timeout=2 * START_S)
    printed = "\n".join(file.read_text() for file in tmp_path.glob("slurm-*.out"))
    assert "Exited with exit code 75" in printed
    assert f"{TRIALS} trials: {TRIALS} finished" in printed, printed
    assert_same_sweep(sweep, undisturbed_sweep(tmp_path / "undisturbed"))


def undisturbed_sweep(folder: Path) -> Path:
    folder.mkdir()
    trouble.write_recipe(folder, Fault())
    result = run_framework("-m", *SWEEP, cwd=folder, timeout=2 * START_S)
    assert result.returncode == 0, result.stderr
    (sweep,) = (folder / "outputs" / "multirun").iterdir()
    return sweep


def assert_same_sweep(sweep: Path, undisturbed: Path) -> None:
    assert table_of(sweep) == table_of(undisturbed)
    for number in range(TRIALS):
        run_dir = sweep / str(number)
        alone = undisturbed / str(number)
        results.assert_same(results.weights(run_dir), results.weights(alone))
        assert results.curve(run_dir, "val/loss") == results.curve(alone, "val/loss")


def table_of(sweep: Path) -> list[tuple[str, ...]]:
    lines = csv.DictReader((sweep / "results.csv").read_text().splitlines())
    return [(line["trial"], line["status"], line["val/loss"], line["step"]) for line in lines]


def wait_for_training(folder: Path) -> list[str]:
    """Return the tasks of the array that train at the moment, as soon as there are any."""
    deadline = time.monotonic() + START_S
    while True:
        printed = {file.stem.partition("_")[2]: file.read_text() for file in folder.glob("slurm-*_*.out")}
        tasks = [task for task, text in printed.items() if text.rstrip().endswith("running")]
        if tasks:
            return sorted(tasks)
        assert time.monotonic() < deadline, printed
        time.sleep(0.05)


def kill_worker(submitted: Started, task: str) -> None:
    """Kill all processes that a task's worker has started, and itself; SLURM's own live on.

    They have the mark of the command that submitted the array.
    """
    for process in submitted.processes():
        with suppress(psutil.Error):
            is_worker = process.name().startswith("python")
            if is_worker and process.environ().get("SLURM_ARRAY_TASK_ID") == task:
                process.kill()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signalled_step_stops_with_a_checkpoint(slurm: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    """`sbatch --signal=USR1@90` and a preemption send this signal."""
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    command = ("srun", "--nodes=2", "--ntasks-per-node=2", "--job-name=stopped", *FRAMEWORK)
    with slurm.started(*command, "recipe=trouble", *LONG, cwd=tmp_path) as started:
        wait_for_step(tmp_path)
        slurm.scancel(f"--signal={number.name.removeprefix('SIG')}", "--name=stopped")
        assert started.wait(timeout=REPORT_S) == 75, started.printed()
        started.assert_all_gone()
        assert "Traceback" not in started.stderr()
    run_dir = trouble.run_dir(tmp_path)
    assert len(results.saved_steps(run_dir)) == 1
    assert not list(run_dir.glob("failure*.json"))


@pytest.mark.parametrize(("what", "rank", "kind"), [("SIGKILL", 0, "exit"), ("raise", 3, "exception")])
def test_a_task_that_dies_is_reported(slurm: Cluster, tmp_path: Path, what: str, rank: int, kind: str) -> None:
    """Only SLURM knows how another task ended; any task of its node sees that it did, and where it was."""
    trouble.write_recipe(tmp_path, Fault(what, rank=rank, phase="backward", step=5))
    overrides = ("recipe=trouble", f"backend.timeout={TIMEOUT_S}")
    where = ("--nodes=2", "--ntasks-per-node=2")
    result = slurm.srun(*where, *FRAMEWORK, *overrides, cwd=tmp_path, timeout=START_S + TIMEOUT_S + REPORT_S)
    assert result.returncode != 0
    file = trouble.run_dir(tmp_path) / "failure.json"
    assert file.exists(), result.stderr
    report = json.loads(file.read_text())
    done = trouble.done(tmp_path)
    assert done is not None
    first = report["first"]
    assert (first["rank"], first["pid"], first["kind"]) == (rank, done["pid"], kind), result.stderr
    assert (first["node"], first["host"]) == (rank // 2, f"host{rank // 2 + 1}")
    assert f"Rank {rank} of 4 (pid {done['pid']}) failed first" in result.stderr
    how = "Killed" if what == "SIGKILL" else "Exited"
    # srun may write several tasks as "tasks 2-3".
    assert re.search(rf"host{rank // 2 + 1}: tasks? ([\d,-]*\b)?{rank}: {how}", result.stderr)
