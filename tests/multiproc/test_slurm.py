"""Under a real SLURM of two nodes: srun's tasks are the ranks, and what SLURM sends stops them with a checkpoint."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import results, trouble
from tests.helpers.command import ROOT
from tests.helpers.documents import shown_script
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


def test_the_documented_batch_script_resumes(slurm: Cluster, tmp_path: Path) -> None:
    """Another recipe, two tasks a node and no GPUs; SIGUSR1 by hand instead of near the end of four hours."""
    steps = 100
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    text = shown_script((ROOT / "docs" / "launching.md").read_text())
    for shown, own in {
        "python -m framework recipe=": f"{shlex.join(FRAMEWORK)} trainer.max_steps={steps} recipe=",
        "python -m framework resume=": f"{shlex.join(FRAMEWORK)} resume=",
        "mnist": "trouble",
        "--ntasks-per-node=4": "--ntasks-per-node=2",
        "#SBATCH --gpus-per-node=4\n": "",
        "#SBATCH --cpus-per-task=8\n": "",
        "trouble_%j.out": "job.out",
    }.items():
        assert shown in text
        text = text.replace(shown, own)
    (tmp_path / "job.sh").write_text(text)
    with slurm.started("sbatch", "job.sh", cwd=tmp_path) as submitted:
        assert submitted.wait(timeout=30.0) == 0, submitted.printed()
        wait_for_step(tmp_path, outputs="outputs/job_*")
        slurm.scancel("--signal=USR1", "--name=trouble")
        slurm.wait_for_jobs(timeout=2 * START_S)
    printed = (tmp_path / "job.out").read_text()
    (run_dir,) = tmp_path.glob("outputs/job_*/trouble/*")
    assert "SIGUSR1" in printed
    assert "host2: tasks 2-3: Exited with exit code 75" in printed
    assert "Finished trouble after" in printed
    assert results.pointed(run_dir, "last") == steps
    assert results.run_file(run_dir)["status"] == "finished"


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
