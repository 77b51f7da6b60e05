"""Ranks that something else has started: torchrun for real, srun and Kubernetes by the variables they set."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers import results
from tests.helpers.command import run_framework, run_python, started_python
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
        **{"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NODELIST": "gpu01"},
        **{"SLURM_STEP_NUM_TASKS": str(world), "SLURM_STEP_TASKS_PER_NODE": str(world)},
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
    """The command as each of these ranks. own: rank → arguments that it alone is given."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                forked(
                    *arguments,
                    *(own or {}).get(rank, ()),
                    cwd=folder if cwd is None else cwd(rank),
                    env=variables(rank, world=world, port=port),
                    output=folder.parent / f"{folder.name}_output_{next(_count)}",
                )
            )
            for rank in ranks
        ]


def ended(folder: Path, *arguments: str, **how: object) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each, once all have ended by themselves."""
    with started(folder, *arguments, **how) as ranks:  # type: ignore[arg-type]
        return [(rank.wait(), rank.stdout(), rank.stderr()) for rank in ranks]


def runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("outputs/*/*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "variables", [kubernetes, pytest.param(srun, marks=exhaustive)], ids=lambda value: value.__name__
)
def test_ranks_of_other_starters_make_one_run(
    variables: Start, port: int, tmp_path: Path, shared_run: Callable[..., Path]
) -> None:
    first, second = ended(tmp_path, *TOY, port=port, variables=variables)
    assert (first[0], second) == (0, (0, "", "")), first[2]
    assert first[1].count("Training toy: 2 processes, CPU") == 1
    (run,) = runs(tmp_path)
    ours = shared_run("recipe=toy", "trainer.max_epochs=2", "topology.procs_per_node=2")
    results.assert_same(results.weights(run), results.weights(ours))
    assert results.results(run)["steps"] == 80
    node = int(variables is kubernetes)
    assert f"rank 1, local rank {1 - node}, world size 2, backend gloo, node {node}" in results.log(run, 1)
    assert "ToyModel" in results.log(run, 0)


@exhaustive
def test_torchrun_gives_one_run_with_the_weights_of_our_own_launcher(
    tmp_path: Path, shared_run: Callable[..., Path]
) -> None:
    result = run_python(*TORCHRUN, "-m", "framework", *TOY, cwd=tmp_path, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Training toy: 2 processes, CPU") == 1
    (run,) = runs(tmp_path)
    ours = shared_run("recipe=toy", "trainer.max_epochs=2", "topology.procs_per_node=2")
    results.assert_same(results.weights(run), results.weights(ours))
    assert "rank 1, local rank 1, world size 2" in results.log(run, 1)


@exhaustive
def test_ranks_that_torchrun_restarts_resume_the_same_run_beside_another(tmp_path: Path) -> None:
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


def test_a_different_argument_is_named_and_nothing_runs(port: int, tmp_path: Path) -> None:
    first, second = ended(tmp_path, *TOY, port=port, own={0: ["seed=1"], 1: ["seed=2"]})
    assert (first[0], first[1], second) == (2, "", (2, "", ""))
    assert "arguments: seed=2; rank 0 has seed=1" in first[2]
    assert runs(tmp_path) == []


@exhaustive
def test_a_different_file_is_named(port: int, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / str(rank) / "conf" / "trainer"
        folder.mkdir(parents=True)
        (folder / "mine.yaml").write_text(f"defaults: [default]\nmax_epochs: {rank + 1}\n")
    first, second = ended(tmp_path, *TOY, port=port, cwd=lambda rank: tmp_path / str(rank))
    assert (first[0], second) == (2, (2, "", ""))
    assert "conf/trainer/mine.yaml isn't the same as rank 0's" in first[2]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        pytest.param("topology.procs_per_node=4", "but the environment has started 2 processes", marks=exhaustive),
        # which only the ranks can see
        ("strategy._target_=framework.strategies.ddpp", "Did you mean framework.strategies.ddp?"),
        pytest.param("trainer.max_epochs=-1", "trainer.max_epochs=-1", marks=exhaustive),
        pytest.param("backend.init_method=tcp", "backend.init_method=tcp can't be used", marks=exhaustive),
        pytest.param("launcher@fallback=local", "launcher@fallback", marks=exhaustive),
        pytest.param("-m", "-m makes several runs", marks=exhaustive),
    ],
)
def test_a_wrong_request_is_answered_once_with_status_2_on_every_rank(
    argument: str, message: str, port: int, tmp_path: Path
) -> None:
    first, second = ended(tmp_path, *TOY, argument, port=port)
    assert (first[0], second) == (2, (2, "", "")), first[2]
    assert message in first[2]
    assert list(tmp_path.iterdir()) == []


@exhaustive
def test_what_rank_0_answers_alone_ends_the_others_quietly(port: int, tmp_path: Path) -> None:
    first, second = ended(tmp_path, "recipe=toy", "--cfg", "job", port=port)
    assert (first[0], second) == (0, (0, "", "")), first[2]
    assert "max_epochs" in first[1]


def test_a_launcher_that_is_typed_starts_a_run_of_its_own(port: int, tmp_path: Path) -> None:
    ((status, _, err),) = ended(tmp_path, *TOY, "launcher=in_place", port=port, ranks=[1])
    assert status == 0, err
    (run,) = runs(tmp_path)
    assert "rank 0, local rank 0, world size 1" in results.log(run)


@exhaustive
def test_adopted_without_a_starter_is_refused(tmp_path: Path) -> None:
    result = run_framework(*TOY, "launcher=adopted", cwd=tmp_path)
    assert result.returncode == 2
    assert "isn't one of several that torchrun, srun or a Kubernetes PyTorchJob has started" in result.stderr


@pytest.mark.exhaustive
def test_a_port_that_is_taken_is_named_with_what_to_set(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first, second = ended(tmp_path, *TOY, "backend.init_timeout=3s", port=taken.getsockname()[1])
    assert (first[0], second[0]) == (1, 1)
    assert "Address already in use" in first[2]
    assert "Set MASTER_PORT to a free port" in first[2]
    assert "got no answer from a store" in second[2]
    assert runs(tmp_path) == []


@pytest.mark.exhaustive
def test_a_rank_that_does_not_come_is_named(port: int, tmp_path: Path) -> None:
    (only,) = ended(tmp_path, *TOY, "backend.init_timeout=1s", port=port, ranks=[1])
    assert only[:2] == (1, "")
    assert f"Rank 1 found nobody at 127.0.0.1:{port} within 1 s" in only[2]
    first, second = ended(tmp_path, *TOY, "backend.init_timeout=5s", port=port, world=3)
    assert (first[0], second[0]) == (1, 1)
    assert re.search(r"Ranks? .*2 of 3 didn't come within backend.init_timeout=5 s", first[2])
    assert runs(tmp_path) == []


@exhaustive
def test_a_finished_run_is_resumed(port: int, tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    folder = tmp_path / "user"
    assert ended(folder, *TOY, port=port)[0][0] == 0
    (run,) = runs(folder)
    first, second = ended(folder, f"resume={run}", "trainer.max_epochs=4", port=port)
    assert (first[0], second[0]) == (0, 0), first[2]
    assert runs(folder) == [run]
    assert results.results(run)["steps"] == 160
    assert results.repeated(run) == {}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=exhaustive)])
def test_the_first_rank_to_die_is_reported_once(victim: int, port: int, tmp_path: Path) -> None:
    """The process of rank 0 hosts the store, which goes with it: another one reports it."""
    with started(tmp_path, *ENDLESS, port=port) as ranks:
        ranks[0].wait_for_output("epoch 1 ")
        os.kill(ranks[victim].pid, signal.SIGKILL)
        assert ranks[1 - victim].wait() == 1
        told = f"Rank {victim} of 2 (pid {ranks[victim].pid}) failed first"
        assert ranks[1 - victim].stderr().count(told) == 1
        first = json.loads((runs(tmp_path)[0] / "failure.json").read_text())["first"]
        assert (first["rank"], first["pid"]) == (victim, ranks[victim].pid)
    assert results.run_file(runs(tmp_path)[0])["status"] == "failed"


def test_sigterm_stops_all_ranks_with_a_checkpoint(port: int, tmp_path: Path) -> None:
    with started(tmp_path, *ENDLESS, port=port) as ranks:
        ranks[0].wait_for_output("epoch 1 ")
        for each in reversed(ranks):  # as schedulers do, one after another
            os.kill(each.pid, signal.SIGTERM)
        assert [each.wait() for each in ranks] == [75, 75], ranks[0].stderr()
    (run,) = runs(tmp_path)
    assert results.pointed(run, "last") == max(results.saved_steps(run))
    assert not (run / "failure.json").exists()
