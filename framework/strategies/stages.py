"""A model cut into stages that are called one after another, of which a rank keeps its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from framework.distributed.stages import StageLayout
from framework.errors import ConfigError, TargetError
from framework.strategies.trained import first_few


def cut(model: nn.Module, number: int) -> list[nn.Module]:
    """The model as `number` modules, each taking the output of the one before; their parameters are the model's own.

    A model says itself how it is cut, with a method `stages(number)`; a `torch.nn.Sequential` needs none: it is cut so
    that the stage with most parameters has as few as can be. Raises TargetError and ConfigError for another one, and
    where a parameter or buffer is in no stage, or a parameter in several.
    """
    name = type(model).__name__
    if callable(getattr(type(model), "stages", None)):  # of the class: a module in the model may have that name
        stages = list(model.stages(number))  # type: ignore[operator]
        if len(stages) != number or not all(isinstance(stage, nn.Module) for stage in stages):
            raise TargetError(f"{name}.stages({number}) must give {number} modules, and gave {_listed(stages)}.")
    elif isinstance(model, nn.Sequential):
        stages = [nn.Sequential(*children) for children in _even(list(model), number)]
    else:
        raise TargetError(
            f"strategy=pipeline can't cut {name} into {number} stages: it is no torch.nn.Sequential and has no method "
            "`stages`.\nGive it `def stages(self, number)`, which returns so many modules, made of its own, each of "
            "which takes what the one before gives."
        )
    _check(model, stages)
    return stages


def layout(model: nn.Module, stages: Sequence[nn.Module], own: Sequence[int], *, writes: bool) -> StageLayout:
    """What a rank with the stages `own` is to know of the whole, which must still be there; `writes` its part or not.

    What is in several stages is written with the first of them.
    """
    state = model.state_dict(keep_vars=True)
    first: dict[int, int] = {}
    for index, stage in enumerate(stages):
        for tensor in _tensors(stage):
            first.setdefault(id(tensor), index)
    parameters = dict(model.named_parameters())
    return StageLayout(
        names=frozenset(state),
        parameters=tuple(parameters),
        num_parameters=sum(each.numel() for each in parameters.values()),
        written=frozenset(name for name, value in state.items() if writes and first[id(value)] in own),
        has_output=len(stages) - 1 in own,
    )


def keep(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Take every parameter and buffer that isn't in one of the stages out of the model; its modules stay."""
    kept = {id(tensor) for stage in stages for tensor in _tensors(stage)}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None and id(tensor) not in kept:
                    slots[name] = None
                    module._load_from_state_dict = _nothing  # type: ignore[method-assign]
        if any(id(tensor) in kept for tensor in (*module._parameters.values(), *module._buffers.values())):
            vars(module).pop("_load_from_state_dict", None)


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what takes weights in: without any, BatchNorm's would add what it lacks to those that are given."""


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _check(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    name = type(model).__name__
    plain = [key for key, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if plain:
        raise ConfigError(
            f"strategy=pipeline keeps tensors apart, and the state of {name} has something else: {first_few(plain)}."
        )
    known = {id(tensor) for tensor in _tensors(model)}
    within = {id(module) for module in model.modules()}
    places: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        tensors = list(_tensors(stage))
        # A buffer is another tensor once it is moved, wherever else it was held.
        loose = [b for each in stage.modules() if id(each) not in within for b in each.buffers(recurse=False)]
        if loose or any(id(tensor) not in known for tensor in tensors):
            raise TargetError(
                f"Stage {index} of {name} has parameters or buffers that aren't the model's own. Make stages of the "
                "model's modules, not of copies."
            )
        if not any(each.requires_grad for each in stage.parameters()):
            raise ConfigError(
                f"Stage {index} of {len(stages)} of {name} has no parameter to train. Use fewer stages "
                "(strategy.num_stages), or cut the model elsewhere."
            )
        for tensor in tensors:
            places.setdefault(id(tensor), []).append(index)
    lost = [key for key, each in (*model.named_parameters(), *model.named_buffers()) if id(each) not in places]
    if lost:
        raise TargetError(f"No stage of {name} has {first_few(lost)}. Each parameter and buffer must be in one.")
    shared = {key: places[id(each)] for key, each in model.named_parameters() if len(places[id(each)]) > 1}
    if shared:
        told = "; ".join(f"{key} in {', '.join(map(str, indices))}" for key, indices in shared.items())
        raise ConfigError(
            f"Stages of {name} share parameters, and each must be in one stage alone: {told}.\n"
            "Untie them, use fewer stages, or use strategy=ddp or fsdp."
        )


def _even(children: Sequence[nn.Module], number: int) -> list[Sequence[nn.Module]]:
    """Runs of children, each with something to train, of which the largest is as small as can be."""
    sizes = [sum(each.numel() for each in child.parameters()) for child in children]
    trains = [any(each.requires_grad for each in child.parameters()) for child in children]
    if sum(trains) < number:
        raise ConfigError(
            f"A torch.nn.Sequential with {sum(trains)} trained modules can't be cut into {number} stages. Use at most "
            f"strategy.num_stages={sum(trains)}, or modules of smaller parts."
        )
    count = len(children)
    before = [0, *itertools.accumulate(sizes)]
    trained = [0, *itertools.accumulate(map(int, trains))]
    # best[end]: the largest stage where the first `end` children make so many stages, and where each of them ends.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for _ in range(number):
        better: dict[int, tuple[int, list[int]]] = {}
        for end in range(1, count + 1):
            ways = [
                (max(largest, before[end] - before[begin]), [*ends, end])
                for begin, (largest, ends) in best.items()
                if begin < end and trained[end] > trained[begin]
            ]
            if ways:
                better[end] = min(ways)
        best = better
    return [children[begin:end] for begin, end in itertools.pairwise(best[count][1])]


def _listed(stages: Sequence[object]) -> str:
    return f"{len(stages)}: {', '.join(type(stage).__name__ for stage in stages)}"
