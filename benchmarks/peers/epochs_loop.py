"""A plain loop of whole epochs: batches by indexing tensors, a validation after each epoch, and nothing else."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from benchmarks.marks import Intervals
from benchmarks.peers.work import Split, splits


@torch.no_grad()
def validate(model: nn.Module, loss: nn.Module, split: Split, *, batch: int) -> float:
    """Return the mean loss."""
    model.eval()
    total = 0.0
    for inputs, targets in zip(split.inputs.split(batch), split.targets.split(batch), strict=True):
        total += float(loss(model(inputs), targets)) * len(inputs)
    model.train()
    return total / len(split.inputs)


def train(asked: argparse.Namespace) -> None:
    work = splits(asked.work)
    model = work.model
    inputs = work.train.inputs
    targets = work.train.targets
    intervals = Intervals(asked.steps_per_epoch)
    intervals.start()
    for _ in range(asked.epochs):
        order: Tensor = torch.randperm(len(inputs))
        for rows in order.split(work.batch):
            work.loss(model(inputs[rows]), targets[rows]).backward()
            work.optimizer.step()
            work.optimizer.zero_grad()
            intervals.tick()
        validate(model, work.loss, work.val, batch=256)
    intervals.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=("toy", "digits"), required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--steps-per-epoch", type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(asked)


if __name__ == "__main__":
    main()
