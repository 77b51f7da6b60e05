"""What `on_save_checkpoint` of a module, a data module and callbacks adds to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

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
        checkpoint = self._checkpoint()
        own_keys = set(checkpoint)
        if self._data_saves:
            self._trainer.datamodule.on_save_checkpoint(checkpoint)
        if self._saves:
            self._trainer.lightning_module.on_save_checkpoint(checkpoint)
        kept["added"] = {name: value for name, value in checkpoint.items() if name not in own_keys}
        return kept

    def load(self, kept: dict[str, Any]) -> None:
        """Give the hooks back what `save` returned."""
        self._load(kept.get("datamodule", {}), kept.get("callbacks", {}))
        self._call_load_hooks({**self._checkpoint(), **kept.get("added", {})})

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
        for owner in (self._trainer.datamodule, self._trainer.lightning_module):
            if owner is not None and overrides_method(owner, "on_load_checkpoint"):
                owner.on_load_checkpoint(checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """Return the entries of Lightning's own checkpoint that are known here."""
        module = self._trainer.lightning_module
        return {
            "epoch": self._trainer.current_epoch,
            "global_step": self._trainer.global_step,
            "state_dict": module.state_dict(),
            "hyper_parameters": dict(module.hparams),
        }
