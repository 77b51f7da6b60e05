"""Ranks that something else has started: torchrun for real, srun and Kubernetes by the variables they set."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers import results
from tests.helpers.command import run_python, started_python
from tests.helpers.forked import Forked, forked

pytestmark = pytest.mark.multiproc
exhaustive = pytest.mark.exhaustive

TOY = ("recipe=toy", "trainer.gpus=0", "trainer.max_epochs=2")
ENDLESS = ("recipe=toy", "trainer.gpus=0", "trainer.max_epochs=1000000")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
DEADLINE_S = 90.0
_count = itertools.count()
Start = Callable[..., Mapping[str, str]]


@pytest.fixture
def port() -> int:
    """One that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        number: int = found.getsockname()[1]
        return number


def by_hand(rank: int, *, world: int, port: int) -> dict[str, str]:
    """What torchrun sets, on one node."""
    return {**kubernetes(rank, world=world, port=port), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}


def kubernetes(rank: int, *, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def srun(rank: int, *, world: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "gpu01",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_STEP_RESV_PORTS": str(port),
    }


@contextmanager
def started(
    folder: Path,
    *arguments: str,
    port: int,
    ranks: Sequence[int] = (0, 1),
    world: int = 2,
    variables: Start = by_hand,
    own: Mapping[int, Sequence[str]] | None = None,
    cwd: Callable[[int], Path] | None = None,
) -> Iterator[list[Forked]]:
    """Start the command as each of these ranks. own: the arguments of single ranks."""
    processes = []
    with ExitStack() as stack:
        for rank in ranks:
            process = forked(
                *arguments,
                *(own or {}).get(rank, ()),
                cwd=folder if cwd is None else cwd(rank),
                env=variables(rank, world=world, port=port),
                output=folder.parent / f"{folder.name}_output_{next(_count)}",
            )
            processes.append(stack.enter_context(process))
        yield processes


def ended(folder: Path, *arguments: str, **how: object) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each, once all have ended by themselves."""
    with started(folder, *arguments, **how) as ranks:  # type: ignore[arg-type]
        return [(rank.wait(), rank.stdout(), rank.stderr()) for rank in ranks]


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("outputs/*/*"))


@exhaustive
@pytest.mark.parametrize("starter", ["Kubernetes", "srun", "torchrun"])
def test_external_ranks_get_the_same_weights(
    starter: str, port: int, tmp_path: Path, shared_run: Callable[..., Path]
) -> None:
    if starter == "torchrun":
        result = run_python(*TORCHRUN, "-m", "framework", *TOY, cwd=tmp_path, timeout=DEADLINE_S)
        status = result.returncode
        out = result.stdout
        err = result.stderr
    else:
        variables = kubernetes if starter == "Kubernetes" else srun
        (status, out, err), second = ended(tmp_path, *TOY, port=port, variables=variables)
        assert second == (0, "", "")
    assert status == 0, err
    assert out.count("Training toy: 2 processes, CPU") == 1
    (run,) = runs(tmp_path)
    ours = shared_run("recipe=toy", "trainer.max_epochs=2", "topology.procs_per_node=2")
    results.assert_same(results.weights(run), results.weights(ours))
    assert results.results(run)["steps"] == 80
    node = int(starter == "Kubernetes")
    assert f"rank 1, local rank {1 - node}, world size 2, backend gloo, node {node}" in results.log(run, 1)
    assert "ToyModel" in results.log(run, 0)


@exhaustive
def test_torchrun_restarts_resume_the_same_run(tmp_path: Path) -> None:
    """Two runs on one machine, one of which loses a rank."""
    folders = [tmp_path / name for name in ("one", "other")]
    command = (*TORCHRUN, "--max-restarts=1", "-m", "framework", *ENDLESS, "trainer.max_steps=2000")
    with ExitStack() as stack:
        both = []
        for seed, folder in enumerate(folders):
            folder.mkdir()
            both.append(stack.enter_context(started_python(*command, f"seed={seed}", cwd=folder)))
        both[0].wait_for_output("epoch 2 ", timeout=DEADLINE_S)
        ranks = psutil.Process(both[0].process.pid).children()
        (victim,) = [process for process in ranks if process.environ().get("RANK") == "1"]
        victim.kill()
        for each in both:
            assert each.wait(timeout=DEADLINE_S) == 0, each.printed()
            each.assert_all_gone()
        assert "Resuming toy: 2 processes" in both[0].stdout()
    (run,), (other,) = map(runs, folders)
    assert results.results(run)["steps"] == results.results(other)["steps"] == 2000
    assert results.repeated(run) == {}
    assert len(results.run_file(run)["earlier"]) == 1
    assert results.differ(results.weights(run), results.weights(other))


@exhaustive
def test_ranks_end_with_torchruns_agent(tmp_path: Path) -> None:
    with started_python(*TORCHRUN, "-m", "framework", *ENDLESS, cwd=tmp_path) as started:
        started.wait_for_output("epoch 1 ", timeout=DEADLINE_S)
        started.process.kill()
        assert started.wait(timeout=DEADLINE_S) == -signal.SIGKILL
        started.assert_all_gone()


def test_different_starts_are_refused_and_nothing_runs(port: int, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / str(rank) / "conf" / "trainer"
        folder.mkdir(parents=True)
        (folder / "mine.yaml").write_text(f"defaults: [default]\nmax_epochs: {rank + 1}\n")
    own = {0: ["seed=1"], 1: ["seed=2"]}
    first, second = ended(tmp_path, *TOY, port=port, own=own, cwd=lambda rank: tmp_path / str(rank))
    assert (first[0], first[1], second) == (2, "", (2, "", ""))
    assert "seed: 2; rank 0 has 1" in first[2]
    assert "conf/trainer/mine.yaml: sha256 " in first[2]
    assert not list(tmp_path.glob("*/outputs"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trainer.max_epochs=-1", "trainer.max_epochs=-1"),
        # which only the ranks can see
        pytest.param("strategy._target_=framework.strategies.ddpp", "Did you mean", marks=exhaustive),
        pytest.param("-m", "-m makes several runs", marks=exhaustive),
    ],
)
def test_a_wrong_request_ends_every_rank_with_2(argument: str, message: str, port: int, tmp_path: Path) -> None:
    first, second = ended(tmp_path, *TOY, argument, port=port)
    assert (first[0], second) == (2, (2, "", "")), first[2]
    assert message in first[2]
    assert list(tmp_path.iterdir()) == []


REFUSING = """
import os, time
from framework.errors import ConfigError

class Refusing:
    def __init__(self):
        if os.environ["RANK"] == "0": raise ConfigError("refused by rank 0")
        time.sleep(300)
"""


@exhaustive
def test_a_rank_in_setup_leaves_with_the_report(port: int, tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    first, second = ended(tmp_path, *TOY, "+callbacks.refusing._target_=refusing.Refusing", port=port)
    assert (first[0], second[0]) == (2, 2), first[2]
    assert first[2].count("refused by rank 0") == 1


def test_a_typed_launcher_starts_its_own_run(port: int, tmp_path: Path) -> None:
    ((status, _, err),) = ended(tmp_path, *TOY, "launcher=in_process", port=port, ranks=[1])
    assert status == 0, err
    (run,) = runs(tmp_path)
    assert "rank 0, local rank 0, world size 1" in results.log(run)


@exhaustive
def test_a_taken_port_is_named_with_advice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, second = ended(tmp_path, *TOY, "backend.init_timeout=3s", port=taken.getsockname()[1])
    assert (first[0], second[0]) == (1, 1)
    assert "Address already in use" in first[2]
    assert "Set MASTER_PORT to a free port" in first[2]
    assert "got no answer from a store" in second[2]
    assert runs(tmp_path) == []


@exhaustive
def test_a_rank_that_does_not_come_is_named(port: int, tmp_path: Path) -> None:
    (only,) = ended(tmp_path, *TOY, "backend.init_timeout=1s", port=port, ranks=[1])
    assert only[:2] == (1, "")
    assert f"Rank 1 could not reach 127.0.0.1:{port} within 1 s" in only[2]
    first, second = ended(tmp_path, *TOY, "backend.init_timeout=5s", port=port, world=3)
    assert (first[0], second[0]) == (1, 1)
    assert re.search(rf"Ranks? .*2 of 3 didn't come to 127.0.0.1:{port} within backend.init_timeout=5 s", first[2])
    assert runs(tmp_path) == []


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=exhaustive)])
def test_the_first_rank_to_die_is_reported_once(victim: int, port: int, tmp_path: Path) -> None:
    """The process of rank 0 hosts the store, which goes with it: another one reports it."""
    with started(tmp_path, *ENDLESS, port=port) as ranks:
        ranks[0].wait_for_output("epoch 1 ")
        os.kill(ranks[victim].pid, signal.SIGKILL)
        assert ranks[1 - victim].wait() == 1
        header = f"Rank {victim} of 2 (pid {ranks[victim].pid}) failed first"
        assert ranks[1 - victim].stderr().count(header) == 1
        first = json.loads((runs(tmp_path)[0] / "failure.json").read_text())["first"]
        assert (first["rank"], first["pid"]) == (victim, ranks[victim].pid)
    assert results.run_file(runs(tmp_path)[0])["status"] == "failed"


# Of several nodes: under Kubernetes each rank is one.

RAISING = """
import os

class Raising:
    def on_train_step_end(self, report):
        if os.environ["RANK"] == "1" and report.step == 20: raise ValueError("not on this node")
"""


def test_the_first_node_reports_errors_of_others(port: int, tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    raising = "+callbacks.raising._target_=raising.Raising"
    first, second = ended(tmp_path, *ENDLESS, raising, port=port, variables=kubernetes)
    assert (first[0], second[0]) == (1, 1)
    assert first[2].count("failed first: ValueError: not on this node") == 1, first[2]
    (run,) = runs(tmp_path)
    report = json.loads((run / "failure.json").read_text())
    assert {key: report["first"][key] for key in ("rank", "node", "local_rank", "step")} == {
        "rank": 1,
        "node": 1,
        "local_rank": 0,
        "step": 20,
    }
    assert [(other["rank"], other["node"]) for other in report["others"]] in ([], [(0, 0)])


@pytest.mark.exhaustive
def test_a_signal_to_one_node_stops_all(port: int, tmp_path: Path) -> None:
    with started(tmp_path, *ENDLESS, port=port, variables=kubernetes) as ranks:
        ranks[0].wait_for_output("epoch 1 ")
        os.kill(ranks[1].pid, signal.SIGTERM)
        assert [each.wait() for each in ranks] == [75, 75], ranks[0].stderr()
    (run,) = runs(tmp_path)
    last = results.pointed(run, "last")
    assert last == max(results.saved_steps(run)) == results.results(run)["steps"]
    assert not (run / "failure.json").exists()
    resume = (f"resume={run}", f"trainer.max_steps={last + 10}", "trainer.max_epochs=null")
    first, second = ended(tmp_path, *resume, port=port, variables=kubernetes)
    assert (first[0], second[0]) == (0, 0), first[2]
    assert runs(tmp_path) == [run]
    assert results.results(run)["steps"] == last + 10
    assert results.repeated(run) == {}


HANGING = """
import time

class Hanging:
    def on_train_step_end(self, report):
        if report.step == 3:
            print("hangs", flush=True)
            for _ in range(600): time.sleep(1)
"""


@exhaustive
def test_a_second_ctrl_c_ends_a_hung_rank(port: int, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    callback = "+callbacks.own._target_=hanging.Hanging"
    with started(tmp_path, *ENDLESS, callback, port=port, ranks=(0,), world=1) as (rank,):
        rank.wait_for_output("hangs")
        os.kill(rank.pid, signal.SIGINT)
        time.sleep(1)
        os.kill(rank.pid, signal.SIGINT)
        assert rank.wait() == 130
