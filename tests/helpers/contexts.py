"""Contexts of ranks on the CPU, for what needs no process group."""

from __future__ import annotations

import torch

from tests.helpers.internals import Context, Topology

CPU = torch.device("cpu")


def cpu_context(rank: int = 0, *, world_size: int = 1) -> Context:
    return Context(Topology(1, world_size, 0, 1), rank, rank, 0, (CPU,), "gloo")
