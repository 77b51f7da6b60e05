"""What TensorBoard shows of a model on request: its graph, and histograms of parameters and gradients."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from framework.distributed.seed import generator_states, restore_generator_states
from framework.distributed.sharded import local_tensor
from framework.system.rank_log import warn
from framework.types import FitInfo, StepInfo

Write = Callable[[Any], None]
"""Writes to a SummaryWriter."""


def keep_graph(model: nn.Module, *, add: Callable[[Write], None]) -> None:
    """Have the graph written with the inputs of the model's next call."""

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        add(partial(_write_graph, model=module, args=args, kwargs=kwargs))

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)


def _write_graph(writer: Any, *, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Trace a copy of the model, which leaves the model and the generators as they are."""
    devices = list({parameter.device for parameter in model.parameters()})
    states = generator_states(devices)
    try:
        if kwargs:
            raise TypeError(f"it is called with the keywords {', '.join(kwargs)}, and tracing takes none")
        # torch prints its errors, and its tracer warns of values that it takes as constants.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            writer.add_graph(copy.deepcopy(model), args)
    except OSError:
        raise
    except Exception as error:  # the user's model may do anything that can't be traced
        message = f"TensorBoard won't have the graph of the model: {type(error).__name__}: {error}"
        warn(message.partition("\n")[0])
    finally:
        restore_generator_states(states, devices=devices)


@final
class Histograms:
    """Writes histograms of parameters and gradients in every `every`-th step, of what this rank has of them.

    Parameters are those after the step. Gradients are those of the step: averaged over the ranks, unscaled and clipped.
    Some tasks and optimizers compute or average them only within `Optimizer.step`, so they are read after it.
    """

    def __init__(self, info: FitInfo, *, every: int, add: Callable[[Write], None]) -> None:
        self._model = info.model
        self._every = every
        self._add = add
        # The step that comes next.
        self._step = info.start_step + 1
        info.optimizer.register_step_post_hook(self._after_step)

    def on_train_step_end(self, info: StepInfo) -> None:
        self._step = info.step + 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._step % self._every:
            return
        stepped: set[int] = set()
        for group in optimizer.param_groups:
            stepped.update(map(id, group["params"]))
        for name, parameter in self._model.named_parameters():
            if id(parameter) in stepped:
                self._add_histogram(f"parameters/{name}", parameter)
                if parameter.grad is not None:
                    self._add_histogram(f"gradients/{name}", parameter.grad)

    def _add_histogram(self, tag: str, values: Tensor) -> None:
        # A copy, since later steps change them.
        numbers = local_tensor(values).float().cpu().reshape(-1).clone()
        numbers = numbers[numbers.isfinite()]
        if numbers.numel():
            step = self._step
            self._add(lambda writer: writer.add_histogram(tag, numbers, step))
