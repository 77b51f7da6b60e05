"""Tagging the characters of lines of different lengths: is each one plain text, code or a name?

The lines are paragraphs of Python's own documentation, in which code is in "quotation marks" and names are between
*asterisks*. The network sees the lines without these marks. Padding is neither trained on nor counted. Shapes in the
comments:

    B  lines of a batch
    T  characters of its longest line
    C  classes: text, code, name
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from framework import Datasets, StepOutput

TEXT = 0
CODE = 1
NAME = 2
NUM_CLASSES = 3
CLASS_OF_MARK = {'"': CODE, "*": NAME}

PADDING = -1
"""The class of a place behind the end of a line."""

LONGEST_LINE = 200
LARGEST_CODE = 127
"""All characters beyond ASCII are given this code."""


# Data


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Lines of text: for each one its characters' codes (T) and their classes (T)."""

    def __init__(self, lines: list[str]) -> None:
        self.samples = [tag(line) for line in lines]
        # The sampler puts lines of similar lengths into one batch.
        self.lengths = [len(characters) for characters, _ in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index]


def tag(line: str) -> tuple[Tensor, Tensor]:
    """Return the codes of a line's characters without the marks, and their classes."""
    characters: list[int] = []
    classes: list[int] = []
    current = TEXT
    for character in line:
        mark = CLASS_OF_MARK.get(character)
        if mark is not None and current == TEXT:
            # A mark opens a piece of code or a name,
            current = mark
        elif mark is not None and current == mark:
            # and the same mark closes it.
            current = TEXT
        else:
            characters.append(min(ord(character), LARGEST_CODE))
            classes.append(current)
    return torch.tensor(characters), torch.tensor(classes)


def lines(val_share: float = 0.1) -> Datasets:
    """Return the paragraphs of Python's documentation that have marks, as lines. The first ones are for validation."""
    marked: list[str] = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            if '"' in paragraph or "*" in paragraph:
                line = " ".join(paragraph.split())
                marked.append(line[:LONGEST_LINE])

    num_val = int(len(marked) * val_share)
    return Datasets(train=Lines(marked[num_val:]), val=Lines(marked[:num_val]))


def pad(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the characters (B, T), padded by 0, and the classes (B, T), padded by PADDING."""
    characters = [sample[0] for sample in samples]
    classes = [sample[1] for sample in samples]
    return [
        pad_sequence(characters, batch_first=True),
        pad_sequence(classes, batch_first=True, padding_value=PADDING),
    ]


# Model


class Tagger(nn.Module):
    """Two convolutions with shortcuts, and a linear layer at each character."""

    def __init__(self, channels: int = 64, width: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(LARGEST_CODE + 1, channels)
        self.layers = nn.ModuleList([nn.Conv1d(channels, channels, width, padding="same") for _ in range(2)])
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, characters: Tensor) -> Tensor:
        """Return scores of shape (B, C, T), which don't depend on how much padding there is."""
        is_real = (characters > 0)[:, None, :]  # (B, 1, T)
        x = self.embed(characters).transpose(1, 2)  # (B, channels, T)
        x = x * is_real
        for layer in self.layers:
            x = (x + layer(x).relu()) * is_real
        scores = self.head(x.transpose(1, 2))  # (B, T, C)
        return scores.transpose(1, 2)


# Task


class Tagging:
    """Cross entropy of each real character.

    Args:
        metrics: name → metric of the scores and classes of all characters, computed in evaluations.
    """

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        characters, classes = batch  # each (B, T)
        scores = model(characters)  # (B, C, T)
        loss = cross_entropy(scores, classes, ignore_index=PADDING)
        # The loss is a mean over the real characters, so their number is its weight.
        num_real = (classes != PADDING).sum()
        updates = dict.fromkeys(self.metrics, (scores, classes))
        return StepOutput(loss, num_samples=len(characters), weight=num_real, updates=updates)

    def validation_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        return self.training_step(model, batch)
