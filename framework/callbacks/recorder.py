"""A record of every optimizer step, to find where two runs that should be equal begin to differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.appending import Appender
from framework.distributed.context import Context
from framework.distributed.tensors import local
from framework.rows import open_rows, read_rows
from framework.run_dir import RunDir
from framework.seed import generator_states
from framework.types import FitInfo, StepReport

ORDER = ("epoch", "indices", "inputs", "gradients", "weights", "buffers", "optimizer", "generators")
"""What a row holds, in the order in which one follows from the other."""


@final
class Recorder:
    """Writes one line per optimizer step and rank to RUN/record/rank_N.jsonl: what the step took, and what came of it.

    `indices`: the dataset's, of each micro-batch. All else are hashes: `inputs` of what went into the model,
    `gradients` as the optimizer got them (reduced, clipped), `weights`, `buffers` and `optimizer` (state and groups)
    after the step, each by name, and `generators`. It waits for the device and reads everything: for looking for a
    fault, not for training. A resumed run cuts what was written beyond the step it goes on from. `compare` tells where
    two differ.
    """

    def __init__(self, *, run_dir: RunDir, context: Context) -> None:
        self._folder = run_dir.path / "record"
        self._context = context
        self._file: Appender | None = None
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._names: dict[int, str] = {}
        self._inputs: list[str] = []
        self._gradients: dict[str, str] = {}
        self._handles: list[Any] = []

    def on_fit_start(self, info: FitInfo) -> None:
        self._file = open_rows(self._folder / _file_name(self._context.rank), last_step=info.start_step)
        if self._context.is_main:
            for path in self._folder.glob(_file_name("*")):  # also of ranks that there are no longer
                if _rank_of(path) >= self._context.world_size:
                    open_rows(path, last_step=info.start_step).close()
        self._model, self._optimizer = info.model, info.optimizer
        self._names = {id(parameter): name for name, parameter in info.model.named_parameters()}
        # On the objects themselves, so that the loop needs no place for what is only there in between. Functions, since
        # who copies the model copies its hooks, and what bound methods are bound to.
        self._handles = [
            info.model.register_forward_pre_hook(lambda model, inputs: self._note_inputs(model, inputs)),
            info.optimizer.register_step_pre_hook(lambda optimizer, *_: self._note_gradients(optimizer)),
        ]

    def on_train_step_end(self, report: StepReport) -> None:
        assert self._file is not None
        assert self._model is not None
        row = {
            "step": report.step,
            "epoch": report.epoch,
            "indices": [micro.indices[: micro.num_samples].tolist() for micro in report.indices],
            "inputs": self._inputs,
            "gradients": self._gradients,
            "weights": {name: _hash(parameter) for name, parameter in self._model.named_parameters()},
            "buffers": {name: _hash(buffer) for name, buffer in self._model.named_buffers()},
            "optimizer": dict(self._optimizer_hashes()),
            "generators": {name: _hash(state) for name, state in generator_states(self._context.devices).items()},
        }
        self._file.write(f"{json.dumps(row)}\n".encode())
        self._inputs, self._gradients = [], {}

    def on_fit_end(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note_inputs(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training:
            self._inputs.append(_hash(inputs))

    def _note_gradients(self, optimizer: Optimizer) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._gradients = {self._names[id(parameter)]: _hash(parameter.grad) for parameter in parameters}

    def _optimizer_hashes(self) -> Iterator[tuple[str, str]]:
        assert self._optimizer is not None
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"group {number} {key}", _hash(value)
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                yield f"{self._names[id(parameter)]} {key}", _hash(value)


class Difference(NamedTuple):
    """The first thing that differs between two records. rank: None where they are of different numbers of ranks."""

    rank: int | None
    step: int
    what: str
    one: Any
    other: Any

    def __str__(self) -> str:
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"step {self.step}{where}: {self.what} differs: {_shortened(self.one)} and {_shortened(self.other)}"


def compare(one: Path, other: Path) -> Difference | None:
    """The first difference between the records of two run directories, at the earliest step; None where they agree.

    Raises FileNotFoundError where a run has no record.
    """
    sides = [_records(run) for run in (one, other)]
    if sides[0].keys() != sides[1].keys():
        return Difference(None, 0, "the number of ranks", len(sides[0]), len(sides[1]))
    found = [
        difference for rank in sorted(sides[0]) for difference in _differences(rank, sides[0][rank], sides[1][rank])
    ]
    # Of one step the first in the order in which things follow from each other, on whichever rank.
    return min(found, key=lambda each: (each.step, _place(each.what)), default=None)


def _records(run: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """Rank → step → row."""
    files = sorted((run / "record").glob(_file_name("*")))
    if not files:
        raise FileNotFoundError(f"{run} has no record. Run it with callbacks=[recorder].")
    return {_rank_of(file): {row["step"]: row for row in read_rows(file)} for file in files}


def _file_name(rank: int | str) -> str:
    return f"rank_{rank}.jsonl"


def _rank_of(file: Path) -> int:
    return int(file.stem.partition("_")[2])


def _differences(rank: int, one: Mapping[int, Any], other: Mapping[int, Any]) -> Iterator[Difference]:
    """Those of the first step that differs."""
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other:
            yield Difference(rank, step, "that there is such a step", step in one, step in other)
            return
        found = list(_in_row(rank, step, one[step], other[step]))
        if found:
            yield from found
            return


def _in_row(rank: int, step: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    for part in ORDER:
        for name, (left, right) in _entries(one[part], other[part]):
            if left != right:
                yield Difference(rank, step, f"{part} {name}".rstrip(), left, right)


def _entries(one: Any, other: Any) -> Iterable[tuple[str, tuple[Any, Any]]]:
    if not isinstance(one, Mapping):
        return [("", (one, other))]
    return [(name, (one.get(name), other.get(name))) for name in {**one, **other}]


def _place(what: str) -> int:
    part = what.partition(" ")[0]
    return ORDER.index(part) if part in ORDER else -1


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _hash(value: Any) -> str:
    """Of tensors, bit for bit, and plain values, in any nesting; NaN equals NaN. Of a spread tensor its local part."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = local(value).cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            digest.update(repr(key).encode())
            _feed(digest, entry)
    elif isinstance(value, (list, tuple)):
        digest.update(str(len(value)).encode())
        for entry in value:
            _feed(digest, entry)
    else:
        digest.update(repr(value).encode())
