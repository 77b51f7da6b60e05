"""A plain PyTorch loop, over ready-made batches or a DataLoader; with DDP where torchrun has started it."""

from __future__ import annotations

import os
from itertools import islice

import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from benchmarks.marks import Stopwatch
from benchmarks.peers.work import Work, endless, loader, make, parser


def train(model: nn.Module, work: Work, batches: object, *, stopwatch: Stopwatch, device: str) -> None:
    """The loop."""
    optimizer = work.optimizer
    loss = work.loss
    tick = stopwatch.tick
    source = endless(batches)
    while not stopwatch.is_done:
        inputs, targets = next(source)
        if device != "cpu":
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        tick()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ready", action="store_true", help="have all batches on the device before the first step")
    arguments.add_argument("--compile", default=None, help="mode of torch.compile")
    asked = arguments.parse_args()
    work = make(asked)
    options = {}
    model = work.model.to(asked.device)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        options["sampler"] = DistributedSampler(work.train)  # type: ignore[arg-type,var-annotated]
    if asked.compile is not None:
        model.compile(mode=asked.compile)
    batches = loader(work, asked, **options)
    source: object = batches
    if asked.ready:
        ready = []
        for inputs, targets in islice(endless(batches), asked.warm_up + asked.steps):
            ready.append((inputs.to(asked.device), targets.to(asked.device)))
        source = ready
    synchronize = None if asked.device == "cpu" else torch.cuda.synchronize
    stopwatch = Stopwatch(asked.warm_up, asked.steps, seconds=asked.seconds, synchronize=synchronize)
    train(model, work, source, stopwatch=stopwatch, device=asked.device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
