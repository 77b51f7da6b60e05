"""A hand-written loop for the GPT of recipe=gpt_char, as nanoGPT's: random windows, clipping, warm-up and cosine."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from benchmarks.marks import Stopwatch
from recipes.gpt import GPT, encode

BATCH = 12
CONTEXT = 64
LR = 0.002
DECAY = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True)
    for name in ("--warm-up", "--steps", "--threads"):
        parser.add_argument(name, type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    model = GPT(layers=4, heads=4, channels=128, context=CONTEXT)
    large = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    small = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": large}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), weight_decay=DECAY, fused=True)
    tokens = encode(asked.file.read_text())
    stopwatch = Stopwatch(asked.warm_up, asked.steps, synchronize=None)
    for step in range(stopwatch.last):
        rate = min((step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / 2000))
        for group in optimizer.param_groups:
            group["lr"] = LR * rate
        places = torch.randint(len(tokens) - CONTEXT, (BATCH,)).tolist()
        inputs = torch.stack([tokens[place : place + CONTEXT] for place in places])
        targets = torch.stack([tokens[place + 1 : place + 1 + CONTEXT] for place in places])
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stopwatch.tick()


if __name__ == "__main__":
    main()
