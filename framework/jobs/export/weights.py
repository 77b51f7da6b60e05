"""Write a model's weights: with torch.save, as safetensors, or as the folder of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.engine.builders.adapters import is_adapted
from framework.errors import ConfigError
from framework.jobs.export.source import Source


def write_weights(source: Source, path: Path) -> list[tuple[str, str]]:
    """Write the file or folder; return what to print about it, names and texts."""
    state = _state(source)
    if source.config.export.format == "safetensors":
        _save_safetensors(state, source, path)
    elif source.config.export.format == "pretrained":
        _save_pretrained(source, path)
    else:
        torch.save(state, path)
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    numbers = sum(tensor.numel() for tensor in tensors)
    return [("tensors", f"{len(tensors)}, of {numbers:,} numbers ({', '.join(kinds)})")]


def _state(source: Source) -> Mapping[str, Any]:
    """Return the tensors that are written: of adapters that aren't merged, `pretrained` writes nothing else."""
    if source.config.export.format == "pretrained" and is_adapted(source.model):
        from peft import get_peft_model_state_dict

        state: Mapping[str, Any] = get_peft_model_state_dict(source.model)
        return state
    return source.model.state_dict()


def _save_safetensors(state: Mapping[str, Any], source: Source, path: Path) -> None:
    from safetensors.torch import save

    others = [name for name, value in state.items() if not _is_dense_tensor(value)]
    if others:
        raise ConfigError(
            f"safetensors holds dense tensors only, and {', '.join(others)} of {source.name} isn't one.\n"
            "Use export.format=state_dict."
        )
    # Every name needs memory of its own.
    unshared = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    # `save_file` would make the file readable by its owner only.
    path.write_bytes(save(unshared, {**source.metadata, "format": "pt"}))


def _is_dense_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _save_pretrained(source: Source, folder: Path) -> None:
    if not callable(getattr(source.model, "save_pretrained", None)):
        raise ConfigError(
            f"export.format=pretrained is for models with a method save_pretrained, as those of transformers; "
            f"{source.name} has none.\nUse export.format=state_dict or safetensors."
        )
    source.model.save_pretrained(folder)  # type: ignore[operator]
    # Only their owner may read these files; whoever may read the folder should.
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)
