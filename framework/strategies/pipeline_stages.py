"""Split a model into stages, of which each rank keeps some."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from framework.errors import ConfigError, TargetError
from framework.strategies.parameters import first_few


class _Split(NamedTuple):
    """Children split into runs. The best of several is the smallest."""

    # The number of parameters of the largest run.
    largest: float
    # Where each run ends.
    ends: tuple[int, ...]


def split_into_stages(model: nn.Module, number: int) -> list[nn.Module]:
    """Return `number` modules, each taking the output of the one before; their parameters are the model's own.

    A model defines its stages by a method `stages(number)`. A `torch.nn.Sequential` needs none: it is split so that the
    largest stage has as few parameters as possible. Raises TargetError and ConfigError for another model, and if a
    parameter or buffer is in no stage, or a parameter in several.
    """
    name = type(model).__name__
    # The class is asked, since a submodule may have that name.
    if callable(getattr(type(model), "stages", None)):
        stages = list(model.stages(number))  # type: ignore[operator]
        if len(stages) != number or not all(isinstance(stage, nn.Module) for stage in stages):
            kinds = ", ".join(type(stage).__name__ for stage in stages)
            raise TargetError(
                f"{name}.stages({number}) must return {number} modules, and returned {len(stages)}: {kinds}"
            )
    elif isinstance(model, nn.Sequential):
        stages = [nn.Sequential(*children) for children in _split_evenly(list(model), number)]
    else:
        raise TargetError(
            f"strategy=pipeline can't cut {name} into {number} stages: it is no torch.nn.Sequential and has no method "
            "`stages`.\nGive it `def stages(self, number)`, which returns that many modules, made of its own ones; "
            "each takes the output of the one before."
        )
    _check_stages(model, stages)
    return stages


def drop_other_stages(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Remove every parameter and buffer that isn't in one of the stages from the model; its modules stay."""
    ids_to_keep: set[int] = set()
    for stage in stages:
        ids_to_keep.update(id(tensor) for tensor in _tensors(stage))
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in ids_to_keep:
                    slots[name] = None
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is None:
            # Otherwise it would ask for its statistics when weights are loaded.
            module.track_running_stats = False


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _check_stages(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    class_name = type(model).__name__
    # Checkpoints would lack what isn't a tensor.
    not_tensors = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if not_tensors:
        raise ConfigError(
            f"strategy=pipeline can't keep what isn't a tensor in {class_name}'s state: {first_few(not_tensors)}."
        )
    check_trained(dict(enumerate(stages)), num_stages=len(stages))

    # In how many stages each tensor is, by its id.
    uses: Counter[int] = Counter()
    for stage in stages:
        uses.update({id(tensor) for tensor in _tensors(stage)})
    wrong = [name for name, parameter in model.named_parameters() if uses[id(parameter)] != 1]
    wrong += [name for name, buffer in model.named_buffers() if uses[id(buffer)] == 0]
    ids_in_model = {id(tensor) for tensor in _tensors(model)}
    if wrong or uses.keys() - ids_in_model:
        raise TargetError(
            f"Stages of {class_name} must be made of its own modules, not of copies, with each parameter in one stage "
            f"alone and each buffer in one at least. Look at {first_few(wrong)}.\n"
            "Untie parameters that several stages share, use fewer stages, or use strategy=ddp or fsdp."
        )


def check_trained(stages: Mapping[int, nn.Module], *, num_stages: int) -> None:
    """Raise ConfigError for a stage without a parameter to train, through which no backward would pass."""
    for index, stage in stages.items():
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ConfigError(
                f"Stage {index} of {num_stages} has no parameter to train, and strategy=pipeline needs one in each.\n"
                "Train one, or use fewer stages (strategy.num_stages) or another strategy."
            )


def _split_evenly(children: Sequence[nn.Module], number: int) -> list[Sequence[nn.Module]]:
    """Split them into runs, each with something to train, of which the largest is as small as possible."""
    sizes = []
    is_trained = []
    for child in children:
        parameters = list(child.parameters())
        sizes.append(sum(parameter.numel() for parameter in parameters))
        is_trained.append(any(parameter.requires_grad for parameter in parameters))
    num_trained = sum(is_trained)
    if num_trained < number:
        raise ConfigError(
            f"A torch.nn.Sequential with {num_trained} trained modules can't be cut into {number} stages. Use at most "
            f"strategy.num_stages={num_trained}, or modules of smaller parts."
        )
    # The number of parameters in the children before each.
    sizes_before = [0, *itertools.accumulate(sizes)]
    impossible = _Split(math.inf, ())

    @functools.cache
    def best_split(end: int, num_runs: int) -> _Split:
        """Return the best split of the first `end` children into `num_runs` runs."""
        if num_runs == 0:
            return _Split(0, ()) if end == 0 else impossible
        splits = []
        for begin in range(end):
            # The last run begins here.
            if any(is_trained[begin:end]):
                earlier = best_split(begin, num_runs - 1)
                size = sizes_before[end] - sizes_before[begin]
                splits.append(_Split(max(earlier.largest, size), (*earlier.ends, end)))
        return min(splits, default=impossible)

    ends = best_split(len(children), number).ends
    return [children[begin:end] for begin, end in itertools.pairwise((0, *ends))]
