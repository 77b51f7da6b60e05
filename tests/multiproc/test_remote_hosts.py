"""Hosts that share no disk, and an S3 server that both reach: a run goes on where it is resumed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers import processes, results, trouble
from tests.helpers.network import Host, network
from tests.helpers.requirements import require
from tests.helpers.s3 import S3, s3_server
from tests.helpers.trouble import EVERY, Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300), pytest.mark.exhaustive]

Train = Callable[..., Path]
START_S = 120.0
BUCKET = "runs"
OUTPUTS = f"path.outputs=s3://{BUCKET}/team"
TOY = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "checkpoint.every_n_steps=20")
MAKE_BUCKET = "import fsspec; fsspec.filesystem('s3').mkdir('runs')"
AWAIT_CHECKPOINT = """
import time, fsspec
files = fsspec.filesystem("s3", use_listings_cache=False)
while not files.glob("runs/team/toy/*/checkpoints/last"):
    time.sleep(0.1)
"""
READ_LAST = """
import fsspec
files = fsspec.filesystem("s3", use_listings_cache=False)
(last,) = files.glob("runs/team/toy/*/checkpoints/last")
print(last.split("/")[3], files.cat_file(last).decode())
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Three hosts on one network: one has the server."""
    require("netns")
    with network(3) as hosts:
        yield hosts


@pytest.fixture
def server(hosts: list[Host]) -> Iterator[S3]:
    with s3_server(host=hosts[0].address, prefix=hosts[0].command()) as server:
        yield server


def answer(host: Host, code: str, server: S3) -> str:
    """Return what a program prints on a host."""
    with host.started(sys.executable, "-c", code, env=server.env) as program:
        assert program.wait(timeout=START_S) == 0, program.printed()
        return program.stdout()


def test_a_killed_run_is_resumed_on_a_host_that_has_nothing_of_it(
    hosts: list[Host], server: S3, train: Train, tmp_path: Path, own_state: None
) -> None:
    _, first, second = hosts
    for host in (first, second):
        (tmp_path / host.name).mkdir()
    answer(first, MAKE_BUCKET, server)
    cpu = ("trainer.gpus=0", OUTPUTS)
    arguments = (*cpu, *TOY, "trainer.max_steps=1000000", f"path.cache={tmp_path / first.name / 'cache'}")
    with first.started_framework(*arguments, cwd=tmp_path / first.name, env=server.env) as killed:
        answer(second, AWAIT_CHECKPOINT, server)
        processes.kill_all(killed.processes())
    shutil.rmtree(tmp_path / first.name)

    name, last = answer(second, READ_LAST, server).split()
    steps = int(last.removeprefix("step_")) + 30
    url = f"s3://{BUCKET}/team/toy/{name}"
    cache = tmp_path / second.name / "cache"
    resuming = (*cpu, f"resume={url}", f"trainer.max_steps={steps}", f"path.cache={cache}")
    with second.started_framework(*resuming, cwd=tmp_path / second.name, env=server.env) as resumed:
        assert resumed.wait(timeout=START_S) == 0, resumed.printed()
        assert f"Fetching {url}/checkpoints/{last}" in resumed.stderr()

    whole = train(*TOY, f"trainer.max_steps={steps}")
    results.assert_same(results.weights(cache / "s3" / BUCKET / "team" / "toy" / name), results.weights(whole))


def test_a_node_without_a_shared_disk_restarts_from_the_bucket(
    hosts: list[Host], server: S3, train: Train, tmp_path: Path, own_state: None
) -> None:
    trouble.write_recipe(tmp_path, Fault("SIGKILL", rank=1, phase="forward", step=EVERY + 2))
    cache = tmp_path / "cache"
    cache.mkdir()
    answer(hosts[0], MAKE_BUCKET, server)
    typed = [
        "recipe=trouble",
        "topology=multi_node",
        "topology.nnodes=2",
        "topology.procs_per_node=1",
        f"topology.rdzv_endpoint={hosts[1].address}:29400",
        "launcher.max_restarts=1",
        OUTPUTS,
        f"path.cache={cache}",
    ]
    with ExitStack() as stack:
        nodes = []
        for rank, host in enumerate(hosts[1:]):
            # The cache of each is a disk of its own.
            mounted = f'mount -t tmpfs none {cache} && exec "$@"'
            program = [sys.executable, "-m", "framework", *typed, f"topology.node_rank={rank}"]
            command = host.started("sh", "-c", mounted, "sh", *program, cwd=tmp_path, env=server.env)
            nodes.append(stack.enter_context(command))
        for node in nodes:
            assert node.wait(timeout=START_S) == 0, "\n".join(node.printed() for node in nodes)
        assert "Restart 1 of 1" in nodes[0].stderr()
    assert not list(cache.iterdir())

    folder = tmp_path / "copy"
    answer(hosts[1], f"import fsspec; fsspec.filesystem('s3').get('runs/team', '{folder}', recursive=True)", server)
    (run_dir,) = (folder / "trouble").iterdir()
    last = (run_dir / "checkpoints" / "last").read_text()
    whole = train("recipe=trouble", "topology.procs_per_node=2")
    results.assert_same(results.weights(run_dir, last), results.weights(whole))
