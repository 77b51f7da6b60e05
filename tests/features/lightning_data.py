"""Data modules with loaders of many kinds, and LightningModules that note what they get of them.

python -m tests.features.lightning_data FOLDER NAME...: train cases with Lightning's own Trainer. For each,
FOLDER/NAME.pt gets the weights and FOLDER/NAME.notes what was noted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, default_collate

from tests.features.lightning_data_settings import CASES

EPOCHS = 4


def rows(size: int, seed: int) -> TensorDataset:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Noting(pl.LightningModule):
    """The same weights wherever it is built; notes its batches and validations."""

    def __init__(self, folder: str, name: str) -> None:
        super().__init__()
        self.file = Path(folder, f"{name}.notes")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def note(self, what: str, *values: Any) -> None:
        if self.trainer.sanity_checking or not self.trainer.is_global_zero:
            return
        with self.file.open("a") as file:
            file.write(json.dumps([what, self.current_epoch, self.global_step, *values]) + "\n")

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("train", batch_idx, len(batch[0]))
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", batch_idx, dataloader_idx, len(batch[0]))
        self.log("val_loss", self.loss(batch))
        self.log("val_count", float(len(batch[0])), reduce_fx="sum")

    def on_validation_end(self) -> None:
        metrics = {name: round(float(value), 5) for name, value in self.trainer.callback_metrics.items()}
        self.note("on_validation_end", {name: metrics[name] for name in sorted(metrics) if name.startswith("val")})

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Rows(pl.LightningDataModule):
    def __init__(self, size: int = 64, batch_size: int = 8) -> None:
        super().__init__()
        self.size = size
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(rows(self.size, 1), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(rows(20, 2), batch_size=self.batch_size)


class DropLast(Rows):
    """Every loader drops what doesn't fill a batch."""

    def train_dataloader(self) -> Any:
        return DataLoader(rows(self.size, 1), batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(rows(size, 2), batch_size=self.batch_size, drop_last=True) for size in (20, 13, 8)]


class Buckets:
    """Batches of samples of similar length, of five sizes, in another order in each epoch."""

    SIZES = (8, 3, 11, 1, 7)

    def __init__(self, size: int) -> None:
        self.lengths = torch.randint(1, 9, (size,), generator=torch.Generator().manual_seed(5))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2 * len(self.SIZES)

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        by_length = torch.randperm(len(self.lengths), generator=generator)
        by_length = by_length[self.lengths[by_length].argsort(stable=True)]
        batches = by_length.split([*self.SIZES, *self.SIZES])
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[number].tolist()


class Stateful(Buckets):
    """Counts its epochs by itself."""

    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()


class Longer(Buckets):
    def __len__(self) -> int:
        return super().__len__() + 1


class ForOneProcess(Buckets):
    num_replicas = 2


class Unsized:
    def __iter__(self) -> Any:
        return iter([[0, 1], [2]])


class Named:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([[(0, "left"), (1, "right")]])


class Bucketed(Rows):
    """The train part is listed by a batch sampler of this class."""

    def __init__(self, kind: str = "Buckets", evaluates: bool = False) -> None:
        super().__init__(60)
        sized: dict[str, Any] = {"Buckets": Buckets, "Stateful": Stateful, "Longer": Longer, "One": ForOneProcess}
        others: dict[str, Any] = {"Unsized": Unsized, "Named": Named}
        self.sampler: Any = sized[kind](60) if kind in sized else others[kind]()
        self.evaluates = evaluates

    def train_dataloader(self) -> Any:
        return DataLoader(rows(60, 1), batch_sampler=self.sampler)

    def val_dataloader(self) -> Any:
        if self.evaluates:
            return DataLoader(rows(60, 2), batch_sampler=self.sampler)
        return super().val_dataloader()


class TorchBatches(Rows):
    def train_dataloader(self) -> Any:
        data = rows(self.size, 1)
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), self.batch_size, drop_last=True))

    def val_dataloader(self) -> Any:
        data = rows(20, 2)
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), self.batch_size, drop_last=True))


class Combined(Rows):
    """Several train loaders, whose batch sizes are divided by the number of processes.

    Args:
        kind: `dict`, `list` or `nested`, in which the loaders are returned.
        mode: of a CombinedLoader; empty: the loaders are returned as they are.
        short: The last batch of the first loader is short.
    """

    def __init__(
        self,
        kind: str = "dict",
        mode: str = "",
        short: bool = False,
        val_mode: str = "sequential",
        shuffles: bool = False,
    ) -> None:
        super().__init__(50 if short else 48)
        self.shuffles = shuffles
        self.kind = kind
        self.mode: Any = mode
        self.val_mode: Any = val_mode

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        processes = self.trainer.world_size
        large = DataLoader(rows(self.size, 1), batch_size=12 // processes, shuffle=self.shuffles)
        small = DataLoader(rows(34, 3), batch_size=6 // processes, drop_last=True, collate_fn=doubled)
        loaders: Any = {"large": large, "small": small}
        if self.kind == "list":
            loaders = [large, small]
        if self.kind == "nested":
            loaders = {"large": large, "rest": (small, DataLoader(rows(18, 4), batch_size=6 // processes))}
        return CombinedLoader(loaders, self.mode) if self.mode else loaders

    def val_dataloader(self) -> Any:
        return CombinedLoader({"one": super().val_dataloader(), "two": super().val_dataloader()}, self.val_mode)


def doubled(samples: Any) -> Any:
    x, y = default_collate(samples)
    return x * 2, y


class Combining(Noting):
    """Adds up the losses of all loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for part in self.parts_of(batch):
            self.note("train", batch_idx, None if part is None else len(part[0]))
            if part is not None:
                losses.append(self.loss(part))
        self.log("train_loss", sum(losses), batch_size=6)
        return torch.stack(losses).sum()

    def parts_of(self, batch: Any) -> list[Any]:
        if isinstance(batch, list):
            return batch
        rest = [batch["small"]] if "small" in batch else batch["rest"]
        return [batch["large"], *rest]


class TransferringRows(Rows):
    """Overrides two of the hooks around the transfer of a batch; has two validation sets."""

    def __init__(self) -> None:
        super().__init__(24)

    def val_dataloader(self) -> Any:
        return [super().val_dataloader(), DataLoader(rows(8, 4), batch_size=8)]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("data.on_before_batch_transfer", dataloader_idx)
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("data.on_after_batch_transfer", dataloader_idx)
        return [batch[0] + 1, batch[1]]

    def note(self, what: str, *values: Any) -> None:
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        module.note(what, *values)


class Transferring(Noting):
    """Overrides two of the hooks, too. One of them isn't called: the data module's takes precedence."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.note("transfer_batch_to_device", str(device), dataloader_idx)
        return super().transfer_batch_to_device([batch[0] ** 2, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise AssertionError("never called")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", round(float(batch[0].sum()), 3))


class TellingEpochs(Noting):
    """Tells its batch sampler the epoch, as Lightning doesn't."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.batch_sampler.set_epoch(self.current_epoch)  # type: ignore[union-attr]


def train(folder: str, name: str) -> None:
    case = CASES[name]
    plain: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, enable_model_summary=False, **plain, **case.trainer
    )
    module = globals()[case.model](folder, name)
    trainer.fit(module, datamodule=globals()[case.data](**case.keywords))
    torch.save(dict(module.state_dict()), Path(folder, f"{name}.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        train(sys.argv[1], name)
