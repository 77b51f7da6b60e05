"""What `on_save_checkpoint` of a module, a data module and callbacks adds to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from framework.checkpoint.writer import is_plain, with_python_numbers
from framework.errors import ConfigError
from framework.system.rank_log import warn
from framework.tasks.lightning.data import overrides_method
from framework.tasks.lightning.trainer import TrainerView


@final
class KeptState:
    """Saves and restores what these hooks add; the rest of Lightning's checkpoint is in the framework's own.

    saves: the module overrides `on_save_checkpoint`.
    """

    def __init__(self, trainer: TrainerView, *, saves: bool) -> None:
        self._trainer = trainer
        self._saves = saves
        self._has_warned = False
        datamodule = trainer.datamodule
        self._data_saves = datamodule is not None and overrides_method(datamodule, "on_save_checkpoint")
        self._data_has_state = datamodule is not None and overrides_method(datamodule, "state_dict")

    def save(self) -> dict[str, Any]:
        """Return the entries that the hooks add, and the data module's state; empty without any."""
        kept: dict[str, Any] = {}
        if self._data_has_state:
            name = type(self._trainer.datamodule).__qualname__
            kept["datamodule"] = {name: self._trainer.datamodule.state_dict()}
        states = {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks}
        if any(states.values()):
            kept["callbacks"] = states
        if not (self._saves or self._data_saves):
            return kept
        objects = {}
        plain = {}
        rebuilt = []
        for name, value in self._added().items():
            entry = with_python_numbers(value)
            if _has_state(value):
                objects[name] = value.state_dict()
            elif is_plain(entry):
                plain[name] = entry
            else:
                rebuilt.append(name)
        if rebuilt and not self._has_warned:
            self._has_warned = True
            warn(
                f"on_save_checkpoint adds {', '.join(rebuilt)}, with objects that would have to be pickled. They "
                "aren't saved: on_load_checkpoint of a resumed run gets those of the rebuilt module."
            )
        kept.update(objects=objects, added=plain, rebuilt=rebuilt)
        return kept

    def _added(self) -> dict[str, Any]:
        """Return the entries that the hooks add."""
        checkpoint = self._checkpoint()
        own_keys = set(checkpoint)
        if self._data_saves:
            self._trainer.datamodule.on_save_checkpoint(checkpoint)
        if self._saves:
            self._trainer.lightning_module.on_save_checkpoint(checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in own_keys}

    def load(self, kept: dict[str, Any]) -> None:
        """Give the hooks back what `save` returned."""
        self._load(kept.get("datamodule", {}), kept.get("callbacks", {}))
        added = dict(kept.get("added", {}))
        objects = kept.get("objects", {})
        rebuilt = kept.get("rebuilt", ())
        if objects or rebuilt:
            # Objects are those of the rebuilt module, with their saved states.
            built = self._added()
            for name, state in objects.items():
                built[name].load_state_dict(state)
            added.update({name: built[name] for name in (*objects, *rebuilt)})
        self._call_load_hooks({**self._checkpoint(), **added})

    def load_lightnings(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the hooks and callbacks what a checkpoint of Lightning's has for them."""
        self._load(checkpoint, checkpoint.get("callbacks", {}))
        self._call_load_hooks(dict(checkpoint))

    def _load(self, of_data: Mapping[str, Any], of_callbacks: Mapping[str, Any]) -> None:
        """Load the states of the data module and the callbacks, by the names that Lightning gives them."""
        name = type(self._trainer.datamodule).__qualname__
        if self._data_has_state and name in of_data:
            self._trainer.datamodule.load_state_dict(of_data[name])
        for callback in self._trainer.callbacks:
            if callback.state_key in of_callbacks:
                callback.load_state_dict(of_callbacks[callback.state_key])

    def _call_load_hooks(self, checkpoint: dict[str, Any]) -> None:
        module = self._trainer.lightning_module
        parameters = dict(module.named_parameters())
        for owner in (self._trainer.datamodule, module):
            if owner is not None and overrides_method(owner, "on_load_checkpoint"):
                owner.on_load_checkpoint(checkpoint)
        _check_same(parameters, dict(module.named_parameters()), name=type(module).__name__)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the entries of Lightning's own checkpoint that are known here."""
        module = self._trainer.lightning_module
        return {
            "epoch": self._trainer.current_epoch,
            "global_step": self._trainer.global_step,
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
        }


def _has_state(value: Any) -> bool:
    """Return True for an object such as a loss or metric, which Lightning pickles and which is kept by its state."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _check_same(before: dict[str, Any], after: dict[str, Any], *, name: str) -> None:
    """Raise ConfigError if parameters were replaced: the optimizer has those from before."""
    replaced = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    if replaced:
        raise ConfigError(
            f"{name}.on_load_checkpoint replaces parameters: {', '.join(sorted(replaced)[:4])}. The optimizer has "
            "those from before.\nMake them in __init__, setup or configure_model, before weights are loaded."
        )
