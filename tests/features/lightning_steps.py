"""LightningModules that take part in the optimization: manual optimization, and hooks of the steps.

python -m tests.features.lightning_steps train FOLDER NAME...: train them with Lightning's own Trainer. For each,
FOLDER/NAME.pt gets the weights and FOLDER/NAME.notes what its hooks noted. `train_and_begin` and
`go_on` train a part of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.features.lightning_step_settings import SETTINGS

EPOCHS = 3


class Data(pl.LightningDataModule):
    """Twelve batches of eight, in order."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def rows(self, size: int, seed: int) -> TensorDataset:
        x = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows(96, 1), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows(20, 2), batch_size=self.batch_size)


class Base(pl.LightningModule):
    """The same weights wherever it is built; notes its hooks in a file."""

    net: Any
    generator: Any
    critic: Any

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.file = Path(folder, f"{type(self).__name__}.notes")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def note(self, name: str, *values: Any) -> None:
        if self.trainer.sanity_checking:
            return
        place = [self.current_epoch, self.global_step]
        with self.file.open("a") as file:
            file.write(json.dumps([name, *place, *values]) + "\n")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Hooked(Base):
    """Overrides every hook of the steps, as models do that look at gradients or warm up."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad", type(optimizer).__name__)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.note("optimizer_zero_grad", epoch, batch_idx)
        optimizer.zero_grad(set_to_none=False)

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("on_before_backward", round(float(loss), 5))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.note("backward")
        loss.backward(*args, **kwargs)

    def on_after_backward(self) -> None:
        weight = self.net[0].weight
        assert weight.grad is not None
        weight.grad.mul_(1.5)
        self.note("on_after_backward", round(float(weight.grad.norm()), 5))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", type(optimizer).__name__)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.note("configure_gradient_clipping", gradient_clip_val)
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.note("optimizer_step", epoch, batch_idx)
        if self.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.global_step + 1) / 4
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note("lr_scheduler_step", metric is None)
        scheduler.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx, round(float(outputs["loss"]), 5))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device([batch[0] + 1, batch[1]], device, dataloader_idx)

    def on_validation_model_eval(self) -> None:
        self.note("on_validation_model_eval", self.net.training)
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        self.note("on_validation_model_train", self.net.training)
        super().on_validation_model_train()
        self.net[1].eval()

    def on_validation_start(self) -> None:
        self.note("on_validation_start", self.net.training)

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end", self.net.training, self.net[1].training)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counter(pl.Callback):
    """A callback of the user's own, with a state; changes weights, and so does its hook of the steps."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        pl_module.note("callback", self.seen, batch_idx)
        with torch.no_grad():
            pl_module.net[0].bias.mul_(1 - 0.001 * self.seen)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note("callback.on_after_backward", trainer is pl_module.trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.note("callback.on_train_epoch_end", round(float(trainer.callback_metrics["val_loss"]), 5))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class WithCallbacks(Base):
    """Configures callbacks, and adds to checkpoints."""

    seen = 0

    def configure_callbacks(self) -> Any:
        return [Counter(), pl.callbacks.ModelSummary(max_depth=1)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        with torch.no_grad():
            self.net[2].bias.add_(0.001 * self.seen)
        self.note("on_train_batch_end", batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = torch.tensor(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = int(checkpoint["seen"])


class Stopping(Base):
    """Stops when its loss hardly improves, and has its best epoch before that."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_distance", float((self.current_epoch - 1) ** 2))

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")

    def configure_callbacks(self) -> Any:
        folder = str(self.file.with_suffix(".checkpoints"))
        callbacks: list[Any] = [
            pl.callbacks.EarlyStopping("val_loss", min_delta=2.0, patience=2),
            pl.callbacks.ModelCheckpoint(folder, "{epoch}-{val_distance:.1f}", monitor="val_distance"),
        ]
        # Lightning's Trainer refuses it without a logger.
        if self.logger is not None:
            callbacks.append(pl.callbacks.LearningRateMonitor("step"))
        return callbacks


class Averaged(Base):
    """Evaluates a moving average of its weights."""

    def on_validation_end(self) -> None:
        self.note("on_validation_end", round(float(self.trainer.callback_metrics["val_loss"]), 5))

    def configure_callbacks(self) -> Any:
        return pl.callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_step=5)


class EpochsAveraged(Base):
    """Averages the weights after each epoch but the first, by a class of its own."""

    class Mean(pl.callbacks.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None and epoch_idx > 0

    def configure_callbacks(self) -> Any:
        return [self.Mean()]


class EpochSchedule(Base):
    """With a schedule that steps after epochs, and settings in its checkpoints."""

    def __init__(self, folder: str, hidden: int = 8) -> None:
        self.hidden = hidden
        super().__init__(folder)
        self.save_hyperparameters()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[2].parameters(), "lr": 0.02}, {"params": self.net[0].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Unmatched(Base):
    """Configures callbacks with options that have no counterpart."""

    class Patient(pl.callbacks.EarlyStopping):
        pass

    class Swapping(pl.callbacks.WeightAveraging):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            pass

    def configure_callbacks(self) -> Any:
        callbacks = pl.callbacks
        return [
            callbacks.EarlyStopping("train_loss", strict=False),
            self.Patient("val_loss"),
            self.Swapping(),
            callbacks.EMAWeightAveraging(device="cpu"),
            callbacks.ModelCheckpoint(monitor="val_loss", every_n_train_steps=5),
            callbacks.ModelCheckpoint(save_on_exception=True),
            callbacks.LearningRateMonitor(log_momentum=True),
            callbacks.StochasticWeightAveraging(0.1),
            callbacks.GradientAccumulationScheduler({1: 2}),
        ]


class Misspelt(Base):
    def configure_callbacks(self) -> Any:
        return pl.callbacks.EarlyStopping("val_los")


class Logging(Base):
    """Logs through `self.logger`."""

    def configure_optimizers(self) -> Any:
        self.logger.log_hyperparams({"early": 1})  # type: ignore[union-attr]
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logger: Any = self.logger
        logger.log_metrics({"mine": torch.tensor(batch_idx)}, step=self.global_step)
        logger.experiment.add_scalar("direct", batch_idx, self.global_step)
        assert self.loggers == [logger]
        assert Path(logger.log_dir).is_dir()
        return super().training_step(batch, batch_idx)


class Tracked(Base):
    """Logs through W&B's own run, as well as TensorBoard's."""

    def on_fit_start(self) -> None:
        self._of("W").config.update({"early": 1})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import wandb

        run = self._of("W")
        run.log({"mine": torch.tensor(batch_idx)})
        if batch_idx == 3:
            run.log({"pictures": [wandb.Image(batch[0].numpy(), caption="rows")]}, step=self.global_step)
            run.summary["seen"] = 3
        self._of("_").add_scalar("direct", batch_idx, self.global_step)
        assert not hasattr(run, "url")
        return super().training_step(batch, batch_idx)

    def _of(self, initial: str) -> Any:
        """The experiment of W&B or TensorBoard, by its class."""
        loggers: list[Any] = self.loggers
        experiments = [logger.experiment for logger in loggers]
        return next(each for each in experiments if type(each).__name__.startswith(initial))


class Skipping(Base):
    """Leaves out batches by returning None."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 3 == 1:
            return None
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx, sorted(outputs))


class Skipped(Skipping):
    """The same, with a hook of the steps."""

    def on_after_backward(self) -> None:
        self.note("on_after_backward")


class Gathering(Base):
    """Gathers its losses in training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        gathered: Any = self.all_gather(loss.detach())
        self.log("number", float(gathered.numel()))
        self.log("gathered", gathered.mean())
        return loss


class GatheringInEvaluation(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.all_gather(batch[0].mean())


class LBFGS(Base):
    """An optimizer that calls the closure several times."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class PlainLBFGS(Base):
    """The same without hooks of the steps; its line search depends on the losses."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step", batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.log("number", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", type(optimizer).__name__)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(Base):
    """Two optimizers with schedules, toggled; the generator steps at every other batch, with its gradients clipped."""

    norm: Any = nn.LayerNorm

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.automatic_optimization = False

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(3, 8), self.norm(8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def adversarial_loss(self, scores: Tensor, is_real: bool) -> Tensor:
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        optimizers: Any = self.optimizers()
        optimizer_g, optimizer_d = optimizers
        noise = real[:, :3] * 0.5
        if batch_idx % 2 == 0:
            self.toggle_optimizer(optimizer_g)
            loss_g = self.adversarial_loss(self.critic(self.generator(noise)), True)
            self.log("g_loss", loss_g, prog_bar=True)
            optimizer_g.zero_grad()
            self.manual_backward(loss_g)
            self.clip_gradients(optimizer_g, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer_g.step()
            self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        loss_real = self.adversarial_loss(self.critic(real), True)
        loss_fake = self.adversarial_loss(self.critic(self.generator(noise).detach()), False)
        optimizer_d.zero_grad()
        self.manual_backward((loss_real + loss_fake) / 2)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)
        self.log("d_loss", loss_real + loss_fake)
        self.note("trained", batch_idx)
        if self.trainer.is_last_batch:
            schedules: Any = self.lr_schedulers()
            for schedule in schedules:
                schedule.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.adversarial_loss(self.critic(batch[0]), True))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", len(optimizer.param_groups[0]["params"]))

    def configure_optimizers(self) -> Any:
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        optimizer_d = torch.optim.Adam(self.critic.parameters(), lr=0.02, betas=(0.5, 0.9))
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (optimizer_g, optimizer_d)]
        return [optimizer_g, optimizer_d], schedules


class NormedGan(Gan):
    """With statistics of batches, which aren't those of one process on several."""

    norm: Any = nn.BatchNorm1d


class Accumulating(Base):
    """Accumulates over four batches by itself, with a closure; one optimizer; returns its loss."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "extra": 1}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch_idx, sorted(outputs))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Schedules(Base):
    """Two schedules of one optimizer, one of which follows a training loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.note("on_train_epoch_start", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": plateau, "monitor": "train_loss"},
        ]


class Pace:
    """An object with a state, which Lightning pickles into checkpoints."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class WarmingUp(Base):
    """Computes its learning rate with NumPy, by an object that is kept in checkpoints; looks at the trainer's loops."""

    def build(self) -> None:
        super().build()
        self.pace = Pace()

    def look(self, name: str) -> None:
        trainer: Any = self.trainer
        loop = trainer.fit_loop
        has_validation = loop.epoch_loop.val_loop._data_source.is_defined()
        steps = loop.epoch_loop.global_step
        self.note(name, trainer.state.fn, trainer.state.stage, loop.max_epochs, steps, has_validation)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.look("optimizer_step")
        self.pace.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * np.minimum(1.0, self.pace.steps / 8)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_validation_epoch_end(self) -> None:
        self.look("on_validation_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["pace"] = self.pace
        checkpoint["settings"] = {"of": type(self.pace)}
        checkpoint["steps"] = {"done": np.int64(self.pace.steps)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.pace = checkpoint["pace"]
        assert checkpoint["settings"]["of"] is Pace
        assert checkpoint["steps"] == {"done": self.pace.steps}


class Rebuilding(Base):
    """Makes its layers when a checkpoint is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.build()


def trainer_of(name: str, **settings: Any) -> pl.Trainer:
    plain: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    settings = {**plain, "max_epochs": EPOCHS, "enable_model_summary": False, **SETTINGS[name], **settings}
    return pl.Trainer(accelerator="cpu", devices=1, **settings)


def train(folder: str, name: str) -> None:
    trainer = trainer_of(name)
    module = globals()[name](folder)
    trainer.fit(module, datamodule=Data())
    torch.save(dict(module.state_dict()), Path(folder, f"{name}.pt"))
    checkpoints = trainer.checkpoint_callback
    if isinstance(checkpoints, pl.callbacks.ModelCheckpoint):
        shutil.copy(checkpoints.best_model_path, Path(folder, f"{name}.best.ckpt"))


def train_and_begin(folder: str, name: str) -> None:
    """Also train for two epochs, and save: NAME.epoch.ckpt at the end of the last one, NAME.ckpt after training."""
    train(folder, name)
    saving = pl.callbacks.ModelCheckpoint(folder, f"{name}.epoch")
    trainer = trainer_of(name, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(globals()[name](folder), datamodule=Data())
    trainer.save_checkpoint(Path(folder, f"{name}.ckpt"))


def go_on(folder: str, name: str) -> None:
    """Train from FOLDER/NAME.exported.ckpt to the end, as `train` does; compare what `load_from_checkpoint` reads."""
    path = Path(folder, f"{name}.exported.ckpt")
    cls = globals()[name]
    read = cls.load_from_checkpoint(path, folder=folder)
    torch.save(dict(read.state_dict()), Path(folder, f"{name}.read.pt"))
    trainer = trainer_of(name)
    module = cls(folder)
    trainer.fit(module, datamodule=Data(), ckpt_path=path)
    torch.save({**module.state_dict(), "steps": trainer.global_step}, Path(folder, f"{name}.gone_on.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    actions = {"train": train, "train_and_begin": train_and_begin, "go_on": go_on}
    for name in sys.argv[3:]:
        actions[sys.argv[1]](sys.argv[2], name)
