"""Who has started this process as a rank, read from the variables that real launchers set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import TopologyError
from framework.launch.environment import (
    Place,
    ToldByRankZeroError,
    chooses_own_ranks,
    detect,
    first_host,
    split_endpoint,
    tasks_per_node,
    typed_value,
    without_launch_arguments,
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


def found(environ: dict[str, str], **options: str) -> Place:
    place = detect(environ, **options)
    assert place is not None
    return place


@pytest.mark.parametrize("under", [{}, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}])
def test_torchrun_is_seen_also_under_srun(under):
    """One task a node, and torchrun in it: ranks have other numbers than tasks."""
    assert found({**under, **TORCHRUN}) == Place(
        starter="torchrun",
        rank=5,
        local_rank=1,
        nnodes=2,
        procs_per_node=4,
        host="node0",
        port=40001,
        port_from="--master-port",
        agent_store=True,
        attempt=2,
    )


def test_srun_is_seen():
    place = found(SRUN)
    assert (place.starter, place.rank, place.local_rank, place.node_rank) == ("srun", 5, 1, 1)
    assert (place.nnodes, place.procs_per_node, place.world_size) == (2, 4, 8)
    assert (place.host, place.agent_store) == ("gpu01", False)


@pytest.mark.parametrize(
    ("added", "endpoint", "expected"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, None, ("a", 1, "MASTER_PORT")),
        ({}, "b:2", ("b", 2, "topology.rdzv_endpoint")),
        ({"SLURM_STEP_RESV_PORTS": "12001-12004"}, None, ("gpu01", 12001, "SLURM_STEP_RESV_PORTS")),
        ({"MASTER_ADDR": "a", "SLURM_STEP_RESV_PORTS": "12001"}, None, ("a", 12001, "SLURM_STEP_RESV_PORTS")),
    ],
)
def test_tasks_of_srun_meet_where_something_says(added, endpoint, expected):
    place = found({**SRUN, **added}, endpoint=endpoint)
    assert (place.host, place.port, place.port_from) == expected


def test_tasks_of_srun_on_one_node_meet_on_loopback():
    """No other machine needs to reach them."""
    one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "5"}
    assert found({**SRUN, **one}).host == "127.0.0.1"


@given(job=st.integers(1, 10**8), step=st.integers(0, 10**4))
def test_a_derived_port_is_below_those_of_outgoing_connections_and_differs_between_steps(job, step):
    def port(**changed: int) -> int:
        return found({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(changed.get("step", step))}).port

    assert 1024 < port() < 32768
    assert port() != port(step=step + 1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        without(SRUN, "SLURM_STEP_ID"),  # a batch script
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # salloc's interactive shell
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
        {**SRUN, "SLURM_PTY_PORT": "45418"},  # srun --pty bash
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"},
        {**KUBERNETES, "WORLD_SIZE": "1", "RANK": "0"},  # a single pod
        without(TORCHRUN, "TORCHELASTIC_RUN_ID"),  # a command that one of our own ranks has started
        {"WORLD_SIZE": "8"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
    ],
    ids=range(10),
)
def test_a_process_that_is_no_rank_is_left_alone(environ):
    assert detect(environ) is None


def test_kubernetes_is_seen():
    place = found({**KUBERNETES, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto"})
    assert (place.starter, place.rank, place.local_rank, place.nnodes) == ("Kubernetes", 1, 0, 4)
    assert (place.procs_per_node, place.host, place.port) == (1, "job-master-0", 23456)


def test_variables_set_by_hand_are_enough():
    environ = {**KUBERNETES, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = found(environ)
    assert (place.nnodes, place.procs_per_node, place.node_rank, place.local_rank) == (2, 2, 1, 1)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "7"}, r"WORLD_SIZE=7 processes on 2 nodes, 4 of them"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"local rank 2 of node 1, and would be local rank 1"),
        ({**TORCHRUN, "RANK": "9"}, r"Rank 9.*8 processes"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, r"MASTER_PORT=x must be a whole number"),
        (without(TORCHRUN, "MASTER_ADDR"), r"MASTER_ADDR isn't set, but RANK=5"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, r"5,3 \(8 tasks on 2 nodes\)"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, r"12 tasks on 3 nodes, but SLURM_STEP_NUM_TASKS=8"),
        ({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}, r"local rank 2 of\s+node 0.*--distribution=block"),
        ({**SRUN, "RANK": "4"}, r"RANK=4, but srun says 5"),
        ({**SRUN, "WORLD_SIZE": "4"}, r"WORLD_SIZE=4, but srun says 8"),
        ({**KUBERNETES, "PET_NPROC_PER_NODE": "4"}, r"PET_NPROC_PER_NODE=4 is an option for torchrun"),
        ({"PET_NNODES": "1:4"}, r"PET_NNODES=1:4 is an option for torchrun"),
        ({**KUBERNETES, "LOCAL_RANK": "0"}, r"LOCAL_WORLD_SIZE isn't set"),
        ({**KUBERNETES, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, r"WORLD_SIZE=4 isn't a multiple of .*=3"),
    ],
)
def test_a_contradiction_is_refused_with_both_numbers(environ, message):
    with pytest.raises(TopologyError, match=f"(?s){message}"):
        detect(environ)


@pytest.mark.parametrize(
    ("changed", "quiet"),
    [({"WORLD_SIZE": "7", "RANK": "0"}, False), ({"WORLD_SIZE": "7"}, True), ({"LOCAL_RANK": "2"}, False)],
)
def test_what_all_ranks_see_is_reported_by_rank_0_alone(changed, quiet):
    with pytest.raises(TopologyError) as error:
        detect({**TORCHRUN, **changed})
    assert isinstance(error.value, ToldByRankZeroError) is quiet


def test_a_typed_endpoint_that_contradicts_is_refused_with_both():
    with pytest.raises(TopologyError, match=r"(?s)node7:29400.*node0:40001"):
        detect(TORCHRUN, endpoint="node7:29400")
    assert detect(TORCHRUN, endpoint="node0:40001") is not None
    assert detect({}, endpoint="anything") is None


@pytest.mark.parametrize("text", ["node0", "node0:", ":29400", "node0:0", "node0:65536", "node0:x"])
def test_a_wrong_endpoint_is_refused(text):
    assert split_endpoint("[::1]:29400") == ("::1", 29400)
    with pytest.raises(TopologyError, match="HOST:PORT"):
        split_endpoint(text)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40))
def test_tasks_per_node_are_read_as_slurm_writes_them(counts):
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
        ("gpu[01-04,07]", "gpu01"),
        ("gpu[07,09-10],cpu1", "gpu07"),
        ("a1,b[1-2]", "a1"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("n-1.cluster.org,n-2.cluster.org", "n-1.cluster.org"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["recipe=toy"], False),
        (["launcher=auto"], False),
        (["launcher=adopted"], False),
        (["launcher=local"], True),
        (["launcher.name=elastic"], True),
        (["launcher=local", "launcher=auto"], False),
    ],
)
def test_a_typed_launcher_wins(arguments, own):
    assert chooses_own_ranks(arguments) is own


def test_a_typed_value_is_the_last_one():
    assert typed_value(["a=1", "b=2", "a=3"], "a") == "3"
    assert typed_value(["a=1", "a=null"], "a") is None
    assert typed_value(["b=1"], "a") is None


@pytest.mark.parametrize(
    "added", [["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "1"], ["--local-rank=1"]], ids=" ".join
)
def test_the_arguments_of_old_launchers_are_left_out(added):
    assert without_launch_arguments(["a=1", *added, "b=2"]) == ["a=1", "b=2"]
