"""What everyone trains: models, data and optimizers of our recipes, as a script of one's own would make them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

MNIST_MEAN = 0.1307
MNIST_STD = 0.3081
HELD_OUT = 5000


class Work(NamedTuple):
    """loss: of outputs and targets."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    train: Dataset[Any]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every loop takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--work", choices=("toy", "mnist", "digits"), default="toy")
    result.add_argument("--batch", type=int, default=20)
    result.add_argument("--warm-up", type=int, default=1)
    result.add_argument("--steps", type=int, default=10)
    result.add_argument("--seconds", type=float, default=0.0, help="time more than --steps if these take less")
    result.add_argument("--threads", type=int, default=1)
    result.add_argument("--processes", type=int, default=1, help="as many as there are of this one")
    result.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    result.add_argument("--device", default="cpu")
    result.add_argument("--fused", action="store_true", help="the optimizer's fused form, for MNIST and digits")
    result.add_argument("--root", default="data", help="MNIST's files, unpacked, as torchvision has them")
    return result


def make(asked: argparse.Namespace) -> Work:
    """Model, data and optimizer, seeded."""
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    makers = {"toy": _toy, "mnist": _mnist, "digits": _digits}
    return makers[asked.work](asked)


def _toy(asked: argparse.Namespace) -> Work:
    from recipes.toy import ToyModel, toy_regression

    samples = (asked.warm_up + asked.steps) * asked.batch * asked.processes
    train = toy_regression(num_samples=samples, val_fraction=0, test_fraction=0).train
    model = ToyModel()
    return Work(model, torch.optim.SGD(model.parameters(), lr=0.001), nn.MSELoss(), train)  # type: ignore[arg-type]


def _mnist(asked: argparse.Namespace) -> Work:
    from torchvision.datasets import MNIST
    from torchvision.transforms import Compose, Normalize, ToTensor

    # The same images are held out as by recipe=mnist.
    data = MNIST(asked.root, transform=Compose([ToTensor(), Normalize(MNIST_MEAN, MNIST_STD)]))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    return _network(asked, Subset(data, order[HELD_OUT:]))


def _digits(asked: argparse.Namespace) -> Work:
    from recipes.digits import digits

    return _network(asked, digits().train)  # type: ignore[arg-type]


def _network(asked: argparse.Namespace, train: Dataset[Any]) -> Work:
    from recipes.digits import ConvNet

    model = ConvNet()
    if asked.device == "cuda":
        # Before the optimizer is made, because a fused one asks where the weights are.
        model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5, fused=asked.fused or None)
    return Work(model, optimizer, nn.CrossEntropyLoss(), train)


class Split(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Splits(NamedTuple):
    """All that whole epochs need. loss: of outputs and targets."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    batch: int
    train: Split
    val: Split


def splits(work: str) -> Splits:
    """Return model, optimizer and tensors of recipe=toy or recipe=digits, as these have them."""
    if work == "toy":
        from recipes.toy import ToyModel, toy_regression

        data: Any = toy_regression()
        model: nn.Module = ToyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        return Splits(model, optimizer, nn.MSELoss(), 20, Split(*data.train.tensors), Split(*data.val.tensors))
    from recipes.digits import ConvNet, digits

    data = digits()
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return Splits(model, optimizer, nn.CrossEntropyLoss(), 32, Split(*data.train[:]), Split(*data.val[:]))


def loader(work: Work, asked: argparse.Namespace, **options: Any) -> DataLoader[Any]:
    """Shuffled, unless `options` name a sampler."""
    if "sampler" not in options:
        options["shuffle"] = True
    return DataLoader(
        work.train,
        batch_size=asked.batch,
        num_workers=asked.workers,
        persistent_workers=asked.workers > 0,
        pin_memory=asked.device != "cpu",
        drop_last=True,
        **options,
    )


def endless(batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from batches
