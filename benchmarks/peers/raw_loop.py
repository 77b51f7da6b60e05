"""A plain PyTorch loop, over ready-made batches or a DataLoader; with DDP where torchrun has started it."""

from __future__ import annotations

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.marks import Stopwatch, report
from benchmarks.peers.work import Work, endless, loader, make, parser


def accuracy(model: nn.Module, work: Work, device: str) -> float:
    assert work.val is not None
    model.eval()
    right = total = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(work.val, batch_size=256):
            outputs = model(inputs.to(device)).argmax(dim=1)
            right += int((outputs == targets.to(device)).sum())
            total += len(targets)
    model.train()
    return right / total


def train(model: nn.Module, work: Work, batches: object, *, steps: int, tick: object, device: str) -> None:
    """The loop. tick: called at the end of each step."""
    assert callable(tick)
    optimizer, loss = work.optimizer, work.loss
    source = endless(batches)
    for _ in range(steps):
        inputs, targets = next(source)
        if device != "cpu":
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        tick()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ready", action="store_true", help="make all batches before the first step")
    arguments.add_argument("--until", type=float, default=None, help="validation accuracy, looked at after each epoch")
    asked = arguments.parse_args()
    work = make(asked)
    options = {}
    model = work.model.to(asked.device)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        options["sampler"] = DistributedSampler(work.train)  # type: ignore[arg-type,var-annotated]
    batches = loader(work, asked, **options)
    if asked.until is not None:
        epochs = 0
        while accuracy(model, work, asked.device) < asked.until:
            train(model, work, batches, steps=len(batches), tick=int, device=asked.device)
            epochs += 1
        report(reached=time.time(), epochs=epochs)
        return
    source: object = batches
    if asked.ready:
        chosen = endless(batches)
        source = [next(chosen) for _ in range(asked.warm_up + asked.steps)]
    stopwatch = Stopwatch(
        asked.warm_up, asked.steps, synchronize=None if asked.device == "cpu" else torch.cuda.synchronize
    )
    train(model, work, source, steps=stopwatch.last, tick=stopwatch.tick, device=asked.device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
