"""What one writes without any framework: a model, made-up data, a loop; nothing else is imported.

    plain_script.py [--spawn PROCESSES] [--steps STEPS] [--hold]

With `--spawn`, or where torchrun has started it: DDP over gloo. --hold: hold still after the last step.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.marks import hold, report


def train(rank: int, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if asked.spawn > 1:
        distributed.init_process_group("gloo", init_method=asked.meeting, rank=rank, world_size=asked.spawn)
    elif "RANK" in os.environ:
        distributed.init_process_group("gloo")
    inputs = torch.randn(1600, 10)
    data = TensorDataset(inputs, inputs @ torch.randn(10, 5))
    model: nn.Module = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    sampler = None
    if distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, shuffle=sampler is None, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for step, (x, y) in enumerate(loader, start=1):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and not asked.hold:
            report(first_step=time.time())
        if step == asked.steps:
            break
    if asked.hold:
        hold()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spawn", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hold", action="store_true")
    asked = parser.parse_args()
    if asked.spawn == 1:
        train(0, asked)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        asked.meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    torch.multiprocessing.spawn(train, (asked,), nprocs=asked.spawn)


if __name__ == "__main__":
    main()
