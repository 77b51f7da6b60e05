"""What ranks run that meet in a process group; a failed assertion is the rank's failure and ends the run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from framework.config.schema import BackendConfig, BackendName, Duration, InitMethod
from framework.distributed.context import Context, make_context
from framework.distributed.group import process_group
from framework.launch.plan import RankArguments


def backend(*, init_timeout_s: float = 30.0) -> BackendConfig:
    return BackendConfig(
        name=BackendName.GLOO,
        init_method=InitMethod.ENV,
        init_timeout=Duration(init_timeout_s),
        timeout=Duration(30.0),
    )


def context_of(rank: RankArguments) -> Context:
    return make_context(
        rank.topology, node_rank=rank.node_rank, local_rank=rank.local_rank, backend_name=BackendName.AUTO
    )


@contextmanager
def group(rank: RankArguments) -> Iterator[Context]:
    context = context_of(rank)
    with process_group(context, backend(), rendezvous=rank.rendezvous):
        yield context
    assert not dist.is_initialized()


def leave(rank: RankArguments, value: Any) -> None:
    Path(rank.run_dir, f"rank_{rank.rank}.json").write_text(json.dumps(value))


def wait_for(path: Path, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
