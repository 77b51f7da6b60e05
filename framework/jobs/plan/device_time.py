"""How long a step would take on a GPU of `plan.device`: its trace, at a share of the speeds of the data sheet.

Each operator takes what its FLOPs or its bytes take, whichever is longer, but no less than Python needs to start it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from framework.config.schema import Config, Precision
from framework.config.topology import Topology
from framework.jobs.plan.duration import cost_of, exchange_seconds
from framework.jobs.plan.roofline import Speed, bounds_of
from framework.jobs.plan.trace import Operator, Trace
from framework.training.flops import peak_of_gpu


class _Rates(NamedTuple):
    """Bytes per second of a GPU."""

    memory: float
    # To the other GPUs of its node, in one direction.
    link: float


# From NVIDIA's data sheets: memory bandwidth; NVLink in one direction, where a server has it, otherwise PCIe.
RATES: Final[Mapping[str, _Rates]] = {
    "NVIDIA B200": _Rates(8.0e12, 900e9),
    "NVIDIA H200": _Rates(4.8e12, 450e9),
    "NVIDIA H100 80GB HBM3": _Rates(3.35e12, 450e9),
    "NVIDIA A100-SXM4-80GB": _Rates(2.04e12, 300e9),
    "NVIDIA A100-SXM4-40GB": _Rates(1.56e12, 300e9),
    "NVIDIA L40S": _Rates(0.86e12, 32e9),
    "NVIDIA L4": _Rates(0.30e12, 32e9),
    "NVIDIA A10": _Rates(0.60e12, 32e9),
    "Tesla T4": _Rates(0.32e12, 16e9),
    "Tesla V100-SXM2-16GB": _Rates(0.90e12, 150e9),
    "NVIDIA GeForce RTX 4090": _Rates(1.01e12, 32e9),
    "NVIDIA GeForce RTX 3090": _Rates(0.94e12, 32e9),
}
# Of each GPU to other nodes: 200 Gbit/s.
_NETWORK = 25e9
# What a step reaches of the data sheet.
_REACHED_FLOPS = 0.5
_REACHED_BYTES = 0.7
# Python, autograd and the driver, for one operator: of eager PyTorch on a server's CPU.
_START_S = 10e-6
_PRECISIONS: Final[Mapping[torch.dtype | None, Precision]] = {
    torch.bfloat16: "bf16-mixed",
    torch.float16: "16-mixed",
    torch.float32: "32-true",
}
ASSUMED = (
    f"operators reach {_REACHED_FLOPS:.0%} of the arithmetic and {_REACHED_BYTES:.0%} of the memory bandwidth of the "
    f"data sheet; Python takes {_START_S * 1e6:g} µs to start one",
    f"the exchange runs beside the backward, at {_REACHED_BYTES:.0%} of NVLink or PCIe in a node; between nodes at "
    f"{_NETWORK * 8 / 1e9:g} Gbit/s a GPU, or as plan.preflight=RUN has measured it",
    "the data is always there in time; validations and checkpoints take no time",
    "not checked on a GPU",
)


def device_time(
    trace: Trace, config: Config, topology: Topology, *, device: str, plan: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the time of a step and of the run, under the keys listed in `plan.job`; None if the GPU isn't known.

    Args:
        trace: of a step of rank 0.
        device: the GPU's name, as torch has it.
        plan: what else `estimate` found.
    """
    rates = RATES.get(device)
    peak = peak_speed(config, device=device)
    if rates is None or peak is None:
        return None
    reached = Speed(lambda operator: _REACHED_FLOPS * peak.flops_per_s(operator), _REACHED_BYTES * peak.bytes_per_s)
    bounds = bounds_of(trace, reached)
    device_s = bounds.compute_s + bounds.memory_s
    parts = {
        "compute": bounds.compute_s,
        "memory": bounds.memory_s,
        "overhead": max(0.0, bounds.operators * _START_S - device_s),
        "exchange": max(0.0, _exchange_seconds(config, topology, rates, plan["traffic"]) - bounds.backward_s),
    }
    step_s = sum(parts.values())
    hours = None
    if plan["steps"]["total"] is not None:
        hours = step_s * plan["steps"]["total"] / 3600
    return {
        "step_s": step_s,
        "parts": parts,
        "bound_by": max(parts, key=lambda part: parts[part]),
        "flops": bounds.flops,
        "mfu": _REACHED_FLOPS * bounds.at_peak_s / step_s,
        "hours": hours,
        "cost": cost_of(hours, config.plan, nnodes=topology.nnodes),
        "assumed": list(ASSUMED),
    }


def peak_speed(config: Config, *, device: str) -> Speed | None:
    """Return the speed of a GPU in its data sheet; None if the GPU isn't known."""
    rates = RATES.get(device)
    in_float32 = peak_of_gpu(device, "32-true", allows_tf32=False)
    if rates is None or in_float32 is None:
        return None
    # torch's default computes convolutions in TF32, and matrix products in float32.
    products_in_tf32 = config.trainer.matmul_precision in ("high", "medium")

    def flops_per_s(operator: Operator) -> float:
        allows_tf32 = products_in_tf32 or operator.name.startswith("aten.convolution")
        precision = _PRECISIONS.get(operator.dtype, "32-true")
        # What has no tensor cores for a type computes in float32.
        return peak_of_gpu(device, precision, allows_tf32=allows_tf32) or in_float32

    return Speed(flops_per_s, rates.memory)


def _exchange_seconds(config: Config, topology: Topology, rates: _Rates, traffic: Mapping[str, int]) -> float:
    """Return how long the ranks exchange in a step."""
    if topology.world_size == 1:
        return 0.0
    measured_s = exchange_seconds(config.plan, traffic["reduced"])
    if measured_s is not None:
        return measured_s
    bandwidth = rates.link
    if topology.nnodes > 1:
        bandwidth = min(rates.link, _NETWORK * topology.gpus_per_node)
    return traffic["ring_per_rank"] / (_REACHED_BYTES * bandwidth)
