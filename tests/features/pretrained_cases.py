"""Texts as transformers' models take them: dicts of tokens, with labels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from framework import Datasets


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens, followed by padding that doesn't count; or one of three classes for each text."""

    def __init__(self, number: int, *, seed: int, has_classes: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 11, (number, 8), generator=generator)
        self.sizes = torch.randint(2, 9, (number, 1), generator=generator)
        self.has_classes = has_classes

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        is_real = torch.arange(8) < self.sizes[index]
        labels = tokens.sum() % 3 if self.has_classes else tokens.where(is_real, -100)
        return {"input_ids": tokens, "attention_mask": is_real.long(), "labels": labels}


def texts(has_classes: bool = False) -> Datasets:
    train, val = [Texts(number, seed=number, has_classes=has_classes) for number in (60, 21)]
    return Datasets(train, val)
