"""LightningModules of several kinds, as people write them, and their data. Nothing in here knows the framework."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

CLASSES = 4


class Data(pl.LightningDataModule):
    """Samples of one kind, in their order; the last validation batch is short."""

    def __init__(self, kind: str = "vectors", batch_size: int = 16, several: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        self.sets = {
            part: self.make(size, seed) for seed, (part, size) in enumerate({"fit": 96, "val": 40, "test": 24}.items())
        }

    def make(self, size: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        if self.hparams["kind"] == "tokens":
            return TensorDataset(torch.randint(0, 11, (size, 9), generator=generator))
        shape = (1, 8, 8) if self.hparams["kind"] == "images" else (8,)
        x = torch.randn(size, *shape, generator=generator)
        return TensorDataset(x, x.flatten(1)[:, :CLASSES].argmax(dim=1))

    def train_dataloader(self) -> Any:
        return DataLoader(self.sets["fit"], batch_size=self.hparams["batch_size"], shuffle=False)

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(self.sets[part], batch_size=16) for part in ("val", "test")]
        return loaders if self.hparams["several"] else loaders[0]

    def test_dataloader(self) -> Any:
        return DataLoader(self.sets["test"], batch_size=16)


class Base(pl.LightningModule):
    """The same weights wherever it is built."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.build()

    def build(self) -> None:
        raise NotImplementedError


class Regression(pl.LightningModule):
    """An MLP and Adam; `save_hyperparameters`; a shared step; a dict with a loss."""

    def __init__(self, hidden: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, self.hparams["hidden"]), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).squeeze(1)
        return out

    def shared_step(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        loss = mse_loss(self(x), y.float())
        self.log(f"{stage}_loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.shared_step(batch, "train"), "extra": batch_idx}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.shared_step(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


class ConvNet(Base):
    """BatchNorm, SGD with momentum, StepLR after each epoch, as two lists; a training_step without batch_idx."""

    def build(self) -> None:
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).flatten(1))
        return out

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self(x)
        self.log_dict({"val/loss": cross_entropy(scores, y), "val/acc": (scores.argmax(1) == y).float().mean()})
        return cross_entropy(scores, y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class LanguageModel(Base):
    """A transformer; OneCycle in each step, as long as the training; trained with clipping and accumulation."""

    def build(self) -> None:
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        out: Tensor = self.head(self.block(self.embed(tokens), src_mask=mask, is_causal=True))
        return out

    def loss(self, batch: Any) -> Tensor:
        (tokens,) = batch
        return cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "lr"}}


class Autoencoder(Base):
    """Two parameter groups, as a tuple of one dict; hooks of batches and steps; a momentum copy that isn't trained."""

    def build(self) -> None:
        self.encoder = nn.Linear(8, 3)
        self.decoder = nn.Linear(3, 8)
        self.slow = nn.Linear(8, 3).requires_grad_(False)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x).relu())
        return out

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 0.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.largest = max(float(each.grad.abs().max()) for each in self.encoder.parameters() if each.grad is not None)
        self.log("largest", self.largest)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss"}
        assert self.global_step == self.current_epoch * 6 + batch_idx + 1
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.global_step == self.current_epoch * 6 + batch_idx
        return mse_loss(self(batch), batch) + 0.1 * mse_loss(self.encoder(batch), self.slow(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch), batch)
        self.log("recon", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.encoder.parameters(), "lr": 0.01},
            {"params": self.decoder.parameters(), "weight_decay": 0.1},
        ]
        return ({"optimizer": torch.optim.AdamW(groups, lr=0.003)},)


class Classifier(Base):
    """Metrics of torchmetrics, logged as objects; ReduceLROnPlateau by one of them."""

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.train_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_acc = MulticlassAccuracy(CLASSES, average="micro")
        self.val_f1 = MulticlassF1Score(CLASSES)
        self.val_loss = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self(x)
        self.train_acc(scores, y)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        return cross_entropy(scores, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.val_loss.update(cross_entropy(scores, y), len(y))
        self.val_acc.update(scores, y)
        self.val_f1(scores, y)
        self.log("val_acc", self.val_acc)
        self.log("val_f1", self.val_f1, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.val_loss.compute())
        self.val_loss.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_acc"}


class Reductions(Base):
    """`self.log` with each reduction, with and without a batch size, in steps, epochs, batches and some steps only."""

    def build(self) -> None:
        self.net = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).squeeze(1)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        losses = (self(x) - y) ** 2
        self.log("train_least", losses.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("train_most", losses.max(), on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("train_number", len(x), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("train_mean", losses.mean(), on_step=False, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", float(batch_idx))
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = (self(x) - y) ** 2
        self.log("val_least", losses.min(), reduce_fx="min")
        self.log("val_most", losses.max(), reduce_fx="max")
        self.log("val_number", len(x), reduce_fx="sum")
        self.log("val_weighted", losses.mean(), batch_size=len(x) * 3 if len(x) == 16 else 1)
        self.log_dict({"val_mean": losses.mean(), "val_first": losses[0]}, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.05)]


class Keeping(Regression):
    """Keeps its optimizer, and sets the learning rate itself; needs the number of steps throughout."""

    def configure_optimizers(self) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=1 / int(self.trainer.estimated_stepping_batches))
        return self.made

    def on_train_start(self) -> None:
        assert math.isfinite(self.trainer.estimated_stepping_batches)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.made.param_groups[0]["lr"] = 0.5


class Watched(Regression):
    """Notes its hooks and what they see of the trainer, in a file; stops by itself."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def note(self, name: str) -> None:
        sanity = " sanity" if self.trainer.sanity_checking else ""
        with Path(self.file).open("a") as file:
            file.write(f"{name} {self.current_epoch} {self.global_step}{sanity}\n")

    def configure_model(self) -> None:
        self.extra = nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_index", float(dataloader_idx))
        self.log("val_size", len(batch[0]), reduce_fx="sum")

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")
        assert (self.trainer.max_epochs, self.trainer.world_size, self.device.type) == (9, 1, "cpu")
        self.trainer.should_stop = self.current_epoch == 1


def _noting(name: str) -> Any:
    def hook(self: Watched, *_: Any) -> None:
        self.note(name)

    return hook


for _name in (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_start",
    "on_test_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_end",
    "on_fit_end",
    "on_test_end",
    "teardown",
):
    setattr(Watched, _name, _noting(_name))


def changed(name: str, of: str = "Regression") -> pl.LightningModule:
    """Return a module that differs from another in one thing."""
    base: Any = globals()[of]
    optimizers = {
        "optimizers": lambda self: [torch.optim.SGD(self.parameters()), torch.optim.SGD(self.parameters())],
        "none": lambda _: None,
        "nonsense": lambda _: "Adam",
        "no monitor": _plateau,
        "train monitor": lambda self: _plateau(self, monitor="train_los"),
        "unknown monitor": lambda self: _plateau(self, monitor="val_los"),
        "not strict": lambda self: _scheduled(self, _plateau(self)["lr_scheduler"], monitor="val_los", strict=False),
        "every fourth": lambda self: _scheduled(self, None, interval="step", frequency=4),
    }
    steps = {
        "no experiment": lambda self, *_: self.logger.experiment,
        "steps itself": lambda self, *_: self.optimizers().step(),
        "vector": lambda self, batch, *_: self.log("v", batch[0]),
        "median": lambda self, *_: self.log("v", 1.0, reduce_fx=torch.median),
        "one name": lambda self, *_: self.log_dict({"train_v": 1.0, "v": 2.0}) or self.net[0].weight.sum(),
    }
    methods: dict[str, Any] = {name: lambda *_: None}
    if name in optimizers:
        methods = {"configure_optimizers": optimizers[name]}
    elif name in steps:
        methods = {"training_step": steps[name]}
    elif name == "callbacks":
        methods = {"configure_callbacks": lambda _: pl.callbacks.StochasticWeightAveraging(0.1)}
    elif name == "only step":
        methods = {"validation_step": lambda self, _, number: self.log("v", number * 1.0, on_epoch=False, batch_size=1)}
    module: pl.LightningModule = type("Changed", (base,), methods)()
    return module


def _scheduled(self: Any, schedule: Any, **keys: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1) if schedule is None else schedule.optimizer
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **keys}}]


def _plateau(self: Any, **keys: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), **keys}


CASES: dict[str, dict[str, Any]] = {
    "Regression": {"kind": "vectors"},
    "ConvNet": {"kind": "images"},
    "LanguageModel": {"kind": "tokens", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "Autoencoder": {"kind": "vectors"},
    "Classifier": {"kind": "vectors"},
    "Reductions": {"kind": "vectors"},
}
"""The name of each module, the kind of its data, and keys of the section `trainer`, which are Lightning's own."""
EPOCHS = 3
