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
from framework.types import Batch, Interval, is_logged_by_training

LogPart = Literal["train", "val", "test"]

_PREFIXES = {"train": "train|training", "val": "val|valid|validation", "test": "test"}
_REDUCTIONS = ("mean", "sum", "min", "max")
# The reduction of a torchmetrics.Metric, by its own rules.
_METRIC = "metric"

# Has `reduction`, `value` (a tensor of one element, or a number) and `weight`; of a metric, `path` in their place.
_Entry = dict[str, Any]


def _step_name(short: str) -> str:
    """Return the name of a step's value: `NAME_step` where the framework logs that name itself, but for the loss."""
    is_taken = short != "loss" and is_logged_by_training(short)
    return f"{short}_step" if is_taken else short


def short_name(name: str, part: LogPart) -> str:
    """Return the name without its part, which the framework puts in front: `val_loss` is `loss` of val."""
    match = re.fullmatch(rf"(?:{_PREFIXES[part]})[_/. -](.+)", name)
    return match[1] if match else name


def metric_name(monitor: str, val_dataloaders: Any) -> str:
    """Return the name here of a validation metric, such as `val_loss` or, of a set, `val_loss/dataloader_idx_1`."""
    match = re.fullmatch(r"(.+)/dataloader_idx_(\d+)", monitor)
    if match is None:
        return f"val/{short_name(monitor, 'val')}"
    set_name = match[2]
    if isinstance(val_dataloaders, Mapping):
        set_name = str(list(val_dataloaders)[int(match[2])])
    return f"val/{set_name}/{short_name(match[1], 'val')}"


@final
class Log:
    """The values that a module has logged since they were last read, by interval and name."""

    def __init__(self, module: Any, context: Context, *, infer_batch_size: Callable[[Batch], int]) -> None:
        self.module = module
        self._context = context
        self._infer_batch_size = infer_batch_size

        # Where the module is: in a step or hook of this part; None where nothing can be logged.
        self._part: LogPart | None = None
        self.in_step = False
        # The name of the set that is evaluated, if there are several.
        self.set_name = ""

        # The current batch, its size as Lightning infers it, and the one that the last call in this step gave.
        self._batch: Batch = None
        self._batch_size: int | None = None
        self._given_size: int | None = None

        # The names as the module gave them, by those in the logs.
        self._names: dict[tuple[LogPart, str], str] = {}
        # What training steps have logged last.
        self._last_step_values: dict[str, Any] = {}
        # Names that training steps have logged.
        self._step_names: set[str] = set()
        self._entries: dict[Interval, dict[str, _Entry]] = {interval: {} for interval in get_args(Interval)}
        self._paths = {id(child): path for path, child in module.named_modules() if is_torchmetric(child)}
        self._dtype = torch.float32 if context.device.type == "mps" else torch.float64
        for metric in self.metrics.values():
            sync_through(metric, context)

    def __deepcopy__(self, memo: object) -> Log:
        """Return the log itself: the copied module has averaged weights, and logs nothing of its own."""
        return self

    @property
    def metrics(self) -> dict[str, Any]:
        """The module's torchmetrics by their names in it."""
        return {path: self.module.get_submodule(path) for path in self._paths.values()}

    @contextmanager
    def within(self, part: LogPart | None, *, in_step: bool = False) -> Iterator[None]:
        """Return a context for a hook or step of this part; None: nothing can be logged in it."""
        part_before = self._part
        in_step_before = self.in_step
        self._part = part
        self.in_step = in_step
        try:
            yield
        finally:
            self._part = part_before
            self.in_step = in_step_before

    def begin_batch(self, batch: Batch) -> None:
        self._batch = batch
        self._batch_size = None
        self._given_size = None

    @property
    def num_samples(self) -> int:
        """The size of the current batch: the `batch_size` that the step gave, else the one that Lightning infers."""
        return self._inferred_size if self._given_size is None else self._given_size

    @property
    def _inferred_size(self) -> int:
        if self._batch_size is None:
            self._batch_size = self._infer_batch_size(self._batch)
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
        part = self._part
        if part is None:
            raise self._refused(name, "nothing can be logged here. Log in a step, or in a hook of an epoch.")

        # Lightning's defaults: a training step logs for the step, everything else for the epoch.
        is_training_step = part == "train" and self.in_step
        if on_step is None:
            on_step = is_training_step
        if on_epoch is None:
            on_epoch = not is_training_step
        if part != "train":
            # An evaluation is logged once, as a whole.
            on_epoch = True

        # Lightning takes a name, or a function such as torch.max.
        reduction = reduce_fx
        if not isinstance(reduction, str):
            reduction = getattr(reduce_fx, "__name__", repr(reduce_fx))
        if reduction not in _REDUCTIONS:
            raise self._refused(name, f"reduce_fx={reduction}. Use one of {', '.join(_REDUCTIONS)}.")
        short = self._short_name(name, part)

        if rank_zero_only and not self._context.is_main:
            return
        if batch_size is not None:
            # Modules give tensors, too, such as the number of targets.
            batch_size = int(batch_size)
            self._given_size = batch_size

        # A metric that was called has its value of this batch.
        value_now = value._forward_cache if is_torchmetric(value) else value
        on_step = on_step and part == "train"
        if on_step and value_now is not None:
            self._step_names.add(short)
            self._last_step_values[short] = value_now
            self._add("step", _step_name(short), self._entry(name, value_now, reduction, size=batch_size))
        if not on_epoch:
            return
        if is_torchmetric(value):
            entry = self._metric_entry(name, value)
        else:
            entry = self._entry(name, value, reduction, size=batch_size)
        if part != "train":
            self._add("evaluation", f"{self.set_name}/{short}".lstrip("/"), entry)
        elif on_step:
            self._add("epoch", f"{short}_epoch", entry)
        else:
            self._add("epoch", short, entry)

    def _short_name(self, name: str, part: LogPart) -> str:
        """Return the name without its part, and with `_2` appended if another name was shortened to the same."""
        short = short_name(name, part)
        number = 1
        own = short
        while self._names.setdefault((part, own), name) != name:
            number += 1
            own = f"{short}_{number}"
        return own

    def reduce(self, interval: Interval) -> dict[str, float]:
        """Return the values over all ranks, and clear them. Every rank must call it; waits for the device."""
        merged: dict[str, _Entry] = {}
        for entries in gather_to_all(self._plain(interval), self._context):
            _add_all(merged, entries)
        self._entries[interval] = {}

        values: dict[str, float] = {}
        computed = set()
        for name, entry in merged.items():
            if entry["reduction"] == _METRIC:
                path = entry["path"]
                computed.add(path)
                values[name] = float(self._number(name, self.module.get_submodule(path).compute()))
            else:
                values[name] = float(entry["value"]) / entry["weight"]
        # A metric may be logged under several names.
        for path in computed:
            self.metrics[path].reset()
        if interval == "epoch":
            return self._with_suffixes(values)
        return values

    def _with_suffixes(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return an epoch's values, with Lightning's suffix `_epoch` for names that steps log, too."""
        named = {}
        for name, value in values.items():
            is_of_steps = name in self._step_names or is_logged_by_training(name)
            if not is_of_steps:
                named[name] = value
            elif f"{name}_epoch" not in values:
                named[f"{name}_epoch"] = value
        return named

    def own_name(self, part: LogPart, short: str) -> str:
        """Return the name under which the module has logged a value."""
        return self._names.get((part, short), short)

    def last_step_value(self, short: str) -> float | None:
        """Return what the last training step logged, averaged over ranks; None if nothing. Every rank must call it."""
        value = self._last_step_values.get(short)
        values = gather_to_all(None if value is None else float(value), self._context)
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's values and the states of its torchmetrics: plain types and tensors."""
        metrics = {}
        for path, metric in self.metrics.items():
            metrics[path] = {"count": metric._update_count, "state": _copied(metric.metric_state)}
        entries = {interval: self._plain(interval) for interval in self._entries}
        names = [[part, short, name] for (part, short), name in self._names.items()]
        return {"entries": entries, "metrics": metrics, "step_names": sorted(self._step_names), "names": names}

    def load_state_dict(self, state: Mapping[str, Any], *, adds: bool = False) -> None:
        """Load what `state_dict` returned; with `adds`, add it to the present state."""
        for interval, entries in state["entries"].items():
            if not adds:
                self._entries[interval] = {}
            _add_all(self._entries[interval], entries, dtype=self._dtype, device=self._context.device)
        # Checkpoints of earlier versions have no names.
        self._step_names.update(state.get("step_names", ()))
        for part, short, name in state.get("names", ()):
            self._names.setdefault((part, short), name)
        for path, metric_state in state["metrics"].items():
            metric = self.metrics[path]
            if not adds:
                metric.reset()
                metric._update_count = metric_state["count"]
                for name, value in _copied(metric_state["state"], device=metric.device).items():
                    setattr(metric, name, value)
            elif metric_state["count"]:
                metric.merge_state(metric_state["state"])

    def _entry(self, name: str, value: Any, reduction: str, *, size: int | None) -> _Entry:
        """Return the entry of a number. A mean in a step is weighted by `size`, by default the inferred batch size."""
        weight = 1
        if self.in_step and reduction == "mean":
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
        """Return the value if it is one number. Raises TargetError for any other."""
        if isinstance(value, (int, float)):
            return value
        if not isinstance(value, Tensor):
            shown = f"a {type(value).__name__}"
        elif value.numel() == 1:
            return value
        else:
            shown = f"a tensor of shape {tuple(value.shape)}"
        raise self._refused(name, f"the value is {shown}. Log one number, or several of them by log_dict.")

    def _add(self, interval: Interval, name: str, entry: _Entry) -> None:
        _add_entry(self._entries[interval], name, entry)

    def _plain(self, interval: Interval) -> dict[str, _Entry]:
        """Return the entries as plain numbers; waits for the device once."""
        entries = dict(self._entries[interval])
        values = {name: entry["value"].to(self._context.device) for name, entry in entries.items() if "value" in entry}
        if values:
            numbers = torch.stack(list(values.values())).tolist()
            for name, number in zip(values, numbers, strict=True):
                entries[name] = {**entries[name], "value": number}
        return entries

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
    for name, entry in others.items():
        if "value" in entry:
            entry = {**entry, "value": torch.tensor(entry["value"], dtype=dtype, device=device)}
        _add_entry(entries, name, entry)


def _add_entry(entries: dict[str, _Entry], name: str, entry: _Entry) -> None:
    """Add an entry, by its reduction to the one of the same name if there is one."""
    if name not in entries:
        entries[name] = entry
        return
    present = entries[name]
    reduction = present["reduction"]
    if reduction == _METRIC:
        entries[name] = entry
    elif reduction == "min":
        entries[name] = {**present, "value": torch.minimum(present["value"], entry["value"])}
    elif reduction == "max":
        entries[name] = {**present, "value": torch.maximum(present["value"], entry["value"])}
    elif reduction == "sum":
        entries[name] = {**present, "value": present["value"] + entry["value"]}
    else:
        weight = present["weight"] + entry["weight"]
        entries[name] = {**present, "value": present["value"] + entry["value"], "weight": weight}


def _copied(state: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of a metric as tensors of its own: on the CPU for a checkpoint, else on `device`."""
    place = device or torch.device("cpu")
    # A list in it may hold what isn't a tensor: encoded masks, texts.
    copies: dict[str, Any] = tree_map_only(Tensor, lambda tensor: tensor.detach().to(place, copy=True), dict(state))
    return copies
