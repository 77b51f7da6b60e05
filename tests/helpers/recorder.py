"""A record of every optimizer step, to find where two runs that should be equal begin to differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from framework.types import FitInfo, StepInfo
from tests.helpers.internals import Context, JsonLines, RunDir, generator_states, local_tensor


@final
class Recorder:
    """Write one line per optimizer step and rank to RUN/record/rank_N.jsonl: what the step took and what it computed.

    `indices`: the dataset's, of each micro-batch. Everything else is hashed: `inputs` of the model, `gradients` as the
    optimizer got them (reduced, clipped), `weights`, `buffers` and `optimizer` (state and groups) after the step, each
    by name, and `generators`. It waits for the device and reads everything: for debugging, not for training. A resumed
    run cuts what was written after the step it resumes from.
    """

    def __init__(self, *, run_dir: RunDir, context: Context) -> None:
        self._run_dir = run_dir.path
        self._folder = run_dir.path / "record"
        self._context = context
        self._file: JsonLines
        self._model: nn.Module
        self._optimizer: Optimizer
        self._names: dict[int, str]
        self._inputs: list[str] = []
        self._gradients: dict[str, str] = {}
        self._handles: list[Any] = []

    def on_fit_start(self, info: FitInfo) -> None:
        self._file = self._open(self._folder / f"rank_{self._context.rank}.jsonl", info)
        if self._context.is_main:
            for path in self._folder.glob("rank_*.jsonl"):
                # Records of ranks that no longer exist go, too.
                if int(path.stem.removeprefix("rank_")) >= self._context.world_size:
                    self._open(path, info).close()
        self._model = info.model
        self._optimizer = info.optimizer
        self._names = {id(parameter): name for name, parameter in info.model.named_parameters()}
        # Functions, not bound methods: copying the model copies its hooks, and whatever a method is bound to.
        self._handles = [
            info.model.register_forward_pre_hook(lambda model, inputs: self._note_inputs(model, inputs)),
            info.optimizer.register_step_pre_hook(lambda optimizer, *_: self._note_gradients(optimizer)),
        ]

    def _open(self, path: Path, info: FitInfo) -> JsonLines:
        return JsonLines(path, root=self._run_dir, last_step=info.start_step)

    def on_train_step_end(self, report: StepInfo) -> None:
        generators = generator_states(self._context.devices)
        row = {
            "step": report.step,
            "epoch": report.epoch,
            "indices": [micro.indices[: micro.num_samples].tolist() for micro in report.indices],
            "inputs": self._inputs,
            "gradients": self._gradients,
            "weights": _hashes(self._model.named_parameters()),
            "buffers": _hashes(self._model.named_buffers()),
            "optimizer": dict(self._optimizer_hashes()),
            "generators": _hashes(generators.items()),
        }
        self._file.write(row)
        self._inputs = []
        self._gradients = {}

    def on_fit_end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._file.close()

    def _note_inputs(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training:
            self._inputs.append(_hash(inputs))

    def _note_gradients(self, optimizer: Optimizer) -> None:
        self._gradients = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._gradients[self._names[id(parameter)]] = _hash(parameter.grad)

    def _optimizer_hashes(self) -> Iterator[tuple[str, str]]:
        for number, group in enumerate(self._optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"group {number} {key}", _hash(value)
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                yield f"{self._names[id(parameter)]} {key}", _hash(value)


def _hashes(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {name: _hash(value) for name, value in values}


def _hash(value: Any) -> str:
    """Hash tensors, bit for bit, and plain values, however nested; of a DTensor its local part."""
    leaves, structure = tree_flatten(value)
    digest = hashlib.blake2b(repr(structure).encode(), digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            flat = local_tensor(leaf).cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
