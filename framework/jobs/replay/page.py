"""What job=replay prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.system.formatting import format_count, format_table, terminal_width

_SHOWN_INDICES = 4
_SHOWN_ROWS = 60


def render(content: Mapping[str, Any], *, rank: int | None) -> str:
    """Return the text of an answer. rank: show the micro-batches of this one only."""
    lines: list[str] = []
    for step in content["steps"]:
        lines += ["", f"Step {step['step']:,} (epoch {step['epoch']})", ""]
        lines.append(_losses(step, rank=rank))
        layers = _layers(step)
        if layers:
            lines += ["", layers]
        if step["modules"] is None:
            lines += ["", "The model is compiled, so what passes through its modules isn't recorded."]
        if step["anomaly"] is not None:
            lines += ["", step["anomaly"]]
    lines += ["", *_check(content)]
    if content["pictures"] is not None:
        lines.append(f"Pictures of the samples: {content['pictures']}")
    alone = content["alone"]
    if alone is not None:
        losses = {True: "the same losses", False: "other losses", None: "a loss"}[alone["equal"]]
        lines += ["", f"Alone, rank {alone['rank']} gives {losses}, and these gradients of its own:", ""]
        lines.append(_layers(alone))
    if content["file"] is not None:
        lines.append(f"Batch, weights and generators of the step: {content['file']}")
    return "\n".join(lines)


def _losses(step: Mapping[str, Any], *, rank: int | None) -> str:
    """Return the table of the micro-batches: losses, metrics, samples."""
    names: dict[str, None] = {}
    rows = []
    # In a pipeline, the first ranks have the same samples as the last one, and no output.
    with_output = [micro["indices"] for micro in step["micro_batches"] if micro["outputs"]]
    for micro in step["micro_batches"]:
        is_shown_already = not micro["outputs"] and micro["indices"] in with_output
        if is_shown_already or (rank is not None and micro["rank"] != rank):
            continue
        values: dict[str, Any] = {}
        for output in micro["outputs"]:
            prefix = f"{output['objective']}/" if output["objective"] else ""
            values[f"{prefix}loss"] = output["loss"]
            for name, value in output["metrics"].items():
                values[f"{prefix}{name}"] = value
        names |= dict.fromkeys(values)
        rows.append((micro, values))

    table: list[Sequence[str]] = [("rank", "micro", *names, "samples", "which")]
    for micro, values in rows:
        cells = [_number(values.get(name)) for name in names]
        number = str(len(micro["indices"]))
        table.append((str(micro["rank"]), str(micro["micro_batch"]), *cells, number, _samples(micro)))
    return format_table(table, width=terminal_width())


def _samples(micro: Mapping[str, Any]) -> str:
    """Return which samples a micro-batch has: their names, else their indices in the data set."""
    samples = micro["names"] or micro["indices"]
    shown = ", ".join(map(str, samples[:_SHOWN_INDICES]))
    if len(samples) > _SHOWN_INDICES:
        shown += f" … {samples[-1]}"
    return shown


def _layers(step: Mapping[str, Any]) -> str:
    """Return the table of the layers, in the order of the forward, then of parameters in no such layer.

    It is empty if the step failed before its forward.
    """
    weights = _weights_by_layer(step["weights"])
    rows: list[Sequence[str]] = [("layer", "output", "", "gradient", "", "weights' gradient", "update/weight")]
    if step["inputs"] is not None:
        rows.append(("the model's input", *_values(step["inputs"])))
    for module in step["modules"] or ():
        label = module["name"] or "the model"
        own = weights.pop(module["name"], None)
        cells = [f"{label} ({module['type']})", *_values(module["activations"]), *_values(module["gradients"])]
        rows.append((*cells, *_of_weights(own)))
    for name, own in weights.items():
        rows.append((name or "the model", "", "", "", "", *_of_weights(own)))
    if len(rows) == 1:
        return ""
    if len(rows) > _SHOWN_ROWS:
        left_out = len(rows) - _SHOWN_ROWS
        rows = [*rows[:_SHOWN_ROWS], (f"… {format_count(left_out, 'more layer')} in replay.json",)]
    return format_table(rows, width=terminal_width())


def _values(values: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the largest absolute value, and the shares of zeros, infinite values and NaN, if there are any."""
    if values is None:
        return "–", ""
    shares = []
    for name, word in (("zeros", "zeros"), ("inf", "inf"), ("nan", "NaN")):
        if values[name]:
            shares.append(f"{_share(values[name], values['count'])} {word}")
    return _number(values["absmax"]), ", ".join(shares)


def _share(number: int, count: int) -> str:
    share = number / count
    # One NaN among a million values mustn't be shown as none.
    return f"{share:.0%}" if share >= 0.005 else f"{number:,}"


def _weights_by_layer(weights: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    layers: dict[str, list[Mapping[str, Any]]] = {}
    for weight in weights:
        layers.setdefault(weight["name"].rpartition(".")[0], []).append(weight)
    return layers


def _of_weights(weights: Sequence[Mapping[str, Any]] | None) -> tuple[str, str]:
    """Return the norm of a layer's gradients, and the size of its update as a share of its weights'."""
    if weights is None:
        return "", ""
    gradients = [weight["gradient_norm"] for weight in weights if weight["gradient_norm"] is not None]
    gradient = _number(_norm(gradients)) if gradients else "–"
    size = _norm([weight["norm"] for weight in weights])
    updates = [weight["update_norm"] for weight in weights if weight["update_norm"] is not None]
    if not updates:
        return gradient, "–"
    update = _norm(updates)
    return gradient, _number(update / size) if size else _number(update)


def _norm(norms: Sequence[float | str]) -> float:
    squares: float = sum(float(norm) ** 2 for norm in norms)
    return float(squares**0.5)


def _number(value: float | str | None) -> str:
    if value is None:
        return "–"
    return f"{float(value):.4g}"


def _check(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the repetition compares with what the run has logged."""
    check = content["check"]
    if check is None:
        yield "The run hasn't logged the interval with this step, so nothing tells if the repetition is exact."
        return
    names = ", ".join(check["values"])
    if check["same_place"]:
        how = "bit for bit"
    else:
        how = (
            f"within {check['tolerance']:.1e} of its size: the run had {check['processes']} processes, here "
            f"{content['processes']} on {content['devices'][0]}, and the order of sums differs"
        )
    if check["equal"]:
        yield f"As logged at step {check['step']:,}, {how}: {names}."
        return
    yield f"Not as logged at step {check['step']:,}, {how}:"
    rows = [("", "logged", "repeated")]
    for name, value in check["values"].items():
        rows.append((name, str(value["logged"]), str(value["repeated"])))
    yield format_table(rows)
    if content["changes"]:
        yield f"Changed since: {'; '.join(content['changes'])}."
