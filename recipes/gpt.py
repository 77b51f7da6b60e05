"""A compact GPT (Radford et al., 2019, after Karpathy's nanoGPT) on the characters of a text file.

The alphabet is printable ASCII and the newline. Shapes: B samples, T places, C channels, V characters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from framework import DataError, Datasets, StepOutput, TensorSamples

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
TOKENS = {character: token for token, character in enumerate(ALPHABET)}


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(channels, bias=False), nn.LayerNorm(channels, bias=False)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(self.norm_1(x_BTC)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x_BTC = x_BTC + self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        return torch.add(x_BTC, self.drop(self.down(gelu(self.up(self.norm_2(x_BTC))))))


class Embedding(nn.Module):
    def __init__(self, context: int, channels: int, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(ALPHABET), channels), nn.Embedding(context, channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC: Tensor = self.drop(self.token(tokens_BT) + self.place.weight[: tokens_BT.shape[1]])
        return x_BTC


class GPT(nn.Module):
    """tie_weights: the head has the embedding's weights; false for strategy=pipeline, where they are on two ranks."""

    def __init__(
        self, layers: int, heads: int, channels: int, context: int, dropout: float = 0.0, tie_weights: bool = True
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = Embedding(context, channels, dropout)
        self.blocks = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(channels, bias=False)
        self.head = nn.Linear(channels, len(ALPHABET), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends_branch = name.endswith(("proj.weight", "down.weight"))  # the stream adds up two of each layer
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends_branch else 0.02)
        if tie_weights:
            self.head.weight = self.embed.token.weight

    def stages(self, number: int) -> list[nn.Module]:
        parts = [self.embed, *self.blocks, nn.Sequential(self.norm, self.head)]
        ends = [len(parts) * (i + 1) // number for i in range(number)]
        return [nn.Sequential(*parts[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores of the next character at each place, (B, T, V)."""
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        scores_BTV: Tensor = self.head(self.norm(x_BTC))
        return scores_BTV


class NextCharacter:
    """Cross entropy of each next character. context: characters of a sample."""

    def __init__(self, context: int, metrics: dict[str, Any] | None = None) -> None:
        self.metrics = metrics or {}
        self.per_sample = {"tokens": context}  # logs train/tokens_per_s

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        tokens_BT, next_BT = batch
        scores, target = model(tokens_BT).flatten(0, 1), next_BT.flatten()
        updates = dict.fromkeys(self.metrics, (scores, target))
        return StepOutput(cross_entropy(scores, target), len(tokens_BT), updates=updates)

    validation_step = training_step


# Data


class Windows:
    """The transform from the places where windows begin to their characters, and the next ones."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __call__(self, batch: list[Tensor], draws: object) -> list[Tensor]:
        self.tokens = self.tokens.to(batch[0].device)
        windows = self.tokens[batch[0][:, None] + torch.arange(self.context + 1, device=batch[0].device)]
        return [windows[:, :-1], windows[:, 1:]]


def encode(text: str) -> Tensor:
    """Return the tokens of the characters that are in the alphabet."""
    return torch.tensor([TOKENS[character] for character in text if character in TOKENS])


def characters(root: str, file: str, context: int, val_share: float = 0.1) -> Datasets:
    """Return windows of a text: all of its beginning, and those of its end side by side.

    file: in the folder `root`; if it isn't there, Python's own documentation. Raises DataError for a short text.
    """
    path = Path(root, file).expanduser()
    if path.is_file():
        text = path.read_text()
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
    tokens = encode(text)
    train, val = tokens.tensor_split([int(len(tokens) * (1 - val_share))])
    if min(len(train), len(val)) <= context:
        raise DataError(f"{path} has {len(tokens)} characters, too few for windows of {context}.")
    return Datasets(
        train=TensorSamples(torch.arange(len(train) - context), transform=Windows(train, context)),
        val=TensorSamples(torch.arange(0, len(val) - context, context), transform=Windows(val, context)),
    )


@torch.no_grad()
def sample(model: Any, context: Any, prompt: str = "\n", length: int = 500, temperature: float = 0.8) -> None:
    """Print a text that the model writes: job=recipes.gpt.sample checkpoint.path=RUN args.length=200."""
    tokens = encode(prompt).to(context.device)[None]
    for _ in range(length * context.is_main):
        likely = (model(tokens[:, -model.context :])[0, -1] / temperature).softmax(dim=0)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1)[None]], dim=1)
    sys.stdout.write("".join(ALPHABET[token] for token in tokens[0].tolist()) + "\n" if context.is_main else "")
