"""Put together what the ranks have recorded of the steps. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COUNTS = ("count", "zeros", "inf", "nan")


def merged(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with what all ranks have recorded. ranks: the content of their files, in order."""
    steps = []
    for of_step in zip(*(rank["steps"] for rank in ranks), strict=True):
        micro_batches = []
        for rank, step in zip(ranks, of_step, strict=True):
            for number, micro in enumerate(step["micro_batches"]):
                micro_batches.append({"rank": rank["rank"], "micro_batch": number, **micro})
        anomalies = [step["anomaly"] for step in of_step if step["anomaly"] is not None]
        steps.append(
            {
                "step": of_step[0]["step"],
                "epoch": of_step[0]["epoch"],
                "micro_batches": micro_batches,
                "inputs": _summed(step["inputs"] for step in of_step),
                "modules": _modules([step["modules"] for step in of_step]),
                "weights": _weights(step["weights"] for step in of_step),
                "anomaly": anomalies[0] if anomalies else None,
            }
        )
    return steps


def metric_names(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of losses and metrics, as they are logged, without the `train/` before them."""
    names: dict[str, None] = {}
    for step in steps:
        for micro in step["micro_batches"]:
            for output in micro["outputs"]:
                prefix = f"{output['objective']}/" if output["objective"] else ""
                names |= dict.fromkeys([f"{prefix}loss", *(f"{prefix}{name}" for name in output["metrics"])])
    return list(names)


def _modules(of_ranks: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Return the modules of all ranks: the largest of the largest values, and the sums of counts."""
    modules: dict[str, dict[str, Any]] = {}
    for of_rank in of_ranks:
        if of_rank is None:
            return None
        for module in of_rank:
            name = module["name"]
            if name not in modules:
                modules[name] = dict(module)
                continue
            for part in ("activations", "gradients"):
                modules[name][part] = _sum_of(modules[name][part], module[part])
    return list(modules.values())


def _summed(of_ranks: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    total = None
    for of_rank in of_ranks:
        total = _sum_of(total, of_rank)
    return total


def _sum_of(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if one is None or other is None:
        return one or other
    largest = max(one["absmax"], other["absmax"], key=float)
    return {"absmax": largest, **{name: one[name] + other[name] for name in _COUNTS}}


def _weights(of_ranks: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parameters of all ranks, each once: replicas have the same, and stages each their own."""
    weights: dict[str, dict[str, Any]] = {}
    for of_rank in of_ranks:
        for weight in of_rank:
            weights.setdefault(weight["name"], dict(weight))
    return list(weights.values())
