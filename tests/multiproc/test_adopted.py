"""Ranks that something else has started: torchrun for real, srun and Kubernetes by the variables they set."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from framework.launch.offer import Offer, make_visible
from framework.launch.watch import Limits
from framework.run_dir import RunDir
from framework.topology import Topology
from tests.helpers import results
from tests.helpers.command import Started, run_framework, run_python, started_framework, started_python

pytestmark = pytest.mark.multiproc

TOY = ("recipe=toy", "trainer.gpus=0", "trainer.max_epochs=2")
ENDLESS = ("recipe=toy", "trainer.gpus=0", "trainer.max_epochs=1000000")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
DEADLINE_S = 60.0
Own = Mapping[int, Sequence[str]]
"""Rank → arguments that it alone is given."""


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
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_STEP_NODELIST": "gpu01",
        "SLURM_STEP_RESV_PORTS": str(port),
    }


@contextmanager
def started(
    environments: Sequence[Mapping[str, str]],
    *arguments: str,
    cwd: Path,
    own: Own | None = None,
) -> Iterator[list[Started]]:
    """The command once for each environment."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started_framework(*arguments, *(own or {}).get(rank, ()), cwd=cwd, env=environ))
            for rank, environ in enumerate(environments)
        ]


def ended(
    environments: Sequence[Mapping[str, str]],
    *arguments: str,
    cwd: Path,
    own: Own | None = None,
) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each, once all have ended by themselves."""
    with started(environments, *arguments, cwd=cwd, own=own) as ranks:
        statuses = [rank.wait(timeout=DEADLINE_S) for rank in ranks]
        for rank in ranks:
            rank.assert_all_gone()
        return [(status, rank.stdout(), rank.stderr()) for status, rank in zip(statuses, ranks, strict=True)]


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("outputs/*/*"))


def test_torchrun_gives_one_run_with_the_weights_of_our_own_launcher(tmp_path: Path) -> None:
    own, adopted = tmp_path / "own", tmp_path / "adopted"
    own.mkdir()
    adopted.mkdir()
    assert run_framework(*TOY, "topology.procs_per_node=2", cwd=own).returncode == 0
    result = run_python(*TORCHRUN, "-m", "framework", *TOY, cwd=adopted, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Training toy: 2 processes, CPU") == 1
    (ours,), (theirs,) = runs(own), runs(adopted)
    results.assert_same(results.weights(theirs), results.weights(ours))
    assert results.run_file(theirs)["status"] == "finished"
    assert "rank 1, local rank 1, world size 2" in results.log(theirs, 1)
    assert "ToyModel" in results.log(theirs, 0)


@pytest.mark.parametrize(
    "variables", [kubernetes, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (srun, by_hand))]
)
def test_ranks_of_other_starters_make_one_run(variables, port: int, tmp_path: Path) -> None:
    environments = [variables(rank, world=2, port=port) for rank in range(2)]
    first, second = ended(environments, *TOY, cwd=tmp_path)
    assert (first[0], second) == (0, (0, "", "")), first[2]
    (run,) = runs(tmp_path)
    assert results.results(run)["steps"] == 80
    node = 1 if variables is kubernetes else 0
    assert f"rank 1, local rank {1 - node}, world size 2, backend gloo, node {node}" in results.log(run, 1)


@pytest.mark.exhaustive
def test_a_different_argument_is_named_and_nothing_is_run(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    first, second = ended(environments, *TOY, cwd=tmp_path, own={0: ["seed=1"], 1: ["seed=2"]})
    assert (first[0], first[1], second) == (2, "", (2, "", ""))
    assert "arguments: seed=2; rank 0 has seed=1" in first[2]
    assert runs(tmp_path) == []


@pytest.mark.exhaustive
def test_a_different_file_is_named(port: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            folder = tmp_path / str(rank) / "conf" / "trainer"
            folder.mkdir(parents=True)
            (folder / "mine.yaml").write_text(f"defaults: [default]\nmax_epochs: {rank + 1}\n")
            place = by_hand(rank, world=2, port=port)
            ranks.append(stack.enter_context(started_framework(*TOY, cwd=folder.parents[1], env=place)))
        assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [2, 2]
        assert "conf/trainer/mine.yaml isn't the same as rank 0's" in ranks[0].stderr()
        assert ranks[1].stderr() == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        pytest.param("trainer.max_epochs=-1", "trainer.max_epochs=-1", marks=pytest.mark.exhaustive),
        ("topology.procs_per_node=4", "topology.procs_per_node=4, but the environment has started 2 processes"),
        pytest.param("backend.init_method=tcp", "backend.init_method=tcp can't be used", marks=pytest.mark.exhaustive),
        pytest.param("launcher@fallback=local", "launcher@fallback", marks=pytest.mark.exhaustive),
        pytest.param("-m", "-m makes several runs", marks=pytest.mark.exhaustive),
    ],
)
def test_a_mistake_is_told_once_and_ends_every_rank_with_2(mistake, message, port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    first, second = ended(environments, "recipe=toy", "trainer.gpus=0", mistake, cwd=tmp_path)
    assert (first[0], second) == (2, (2, "", "")), first[2]
    assert message in first[2]
    assert runs(tmp_path) == []


@pytest.mark.exhaustive
def test_what_rank_0_only_answers_ends_the_others_in_silence(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    first, second = ended(environments, "recipe=toy", "--cfg", "job", cwd=tmp_path)
    assert (first[0], second) == (0, (0, "", "")), first[2]
    assert "max_epochs" in first[1]


def test_what_only_the_ranks_can_refuse_is_said_once_and_leaves_nothing(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    first, second = ended(environments, *TOY, "strategy._target_=framework.strategies.ddpp", cwd=tmp_path)
    assert (first[0], second[0]) == (2, 2)
    assert "Did you mean framework.strategies.ddp?" in first[2]
    assert second[2] == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_another_launcher_that_is_typed_begins_a_run_of_its_own(port: int, tmp_path: Path) -> None:
    environ = by_hand(1, world=2, port=port)
    result = run_framework(*TOY, "launcher=local", "topology.procs_per_node=2", cwd=tmp_path, env=environ)
    assert result.returncode == 0, result.stderr
    (run,) = runs(tmp_path)
    assert "rank 1, local rank 1, world size 2" in results.log(run, 1)


def test_adopted_without_a_starter_is_refused(tmp_path: Path) -> None:
    result = run_framework(*TOY, "launcher=adopted", cwd=tmp_path)
    assert result.returncode == 2
    assert "isn't one of several that torchrun, srun or a Kubernetes PyTorchJob has started" in result.stderr


def test_a_port_that_is_taken_is_named_with_what_to_set(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environments = [by_hand(rank, world=2, port=taken.getsockname()[1]) for rank in range(2)]
        first, second = ended(environments, *TOY, "backend.init_timeout=6s", cwd=tmp_path)
    assert (first[0], second[0]) == (1, 1)
    assert "Address already in use" in first[2]
    assert "Set MASTER_PORT to a free port" in first[2]
    assert "got no answer from a store" in second[2]
    assert runs(tmp_path) == []


def test_a_rank_leaves_when_rank_0_never_comes(port: int, tmp_path: Path) -> None:
    (only,) = ended([by_hand(1, world=2, port=port)], *TOY, "backend.init_timeout=2s", cwd=tmp_path)
    assert only[:2] == (1, "")
    assert f"Rank 1 found nobody at 127.0.0.1:{port} within 2 s" in only[2]


def test_rank_0_names_the_ranks_that_do_not_come(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=3, port=port) for rank in range(2)]
    first, second = ended(environments, *TOY, "backend.init_timeout=15s", cwd=tmp_path)
    assert (first[0], second[0]) == (1, 1)
    assert "Rank 2 of 3 didn't come within backend.init_timeout=15 s" in first[2]
    assert runs(tmp_path) == []


@pytest.mark.exhaustive
def test_the_others_leave_when_rank_0_dies_before_it_offers_anything(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=3, port=port) for rank in range(2)]  # rank 0 waits for rank 2
    with started(environments, *TOY, cwd=tmp_path) as (first, second):
        wait_for_connection(second, port=port)
        os.kill(first.process.pid, signal.SIGKILL)
        assert second.wait(timeout=DEADLINE_S) == 1
        assert "rank 0 ended before it said what to run" in second.stderr()
        assert len(second.stderr().splitlines()) <= 3


def wait_for_connection(started: Started, *, port: int) -> None:
    """Return once the process has asked at the store, and waits: a probe's connection doesn't last."""
    deadline, since = time.monotonic() + DEADLINE_S, dict[int, float]()
    while (now := time.monotonic()) < deadline:
        connections = psutil.Process(started.process.pid).net_connections("tcp")
        ours = [
            c.laddr.port for c in connections if (port, "ESTABLISHED") == (getattr(c.raddr, "port", None), c.status)
        ]
        since = {own: since.get(own, now) for own in ours}
        if any(now - begin > 1.0 for begin in since.values()):
            return
        time.sleep(0.05)
    raise AssertionError(f"no connection after {DEADLINE_S} s\n{started.printed()}")


@pytest.mark.exhaustive
def test_two_runs_of_torchrun_on_one_machine_are_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    with ExitStack() as stack:
        both = []
        for seed, folder in enumerate(folders):
            folder.mkdir()
            command = (*TORCHRUN, "-m", "framework", *TOY, f"seed={seed}")
            both.append(stack.enter_context(started_python(*command, cwd=folder)))
        for each in both:
            assert each.wait(timeout=DEADLINE_S) == 0, each.printed()
            each.assert_all_gone()
    weights = [results.weights(run) for folder in folders for run in runs(folder)]
    assert len(weights) == 2
    assert results.differ(*weights)


@pytest.mark.exhaustive  # after a restart by torchrun: below
def test_a_run_is_gone_on_with(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    assert ended(environments, *TOY, cwd=tmp_path)[0][0] == 0
    (run,) = runs(tmp_path)
    first, second = ended(environments, f"resume={run}", "trainer.max_epochs=4", cwd=tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2]
    assert runs(tmp_path) == [run]
    assert results.results(run)["steps"] == 160
    assert results.repeated(run) == {}


def test_the_first_rank_to_fail_is_reported_once(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    with started(environments, *ENDLESS, cwd=tmp_path) as (first, second):
        first.wait_for_output("epoch 1 ", timeout=DEADLINE_S)
        os.kill(second.process.pid, signal.SIGKILL)
        assert first.wait(timeout=DEADLINE_S) == 1
        (run,) = runs(tmp_path)
        assert first.stderr().count(f"Rank 1 of 2 (pid {second.process.pid}) failed first") == 1, first.printed()
    report = json.loads((run / "failure.json").read_text())
    assert (report["first"]["rank"], report["first"]["pid"]) == (1, second.process.pid)
    assert results.run_file(run)["status"] == "failed"


def test_the_death_of_rank_0_is_reported_by_another(port: int, tmp_path: Path) -> None:
    """Its process hosts the store, which goes with it."""
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    with started(environments, *ENDLESS, cwd=tmp_path) as (first, second):
        first.wait_for_output("epoch 1 ", timeout=DEADLINE_S)
        os.kill(first.process.pid, signal.SIGKILL)
        assert second.wait(timeout=DEADLINE_S) == 1
        assert second.stderr().count("Rank 0 of 2") == 1, second.printed()
        (run,) = runs(tmp_path)
    assert results.run_file(run)["status"] == "failed"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ranks_that_torchrun_starts_anew_go_on_in_the_same_run(tmp_path: Path) -> None:
    command = (*TORCHRUN, "--max-restarts=1", "-m", "framework", *ENDLESS, "trainer.max_steps=2000")
    with started_python(*command, cwd=tmp_path) as torchrun:
        torchrun.wait_for_output("epoch 2 ", timeout=DEADLINE_S)
        ranks = psutil.Process(torchrun.process.pid).children()
        (victim,) = [process for process in ranks if process.environ().get("RANK") == "1"]
        victim.kill()
        assert torchrun.wait(timeout=DEADLINE_S) == 0, torchrun.printed()
        torchrun.assert_all_gone()
        assert "Resuming toy: 2 processes" in torchrun.stdout()
    (run,) = runs(tmp_path)
    assert results.results(run)["steps"] == 2000
    assert results.repeated(run) == {}
    assert len(results.run_file(run)["earlier"]) == 1


def test_sigterm_stops_all_ranks_with_a_checkpoint(port: int, tmp_path: Path) -> None:
    environments = [by_hand(rank, world=2, port=port) for rank in range(2)]
    with started(environments, *ENDLESS, cwd=tmp_path) as (first, second):
        first.wait_for_output("epoch 1 ", timeout=DEADLINE_S)
        for each in (second, first):  # as schedulers do, one after another
            each.process.terminate()
        assert [each.wait(timeout=DEADLINE_S) for each in (first, second)] == [75, 75], first.printed()
    (run,) = runs(tmp_path)
    assert results.pointed(run, "last") == max(results.saved_steps(run))
    assert not (run / "failure.json").exists()


def test_a_node_that_does_not_see_the_run_directory_makes_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "outputs" / "toy" / "one")
    offer = Offer(
        entry="module:function",
        run_dir=str(run_dir.path),
        topology=Topology(nnodes=2, procs_per_node=1, gpus_per_node=0, span=1),
        limits=Limits(init_timeout_s=1.0, timeout_s=1.0, late_after_s=1.0),
        config="a: 1\n",
        overrides="- a=1\n",
    )
    make_visible(run_dir, offer)
    assert (run_dir.config_file.read_text(), run_dir.overrides_file.read_text()) == ("a: 1\n", "- a=1\n")
    assert run_dir.logs.is_dir()
    run_dir.config_file.chmod(0o444)
    before = run_dir.config_file.stat().st_mtime_ns
    make_visible(run_dir, offer)  # there by now, made by another rank of the node
    assert run_dir.config_file.stat().st_mtime_ns == before
