"""The command lines that start the same run."""

from __future__ import annotations

import shlex
from typing import Any

from tests.helpers.internals import Request, Topology, commands, environment, parse
from tests.unit.config.raw import raw_config

IN_PROCESS = {"launcher._target_": "framework.launch.in_process.InProcessLauncher"}
TWO_NODES = Topology(nnodes=2, procs_per_node=8, gpus_per_node=8, span=1)


def lines(topology: Topology, *overrides: str, **changes: Any) -> dict[str, str]:
    raw = raw_config({key.replace("__", "."): value for key, value in changes.items()})
    request = Request(config=parse(raw), raw=raw, overrides=overrides)
    return {name: shlex.join(words) for name, words in commands(request, topology, own_keys=("plan",)).items()}


def test_commands_for_one_node() -> None:
    typed = ("job=plan", "recipe=toy", "plan.format=json", "trainer.gpus=0", "topology.procs_per_node=2")
    kept = "recipe=toy trainer.gpus=0 topology.procs_per_node=2"
    assert lines(Topology(1, 2, 0, 1), *typed) == {
        "framework": f"python -m framework {kept}",
        "torchrun": f"torchrun --standalone --nproc-per-node=2 -m framework {kept}",
        "srun": f"srun --nodes=1 --ntasks-per-node=2 python -m framework {kept}",
    }


def test_commands_for_several_nodes() -> None:
    typed = ("recipe=toy", "trainer.gpus=8", "topology.nnodes=2", "topology.node_rank=1", "job=plan")
    kept = "recipe=toy trainer.gpus=8 topology.nnodes=2"
    assert lines(TWO_NODES, *typed, topology__nnodes=2) == {
        "framework": f"python -m framework {kept} topology.node_rank=NODE topology.rdzv_endpoint=HOST:29400",
        "torchrun": "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --nproc-per-node=8 "
        f"-m framework {kept}",
        "srun": f"srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m framework {kept}",
    }
    changes = {"topology__nnodes": 2, "topology__rdzv_endpoint": "node0:4000", "launcher__max_restarts": 3}
    found = lines(TWO_NODES, "topology.rdzv_endpoint=node0:4000", "launcher=elastic", **changes)
    where = "topology.node_rank=NODE topology.rdzv_endpoint=node0:4000"
    assert found["framework"] == f"python -m framework launcher=elastic {where}"
    assert "--rdzv-endpoint=node0:4000 --nproc-per-node=8 --max-restarts=3 " in found["torchrun"]


def test_first_and_last_ranks_have_their_environment() -> None:
    config = parse(raw_config({"topology.nnodes": 2, "topology.rdzv_endpoint": "[fe80::1]:4000"}))
    words = shlex.split(lines(TWO_NODES, topology__nnodes=2, topology__rdzv_endpoint="[fe80::1]:4000")["framework"])
    # The value is quoted for Hydra.
    assert words[-1] == "topology.rdzv_endpoint='[fe80::1]:4000'"
    found = environment(config, TWO_NODES)
    assert found["first_rank"] == {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    assert found["last_rank"] == {"RANK": "15", "LOCAL_RANK": "7", "GROUP_RANK": "1"}
    wanted = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "4000", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert wanted.items() <= found["common"].items()


def test_a_run_in_place_sets_no_environment() -> None:
    found = environment(parse(raw_config(IN_PROCESS)), Topology(1, 1, 0, 1))
    assert found == {"common": {}, "first_rank": {}, "last_rank": {}}
