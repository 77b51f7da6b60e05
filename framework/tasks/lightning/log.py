"""`self.log` of a LightningModule: values are accumulated as its arguments say, and reduced over ranks when read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.metric_sync import is_torchmetric, sync_through, why_not_merged
from framework.errors import TargetError
from framework.types import Batch, Interval

LogPart = Literal["train", "val", "test"]

_PREFIXES = {"train": "train|training", "val": "val|valid|validation", "test": "test"}
_REDUCTIONS = ("mean", "sum", "min", "max")
_LOGGED_BY_THE_FRAMEWORK = re.compile(r"loss|mfu|(lr|grad_norm)(/.+)?|.+_per_s")
"""Names of train/ that each logged step has."""
_METRIC = "metric"  # the reduction of a torchmetrics.Metric, by its own rules

_Entry = dict[str, Any]
"""`reduction`, `value` (a tensor of one element, or a number) and `weight`; of a metric, `path` in its place."""


def short_name(name: str, part: LogPart) -> str:
    """Return the name without its part, which the framework puts in front: `val_loss` is `loss` of val."""
    match = re.fullmatch(rf"(?:{_PREFIXES[part]})[_/. -](.+)", name)
    return match[1] if match else name


@final
class Log:
    """The values that a module has logged since they were last read, by interval and name."""

    def __init__(self, module: Any, context: Context, *, infer_batch_size: Callable[[Batch], int]) -> None:
        self.module, self._context, self._infer = module, context, infer_batch_size
        self._part: LogPart | None = None  # None: where nothing can be logged
        self.set_name = ""  # of one of several sets that are evaluated
        self._step_names: set[str] = set()  # that training steps have logged
        self._in_step = False
        self._batch: Batch = None
        self._batch_size: int | None = None  # inferred
        self._given_size: int | None = None  # by the last call in this step that gave one
        self._names: dict[tuple[LogPart, str], str] = {}  # as they were given
        self._entries: dict[Interval, dict[str, _Entry]] = {interval: {} for interval in get_args(Interval)}
        self._paths = {id(each): path for path, each in module.named_modules() if is_torchmetric(each)}
        self._dtype = torch.float32 if context.device.type == "mps" else torch.float64
        for metric in self.metrics.values():
            sync_through(metric, context)

    def __deepcopy__(self, memo: object) -> Log:
        return self  # the copy is a model with averaged weights, which logs nothing of its own

    @property
    def metrics(self) -> dict[str, Any]:
        """The module's torchmetrics by their names in it."""
        return {path: self.module.get_submodule(path) for path in self._paths.values()}

    @contextmanager
    def within(self, part: LogPart | None, *, in_step: bool = False) -> Iterator[None]:
        """Return a context for a hook or step of this part; None: nothing can be logged in it."""
        before = self._part, self._in_step
        self._part, self._in_step = part, in_step
        yield
        self._part, self._in_step = before

    def begin_batch(self, batch: Batch) -> None:
        self._batch, self._batch_size, self._given_size = batch, None, None

    @property
    def num_samples(self) -> int:
        """The size of the current batch: the `batch_size` that the step gave, else the one that Lightning infers."""
        return self._inferred_size if self._given_size is None else self._given_size

    @property
    def _inferred_size(self) -> int:
        if self._batch_size is None:
            self._batch_size = self._infer(self._batch)
        return self._batch_size

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        *_: Any,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        **__: Any,
    ) -> None:
        """Take the place of `LightningModule.log`. All ranks count, whatever `sync_dist` says.

        Raises TargetError for what can't be logged.
        """
        part, is_training_step = self._part, self._part == "train" and self._in_step
        on_step = is_training_step if on_step is None else on_step
        on_epoch = not is_training_step if on_epoch is None else on_epoch
        reduction = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", repr(reduce_fx))
        if part is None:
            raise self._refused(name, "nothing can be logged here. Log in a step, or in a hook of an epoch.")
        if reduction not in _REDUCTIONS:
            raise self._refused(name, f"reduce_fx={reduction}. Use one of {', '.join(_REDUCTIONS)}.")
        if part != "train" and not on_epoch:
            raise self._refused(name, "on_epoch=False: an evaluation is logged once, as a whole. Leave it out.")
        if self._names.setdefault((part, short := short_name(name, part)), name) != name:
            raise self._refused(name, f"it is {part}/{short}, and so is {self._names[part, short]!r}. Rename one.")
        if rank_zero_only and not self._context.is_main:
            return
        self._given_size = self._given_size if batch_size is None else batch_size
        metric = value if is_torchmetric(value) else None
        on_step = on_step and part == "train"
        value = value if metric is None else metric._forward_cache  # of this batch, if the metric was called
        if on_step and value is not None:
            self._step_names.add(short)
            self._add("step", short, self._entry(name, value, reduction, size=batch_size))
        if on_epoch:
            entry = (
                self._entry(name, value, reduction, size=batch_size)
                if metric is None
                else self._metric_entry(name, metric)
            )
            if part != "train":
                self._add("evaluation", f"{self.set_name}/{short}".lstrip("/"), entry)
            else:
                self._add("epoch", f"{short}_epoch" if on_step else short, entry)

    def reduce(self, interval: Interval) -> dict[str, float]:
        """Return the values over all ranks, and clear them. Every rank must call it; waits for the device."""
        merged: dict[str, _Entry] = {}
        for entries in gather_to_all(self._plain(interval), self._context):
            _add_all(merged, entries)
        self._entries[interval] = {}
        values: dict[str, float] = {}
        used = {entry["path"] for entry in merged.values() if entry["reduction"] == _METRIC}
        for name, entry in merged.items():
            if entry["reduction"] == _METRIC:
                values[name] = float(self._number(name, self.module.get_submodule(entry["path"]).compute()))
            else:
                values[name] = float(entry["value"]) / entry["weight"]
        for path in used:
            self.metrics[path].reset()
        return self._told_from_steps(values) if interval == "epoch" else values

    def _told_from_steps(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return an epoch's values, with Lightning's suffix `_epoch` for names that steps log, too."""
        renamed = {}
        for name, value in values.items():
            is_of_steps = name in self._step_names or _LOGGED_BY_THE_FRAMEWORK.fullmatch(name) is not None
            renamed[f"{name}_epoch" if is_of_steps else name] = value
        return {**renamed, **{name: value for name, value in values.items() if name in renamed}}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values and the states of its torchmetrics: plain types and tensors."""
        metrics = {
            path: {"count": metric._update_count, "state": _copied(metric.metric_state)}
            for path, metric in self.metrics.items()
        }
        entries = {interval: self._plain(interval) for interval in self._entries}
        return {"entries": entries, "metrics": metrics, "step_names": sorted(self._step_names)}

    def load_state_dict(self, state: Mapping[str, Any], *, adds: bool = False) -> None:
        """Load what `state_dict` returned; with `adds`, add it to the present state."""
        for interval, entries in state["entries"].items():
            if not adds:
                self._entries[interval] = {}
            _add_all(self._entries[interval], entries, dtype=self._dtype, device=self._context.device)
        self._step_names.update(state.get("step_names", ()))  # earlier versions have none
        for path, kept in state["metrics"].items():
            metric = self.metrics[path]
            if adds and kept["count"]:
                metric.merge_state(kept["state"])
            elif not adds:
                metric.reset()
                metric._update_count = kept["count"]
                for name, value in _copied(kept["state"], device=metric.device).items():
                    setattr(metric, name, value)

    def _entry(self, name: str, value: Any, reduction: str, *, size: int | None) -> _Entry:
        weight = 1
        if self._in_step and reduction == "mean":
            weight = self._inferred_size if size is None else size
        number = torch.as_tensor(self._number(name, value), dtype=self._dtype).detach().reshape(())
        return {"reduction": reduction, "value": number * weight, "weight": weight}

    def _metric_entry(self, name: str, metric: Any) -> _Entry:
        reason = why_not_merged(metric) if self._context.world_size > 1 else None
        if reason is not None:
            raise self._refused(name, f"{reason}, so its value on several processes wouldn't be that of one.")
        if id(metric) not in self._paths:
            raise self._refused(name, f"the {type(metric).__name__} is no attribute of the module. Make it one.")
        return {"reduction": _METRIC, "path": self._paths[id(metric)]}

    def _number(self, name: str, value: Any) -> Any:
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            return value
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise self._refused(name, f"the value is {shown}. Log one number, or several of them by log_dict.")

    def _add(self, interval: Interval, name: str, entry: _Entry) -> None:
        entries = self._entries[interval]
        entries[name] = _merged(entries[name], entry) if name in entries else entry

    def _plain(self, interval: Interval) -> dict[str, _Entry]:
        """Return the entries as plain numbers; waits for the device once."""
        own = self._entries[interval]
        numbers = [each["value"].to(self._context.device) for each in own.values() if "value" in each]
        found = iter(torch.stack(numbers).tolist() if numbers else ())
        return {name: {**each, "value": next(found)} if "value" in each else each for name, each in own.items()}

    def _refused(self, name: str, what: str) -> TargetError:
        return TargetError(f"{type(self.module).__name__}: self.log({name!r}): {what}")


def _add_all(
    entries: dict[str, _Entry],
    others: Mapping[str, _Entry],
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> None:
    """Add plain entries, as tensors."""
    for name, each in others.items():
        if "value" in each:
            each = {**each, "value": torch.tensor(each["value"], dtype=dtype, device=device)}
        entries[name] = _merged(entries[name], each) if name in entries else each


def _merged(one: _Entry, other: _Entry) -> _Entry:
    reduction = one["reduction"]
    if reduction == _METRIC:
        return other
    if reduction in ("min", "max"):
        extreme = torch.minimum if reduction == "min" else torch.maximum
        return {**one, "value": extreme(one["value"], other["value"])}
    weight = one["weight"] + other["weight"] if reduction == "mean" else 1
    return {**one, "value": one["value"] + other["value"], "weight": weight}


def _copied(state: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of a metric as tensors of its own: on the CPU for a checkpoint, else on `device`."""
    place = torch.device("cpu") if device is None else device

    # A list may hold what isn't a tensor: encoded masks, texts.
    copies: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().to(place, copy=True), dict(state))
    return copies
