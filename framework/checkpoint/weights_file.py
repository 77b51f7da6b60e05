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

# The entries under which files have a state dict.
_WRAPPERS = ("state_dict", "model", "model_state_dict")
_SHOWN = 4
_T = TypeVar("_T")


def read_weights(files: Sequence[Path]) -> dict[str, Any]:
    """Return the state dict that the files hold together, mapped from the disk where the format allows it."""
    return dict(chain.from_iterable(_read(file).items() for file in files))


def _read(file: Path) -> Mapping[str, Any]:
    content = _unwrapped(read_content(file))
    if isinstance(content, Mapping) and any(isinstance(value, Tensor) for value in content.values()):
        return content
    kind = type(content).__name__
    if isinstance(content, Mapping):
        kind = f"a dict of {', '.join(map(str, content))}"
    raise CheckpointError(f"{file} holds {kind}. It must be a state dict, or have one as {' or '.join(_WRAPPERS)}.")


def read_content(file: Path) -> Any:
    """Return all that a file holds. Raises CheckpointError for one with other Python objects than plain ones."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        # Its text advises to read the file all the same, so only the class that it names is shown.
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match is None:
            reason = "torch.save didn't write it"
        else:
            reason = f"it holds {match[1]}, and Python objects could run any code"
        raise CheckpointError(f"{file} can't be read: {reason}.\nSave model.state_dict() only.") from error
    except Exception as error:
        # Torch and safetensors raise errors of many classes.
        raise CheckpointError(f"{file} can't be read: {describe_error(error)}\nIt may be damaged.") from error


def _unwrapped(content: Any) -> Any:
    """Return the state dict that a file's content has as an entry, else the content itself."""
    if isinstance(content, Mapping):
        for key in _WRAPPERS:
            if isinstance(content.get(key), Mapping):
                return content[key]
    return content


@final
@dataclass(frozen=True)
class Loaded:
    """What became of the names of a file and a model: of the whole model, on every rank."""

    source: object
    loaded: Sequence[str]
    # Names that are only in the file, or skipped.
    left_out: Sequence[str]
    # Names that are only in the model, or skipped: these stay as the model was built.
    kept: Sequence[str]

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
        state: The whole state dict, on the CPU.
        source: Where it comes from, for messages.
    """
    own = model.state_dict()
    layout = layout_of(model)
    model_names = own.keys() if layout is None else layout.names
    renamed = _renamed(state, init.rename or {}, source=source)
    skipped = _skipped([*dict.fromkeys([*renamed, *model_names])], init.skip or (), source=source)
    loaded = [name for name in renamed if name in model_names and name not in skipped]
    left_out = [name for name in renamed if name not in model_names or name in skipped]

    def of_all_ranks(names: list[_T]) -> list[_T]:
        """Return what all ranks have; without stages each has all."""
        if layout is None:
            return names
        return [*dict.fromkeys(chain.from_iterable(gather_to_all(names, context)))]

    # Names of stages on other ranks are theirs to load.
    values = {name: renamed[name] for name in loaded if name in own}
    _check_kinds(of_all_ranks(_differences(values, own)), source=source, model=model)
    sharded = {}
    for name, value in values.items():
        sharded[name] = shard_like(own[name], value) if isinstance(value, Tensor) else value
    keys = model.load_state_dict(sharded, strict=False)

    # A name that shares its tensor with another one is loaded, or skipped, with that.
    tensors = _tensor_ids(model)
    loaded_tensors = {tensors[name] for name in values if name in tensors}
    skipped_tensors = {tensors[name] for name in skipped if name in tensors}
    own_kept = [name for name in keys.missing_keys if tensors.get(name) not in loaded_tensors]
    own_missing = [name for name in own_kept if name not in skipped and tensors.get(name) not in skipped_tensors]
    kept = of_all_ranks(own_kept)
    missing = of_all_ranks(own_missing)
    unexpected = [name for name in left_out if name not in skipped]

    if (init.strict and (missing or unexpected)) or not loaded:
        lines = [f"The weights in {source} don't fit {type(model).__name__}."]
        if missing:
            lines.append(f"  not in the file: {_first(missing, _SHOWN)}")
        if unexpected:
            lines.append(f"  not in the model: {_first(unexpected, _SHOWN)}")
        remedy = ", or init.strict=false to load what fits." if loaded else ": no name is in both."
        lines.append(f"Use init.rename for what has another name, and init.skip for what shall be left out{remedy}")
        raise CheckpointError("\n".join(lines))
    return Loaded(source, loaded, left_out, kept)


def copy_what_fits(model: nn.Module, state: Mapping[str, Any], init: InitConfig, *, source: object) -> None:
    """Copy what `model` (not sharded) has by the same name, after renaming, and in the same shape; leave the rest."""
    own = model.state_dict()
    values = {}
    for name, value in _renamed(state, init.rename or {}, source=source).items():
        is_skipped = any(re.search(pattern, name) for pattern in init.skip or ())
        if name in own and not is_skipped and _kind(value) == _kind(own[name]):
            values[name] = value
    model.load_state_dict(values, strict=False)


def _differences(values: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names of values of another kind than the model's, each with a line that says how they differ."""
    differences = []
    for name, value in values.items():
        if _kind(value) != _kind(own[name]):
            differences.append(
                (name, f"  {name}: {_described(value)} in the file, {_described(own[name])} in the model")
            )
    return differences


def _check_kinds(differences: Sequence[tuple[str, str]], *, source: object, model: nn.Module) -> None:
    """Raise CheckpointError if there are differences."""
    if not differences:
        return
    lines = [f"Weights in {source} have another shape or kind than in {type(model).__name__}:"]
    lines += [line for _, line in differences[:_SHOWN]]
    names = ",".join(name for name, _ in differences)
    if len(differences) > _SHOWN:
        lines.append(f"  and {len(differences) - _SHOWN} more")
        lines.append("Leave them out with init.skip, or build the model to fit.")
    else:
        lines.append(f"Leave them out with init.skip=[{names}], or build the model to fit.")
    raise CheckpointError("\n".join(lines))


def _tensor_ids(model: nn.Module) -> dict[str, int]:
    """Return a number for the tensor behind each name; names that share a tensor have the same one."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: id(tensor) for name, tensor in named}


def _renamed(state: Mapping[str, Any], rename: Mapping[str, str], *, source: object) -> dict[str, Any]:
    """Return the state with new names. Raises ConfigError if a pattern matches none, or two names become the same."""
    new_names = {name: name for name in state}
    for pattern, replacement in rename.items():
        if not any(re.search(pattern, new_name) for new_name in new_names.values()):
            raise _no_match("rename", pattern, new_names.values(), source=source)
        try:
            new_names = {name: re.sub(pattern, replacement, new_name) for name, new_name in new_names.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"init.rename: {replacement!r} can't replace {pattern!r}: {error}.") from error

    origins: dict[str, str] = {}
    for name, new_name in new_names.items():
        origin = origins.setdefault(new_name, name)
        if origin != name:
            raise ConfigError(f"init.rename gives {origin} and {name} of {source} the same name, {new_name}.")
    return {new_names[name]: value for name, value in state.items()}


def _skipped(names: Sequence[str], patterns: Iterable[str], *, source: object) -> set[str]:
    """Return the names in which one of the patterns is found. Raises ConfigError for a pattern that matches none."""
    skipped = set[str]()
    for pattern in patterns:
        matching = [name for name in names if re.search(pattern, name)]
        if not matching:
            raise _no_match("skip", pattern, names, source=source)
        skipped.update(matching)
    return skipped


def _no_match(key: str, pattern: str, names: Iterable[str], *, source: object) -> ConfigError:
    names = list(names)
    # Patterns often mean a module, whose name is the beginning of others.
    modules = set[str]()
    for name in names:
        parts = name.split(".")
        modules.update(".".join(parts[:number]) for number in range(1, len(parts) + 1))
    guess = nearest(re.sub(r"[^\w.]", "", pattern).strip("."), sorted(modules))
    where = "" if key == "rename" else " or the model"
    return ConfigError(
        f"init.{key}: no name in {source}{where} matches {pattern!r}.{did_you_mean(guess)}\n"
        f"The names are {_first(names, _SHOWN)}."
    )


def _kind(value: Any) -> object:
    """Return what two values must have in common: a float of another precision is converted, an integer isn't."""
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.is_floating_point(), value.is_complex()


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _first(names: Sequence[str], number: int | None) -> str:
    """Return the first names, and how many more there are. number: None for all."""
    if number is None or len(names) <= number:
        return ", ".join(names)
    return f"{', '.join(names[:number])} and {len(names) - number} more"
