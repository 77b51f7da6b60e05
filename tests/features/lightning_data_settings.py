"""The cases of `lightning_data`, for tests that don't import Lightning, which takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODULE = "tests.features.lightning_data"


@dataclass(frozen=True)
class Case:
    # The class of the data module, and its keywords.
    data: str
    keywords: dict[str, Any] = field(default_factory=dict)
    # The class of the LightningModule.
    model: str = "Noting"
    # Keys of the section `trainer`, which are Lightning's own.
    trainer: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    # Validations by a share of the epoch: with 8 and 7 batches, in every other epoch, and in part of an epoch.
    "HalfOfEight": Case("Rows", {"size": 64}, trainer={"val_check_interval": 0.5}),
    "HalfOfSeven": Case("Rows", {"size": 56}, trainer={"val_check_interval": 0.5}),
    "ThirdOfSeven": Case("Rows", {"size": 56}, trainer={"val_check_interval": 0.3, "check_val_every_n_epoch": 2}),
    "HalfOfLimit": Case("Rows", {"size": 64}, trainer={"val_check_interval": 0.5, "limit_train_batches": 6}),
    "WholeEpoch": Case("Rows", {"size": 60}, trainer={"val_check_interval": 1.0}),
    "Tiny": Case("Rows", {"size": 24}, trainer={"val_check_interval": 0.1}),
    "Accumulated": Case("Rows", {"size": 64}, trainer={"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
    "DropLast": Case("DropLast", {"size": 60}),
    "TorchBatches": Case("TorchBatches", {"size": 60}),
    "Transfers": Case("TransferringRows", model="Transferring"),
    # The batches of a batch sampler.
    "Buckets": Case("Bucketed", model="TellingEpochs"),
    "HalfOfBuckets": Case("Bucketed", model="TellingEpochs", trainer={"val_check_interval": 0.5}),
    # Several train loaders.
    "LoadersInDict": Case("Combined", {"kind": "dict"}, model="Combining"),
    "LoadersInList": Case("Combined", {"kind": "list", "short": True}, model="Combining"),
    "MinSize": Case("Combined", {"mode": "min_size", "short": True}, model="Combining"),
    "MaxSize": Case("Combined", {"kind": "list", "mode": "max_size"}, model="Combining"),
    "Cycled": Case(
        "Combined",
        {"kind": "nested", "mode": "max_size_cycle", "short": True},
        model="Combining",
        trainer={"limit_train_batches": 4},
    ),
}
