"""Who has started this process as a rank, read from the variables that real launchers set."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import TopologyError
from tests.helpers.internals import (
    SECRET,
    ClusterEnvironment,
    ReportedByRankZeroError,
    chooses_own_ranks,
    detect,
    first_host,
    split_endpoint,
    tasks_per_node,
    typed_value,
    without_secret,
)

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "40001",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
}
KUBERNETES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def found(environ: dict[str, str], **options: str) -> ClusterEnvironment:
    cluster = detect(environ, **options)
    assert cluster is not None
    return cluster


@pytest.mark.parametrize(
    ("typed", "before", "secret"),
    [
        ([], {}, None),
        ([], {SECRET: "a"}, "a"),
        (["topology.rdzv_secret=b"], {SECRET: "a"}, "b"),
        (["+topology.rdzv_secret=b", "topology.rdzv_secret='c d'"], {}, "c d"),
        (["topology.rdzv_secret=null"], {SECRET: "a"}, ""),
    ],
)
def test_a_typed_secret_is_moved_to_the_environment(typed: list[str], before: dict[str, str], secret: str | None):
    environ = dict(before)
    assert without_secret(["recipe=toy", *typed, "seed=1"], environ) == ["recipe=toy", "seed=1"]
    assert environ.get(SECRET) == secret


def test_ranks_of_one_node_meet_on_loopback():
    by_hand = {**without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"), "RANK": "1"}
    by_hand |= {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert found(by_hand).store_host == "127.0.0.1"
    assert found(TORCHRUN).store_host == "node0"


@pytest.mark.parametrize("under", [{}, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}])
def test_torchrun_is_seen_also_under_srun(under):
    """One task a node, and torchrun in it: ranks have other numbers than tasks."""
    assert found({**under, **TORCHRUN}) == ClusterEnvironment(
        starter="torchrun",
        rank=5,
        local_rank=1,
        nnodes=2,
        procs_per_node=4,
        host="node0",
        port=40001,
        agent_store=True,
        attempt=2,
    )


ONE_NODE = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "5"}


@pytest.mark.parametrize(
    ("added", "endpoint", "expected"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None, ("a", 1)),
        ({}, "b:2", ("b", 2)),
        ({"SLURM_STEP_RESV_PORTS": "12001-12004"}, None, ("gpu01", 12001)),
        ({"MASTER_ADDR": "a", "SLURM_STEP_RESV_PORTS": "12001"}, None, ("a", 12001)),
        ({**ONE_NODE, "SLURM_STEP_RESV_PORTS": "12001"}, None, ("127.0.0.1", 12001)),
    ],
)
def test_tasks_of_srun_meet_where_something_says(added, endpoint, expected):
    cluster = found({**SRUN, **added}, endpoint=endpoint)
    assert (cluster.host, cluster.port) == expected
    assert cluster.starter == "srun"
    assert cluster.rank == 5
    assert cluster.world_size == 8
    assert cluster.agent_store is False
    if "SLURM_NODEID" not in added:
        assert cluster.local_rank == 1
        assert cluster.node_rank == 1
        assert cluster.nnodes == 2
        assert cluster.procs_per_node == 4


@given(job=st.integers(1, 10**8), step=st.integers(0, 10**4))
def test_a_derived_port_differs_between_steps(job, step):
    def port(**changed: int) -> int:
        return found({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(changed.get("step", step))}).port

    assert 1024 < port() < 32768
    assert port() != port(step=step + 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A batch script has no step.
        without(SRUN, "SLURM_STEP_ID"),
        # This is the step of salloc's interactive shell.
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        # srun --pty bash sets this variable.
        {**SRUN, "SLURM_PTY_PORT": "45418"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"},
        # The job is a single pod.
        {**KUBERNETES, "WORLD_SIZE": "1", "RANK": "0"},
        # One of our own ranks has started the command.
        without(TORCHRUN, "TORCHELASTIC_RUN_ID"),
        {"WORLD_SIZE": "8"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
    ],
    ids=range(9),
)
def test_a_process_without_a_rank_is_untouched(environ):
    assert detect(environ) is None


@dataclass(frozen=True, kw_only=True)
class Pod:
    """Variables beside those of Kubernetes, and the rank that they make."""

    added: dict[str, str] = field(default_factory=dict)
    rank: int = 1
    local_rank: int = 0
    node_rank: int = 1
    nnodes: int = 4
    procs_per_node: int = 1


@pytest.mark.parametrize(
    "pod",
    [
        Pod(),
        Pod(added={"PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto"}),
        # The variables were set by hand.
        Pod(
            added={"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            rank=3,
            local_rank=1,
            nnodes=2,
            procs_per_node=2,
        ),
    ],
)
def test_kubernetes_is_seen(pod: Pod):
    cluster = found({**KUBERNETES, **pod.added})
    assert (cluster.rank, cluster.local_rank, cluster.node_rank) == (pod.rank, pod.local_rank, pod.node_rank)
    assert (cluster.nnodes, cluster.procs_per_node) == (pod.nnodes, pod.procs_per_node)
    assert (cluster.host, cluster.port) == ("job-master-0", 23456)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "7"}, r"WORLD_SIZE=7 isn't LOCAL_WORLD_SIZE=4 times 2"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"local rank 2 of node 1, and would be local rank 1"),
        ({**TORCHRUN, "RANK": "9"}, r"Rank 9.*8 ranks"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, r"MASTER_PORT=x must be a whole number"),
        (without(TORCHRUN, "MASTER_ADDR"), r"MASTER_ADDR isn't set, but RANK=5"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, r"5,3 \(8 tasks on 2 nodes\)"),
        ({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}, r"local rank 2 of\s+node 0.*--distribution=block"),
        ({**SRUN, "RANK": "4"}, r"RANK=4, but srun says 5"),
        ({**KUBERNETES, "PET_NPROC_PER_NODE": "4"}, r"PET_NPROC_PER_NODE=4 is an option for torchrun"),
        ({"PET_NNODES": "1:4"}, r"PET_NNODES=1:4 is an option for torchrun"),
        ({**KUBERNETES, "LOCAL_RANK": "0"}, r"LOCAL_WORLD_SIZE isn't set"),
        (
            {**KUBERNETES, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"},
            r"WORLD_SIZE=4 isn't LOCAL_WORLD_SIZE=3 times 1",
        ),
    ],
)
def test_a_contradiction_is_refused_with_both_numbers(environ, message):
    with pytest.raises(TopologyError, match=f"(?s){message}"):
        detect(environ)


@pytest.mark.parametrize(
    ("changed", "quiet"),
    [({"WORLD_SIZE": "7", "RANK": "0"}, False), ({"WORLD_SIZE": "7"}, True), ({"LOCAL_RANK": "2"}, False)],
)
def test_rank_0_alone_reports_common_findings(changed, quiet):
    with pytest.raises(TopologyError) as error:
        detect({**TORCHRUN, **changed})
    assert isinstance(error.value, ReportedByRankZeroError) is quiet


def test_an_endpoint_is_a_host_and_a_port():
    assert split_endpoint("[::1]:29400") == ("::1", 29400)
    for text in ("node0", "node0:", ":29400", "node0:0", "node0:65536", "node0:x"):
        with pytest.raises(TopologyError, match="HOST:PORT"):
            split_endpoint(text)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_slurm_task_counts_are_parsed(counts):
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert tasks_per_node(text) == counts
    with pytest.raises(TopologyError, match="4x2"):
        tasks_per_node("4x2")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu[07,09-10],cpu1", "gpu07"),
        ("a1,b[1-2]", "a1"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_arguments_are_read_before_they_are_composed():
    for typed in ("recipe=toy", "launcher=auto", "launcher=external"):
        assert not chooses_own_ranks([typed])
    assert not chooses_own_ranks(["launcher=local", "launcher=auto"])
    assert chooses_own_ranks(["launcher=local"])
    assert chooses_own_ranks(["launcher.name=elastic"])
    assert chooses_own_ranks(["launcher._target_=package.Mine"])
    assert not chooses_own_ranks(["launcher=adopted"])
    assert typed_value(["a=1", "b=2", "a=3"], "a") == "3"
    assert typed_value(["a=1", "a=null"], "a") is None
    assert typed_value(["b=1"], "a") is None
