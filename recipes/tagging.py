"""Tagging the characters of lines of different lengths: is each one plain text, code or a name?

The lines are paragraphs of Python's own documentation, without the marks that tell. Padding is neither trained on nor
counted. Shapes: B samples, T characters, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from framework import Datasets, StepOutput

CLASSES = ("text", "code", "name")
PADDING = -1
_LONGEST = 200


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Lines of text as characters' codes, with a class for each: in "code", in a *name*, or in plain text."""

    def __init__(self, lines: list[str]) -> None:
        self.samples = [_tagged(line) for line in lines]
        self.lengths = [len(characters) for characters, _ in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index]


def _tagged(line: str) -> tuple[Tensor, Tensor]:
    """Return the characters without their marks, which are what is to be found out, and the classes."""
    characters, classes, place, inside = [], [], 0, 0
    while place < len(line):
        mark = 1 if line.startswith('"', place) else 2 if line.startswith("*", place) else 0
        if mark and inside in (0, mark):
            inside, place = mark - inside, place + 1
            continue
        characters.append(min(ord(line[place]), 127))
        classes.append(inside)
        place += 1
    return torch.tensor(characters), torch.tensor(classes)


def lines(val_share: float = 0.1) -> Datasets:
    from pydoc_data.topics import topics

    paragraphs = [text.replace("\n", " ") for name in sorted(topics) for text in topics[name].split("\n\n")]
    found = [" ".join(text.split())[:_LONGEST] for text in paragraphs if '"' in text or "*" in text]
    train, val = found[int(len(found) * val_share) :], found[: int(len(found) * val_share)]
    return Datasets(Lines(train), Lines(val))


def pad(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return characters (B, T), padded by 0, and classes (B, T), padded by PADDING."""
    characters, classes = map(list, zip(*samples, strict=True))
    return [pad_sequence(characters, True), pad_sequence(classes, True, padding_value=PADDING)]


class Tagger(nn.Module):
    def __init__(self, channels: int = 64, width: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, channels)
        self.layers = nn.ModuleList(nn.Conv1d(channels, channels, width, padding="same") for _ in range(2))
        self.head = nn.Linear(channels, len(CLASSES))

    def forward(self, characters_BT: Tensor) -> Tensor:
        """Return scores of shape (B, C, T), which don't depend on how much padding there is."""
        is_real = (characters_BT > 0)[:, None]
        x = self.embed(characters_BT).transpose(1, 2) * is_real
        for layer in self.layers:
            x = (x + layer(x).relu()) * is_real
        scores_BCT: Tensor = self.head(x.transpose(1, 2)).transpose(1, 2)
        return scores_BCT


class Tagging:
    """Cross entropy of each real character. metrics: of the scores of all characters and their classes."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        characters_BT, classes_BT = batch
        scores_BCT = model(characters_BT)
        loss = cross_entropy(scores_BCT, classes_BT, ignore_index=PADDING)
        updates = dict.fromkeys(self.metrics, (scores_BCT, classes_BT))
        return StepOutput(loss, len(characters_BT), weight=(classes_BT != PADDING).sum(), updates=updates)

    validation_step = training_step
