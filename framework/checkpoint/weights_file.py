"""Load weights that something else has written into a model, by the names of `init.rename` and `init.skip`."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from framework.config.schema import InitConfig
from framework.config.suggest import did_you_mean, nearest
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.sharded import layout_of, shard_like
from framework.errors import CheckpointError, ConfigError, describe_error

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_SHOWN = 4
_T = TypeVar("_T")


def read_weights(files: Sequence[Path]) -> dict[str, Any]:
    """Return the state dict that the files hold together, mapped from the disk where the format allows it."""
    return dict(chain.from_iterable(_read(file).items() for file in files))


def _read(file: Path) -> Mapping[str, Any]:
    content: Any
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:  # whose text advises to read it all the same
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it holds {found[1]}, and Python objects could run any code" if found else "torch.save didn't write it"
        )
        raise CheckpointError(f"{file} can't be read: {reason}.\nSave model.state_dict() only.") from error
    except Exception as error:  # torch's and safetensors' own, of many classes
        raise CheckpointError(f"{file} can't be read: {describe_error(error)}\nIt may be damaged.") from error
    if isinstance(content, Mapping):
        content = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        kind = f"a dict of {', '.join(map(str, content))}" if isinstance(content, Mapping) else type(content).__name__
        raise CheckpointError(f"{file} holds {kind}. It must be a state dict, or have one as {' or '.join(_WRAPPERS)}.")
    return content


@final
@dataclass(frozen=True)
class Loaded:
    """What became of the names of a file and a model: of the whole model, on every rank."""

    source: object
    loaded: Sequence[str]
    left_out: Sequence[str]  # in the file only, or skipped
    kept: Sequence[str]  # as the model was built

    def describe(self, *, shown: int | None = _SHOWN) -> str:
        """Return a few lines, with the first names of each kind; None: all."""
        lines = [f"Weights of {self.source}: {len(self.loaded)} tensors loaded"]
        if shown is None:
            lines.append(f"  loaded: {', '.join(self.loaded)}")
        for text, names in (("left out", self.left_out), ("as the model was built", self.kept)):
            if names:
                lines.append(f"  {text}: {_first(names, shown)}")
        return "\n".join(lines)


def load_what_fits(
    model: nn.Module, state: Mapping[str, Any], init: InitConfig, *, source: object, context: Context
) -> Loaded:
    """Copy tensors into `model` (unwrapped), converted to its types, onto its devices, sharded as it is.

    Every rank must call it: ranks with stages communicate. Raises ConfigError for a pattern that no name matches;
    CheckpointError, with `init.strict` for names that are missing or unexpected, and always for a tensor of another
    shape and if nothing fits. The model may be partly changed then.

    Args:
        state: the whole state dict, on the CPU. source: where it comes from, for messages.
    """
    layout, own, name = layout_of(model), model.state_dict(), type(model).__name__
    known = own.keys() if layout is None else layout.names
    given = _renamed(state, init.rename or {}, source=source)
    skipped = _skipped([*dict.fromkeys([*given, *known])], init.skip or (), source=source)
    loaded = [each for each in given if each in known and each not in skipped]
    left_out = [each for each in given if each not in known or each in skipped]

    def of_all_ranks(values: Iterable[_T]) -> list[_T]:
        return [*values] if layout is None else [*dict.fromkeys(chain(*gather_to_all([*values], context)))]

    # Names of stages on other ranks are theirs to load.
    mine = {each: given[each] for each in loaded if each in own}
    differ = of_all_ranks(
        (each, f"  {each}: {_described(value)} in the file, {_described(own[each])} in the model")
        for each, value in mine.items()
        if _kind(value) != _kind(own[each])
    )
    if differ:
        lines = [f"Weights in {source} have another shape or kind than in {name}:", *(line for _, line in differ)]
        names = f"=[{','.join(each for each, _ in differ)}]"
        if len(differ) > _SHOWN:
            lines, names = [*lines[: 1 + _SHOWN], f"  and {len(differ) - _SHOWN} more"], ""
        lines.append(f"Leave them out with init.skip{names}, or build the model to fit.")
        raise CheckpointError("\n".join(lines))
    sharded = {
        each: shard_like(own[each], value) if isinstance(value, Tensor) else value for each, value in mine.items()
    }
    keys = model.load_state_dict(sharded, strict=False)
    # A name that shares its tensor with another one is loaded, or skipped, with that.
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    tensors = {each: id(tensor) for each, tensor in named}
    filled, left = ({tensors.get(each) for each in names} - {None} for names in (mine, skipped))
    own_kept = [each for each in keys.missing_keys if tensors.get(each) not in filled]
    kept = of_all_ranks(own_kept)
    missing = of_all_ranks(each for each in own_kept if each not in skipped and tensors.get(each) not in left)
    unexpected = [each for each in left_out if each not in skipped]
    if (init.strict and (missing or unexpected)) or not loaded:
        lines = [f"The weights in {source} don't fit {name}."]
        lines += [f"  not in the file: {_first(missing, _SHOWN)}"] if missing else []
        lines += [f"  not in the model: {_first(unexpected, _SHOWN)}"] if unexpected else []
        lines.append("Use init.rename for what has another name, and init.skip for what shall be left out")
        lines[-1] += ", or init.strict=false to load what fits." if loaded else ": no name is in both."
        raise CheckpointError("\n".join(lines))
    return Loaded(source, loaded, left_out, kept)


def _renamed(state: Mapping[str, Any], rename: Mapping[str, str], *, source: object) -> dict[str, Any]:
    """Return the state with new names. Raises ConfigError if a pattern matches none, or two names become the same."""
    names = {each: each for each in state}
    for pattern, replacement in rename.items():
        if not any(re.search(pattern, now) for now in names.values()):
            raise _no_match("rename", pattern, names.values(), source=source)
        try:
            names = {each: re.sub(pattern, replacement, now) for each, now in names.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"init.rename: {replacement!r} can't replace {pattern!r}: {error}.") from error
    origins: dict[str, str] = {}
    for each, now in names.items():
        if origins.setdefault(now, each) != each:
            raise ConfigError(f"init.rename gives {origins[now]} and {each} of {source} the same name, {now}.")
    return {names[each]: value for each, value in state.items()}


def _skipped(names: Sequence[str], patterns: Iterable[str], *, source: object) -> set[str]:
    found = set[str]()
    for pattern in patterns:
        matching = [each for each in names if re.search(pattern, each)]
        if not matching:
            raise _no_match("skip", pattern, names, source=source)
        found.update(matching)
    return found


def _no_match(key: str, pattern: str, names: Iterable[str], *, source: object) -> ConfigError:
    names = list(names)
    # Patterns often mean a module, whose name is the beginning of others.
    modules = {each[:place] for each in names for place, letter in enumerate(f"{each}.") if letter == "."}
    guess = nearest(re.sub(r"[^\w.]", "", pattern).strip("."), sorted(modules))
    where = "" if key == "rename" else " or the model"
    return ConfigError(
        f"init.{key}: no name in {source}{where} matches {pattern!r}.{did_you_mean(guess)}\n"
        f"The names are {_first(names, _SHOWN)}."
    )


def _kind(value: Any) -> object:
    """Return what two values must have in common: a float of another precision is converted, an integer isn't."""
    return (value.shape, value.is_floating_point(), value.is_complex()) if isinstance(value, Tensor) else None


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _first(names: Sequence[str], number: int | None) -> str:
    more = "" if number is None or len(names) <= number else f" and {len(names) - number} more"
    return ", ".join(names[:number]) + more
