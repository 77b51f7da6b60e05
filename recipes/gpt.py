"""A compact GPT (Radford et al., 2019, as in Karpathy's nanoGPT) on the characters of a text file.

The alphabet is printable ASCII and the newline: any text file will do, and nothing has to be saved with the model.
Shapes: B samples, T places, C channels, H heads, V characters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from framework import DataError, Datasets, StepOutput, TensorSamples

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_TOKENS = {character: token for token, character in enumerate(ALPHABET)}


# Model


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(channels, bias=False), nn.LayerNorm(channels, bias=False)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)
        self.up, self.down = nn.Linear(channels, 4 * channels, bias=False), nn.Linear(4 * channels, channels, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        q, k, v = self.qkv(self.norm_1(x_BTC)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x_BTC = x_BTC + self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        return x_BTC + self.drop(self.down(nn.functional.gelu(self.up(self.norm_2(x_BTC)))))


class Embedding(nn.Module):
    def __init__(self, context: int, channels: int, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(ALPHABET), channels), nn.Embedding(context, channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC: Tensor = self.drop(self.token(tokens_BT) + self.place(places))
        return x_BTC


class GPT(nn.Module):
    """tie_weights: the head has the embedding's weights; false for strategy=pipeline, where they are on two ranks."""

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        channels: int = 128,
        context: int = 64,
        dropout: float = 0.0,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = Embedding(context, channels, dropout)
        self.blocks = nn.ModuleList(Block(channels, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(channels, bias=False)
        self.head = nn.Linear(channels, len(ALPHABET), bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # the residual stream adds up two branches of each layer
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** (0.5 * name.endswith(("proj.weight", "down.weight"))))
        if tie_weights:
            self.head.weight = self.embed.token.weight

    def stages(self, number: int) -> list[nn.Module]:
        parts = [self.embed, *self.blocks, nn.Sequential(self.norm, self.head)]
        ends = [round(len(parts) * (i + 1) / number) for i in range(number)]
        return [nn.Sequential(*parts[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the scores of the next character at each place: (B, T, V)."""
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        scores_BTV: Tensor = self.head(self.norm(x_BTC))
        return scores_BTV


class NextCharacter:
    """Cross entropy of each next character. context: characters of a sample. metrics: of scores and characters."""

    def __init__(self, context: int, metrics: dict[str, Any] | None = None) -> None:
        self.metrics = metrics or {}
        self.per_sample = {"tokens": context}  # logs train/tokens_per_s

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        tokens_BT, next_BT = batch
        return StepOutput(cross_entropy(model(tokens_BT).flatten(0, 1), next_BT.flatten()), len(tokens_BT))

    def validation_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        tokens_BT, next_BT = batch
        scores, targets = model(tokens_BT).flatten(0, 1), next_BT.flatten()
        updates = {name: (scores, targets) for name in self.metrics}
        return StepOutput(cross_entropy(scores, targets), len(tokens_BT), updates=updates)


# Data


def encode(text: str) -> Tensor:
    """Return the numbers of characters that are in the alphabet, int64; others are left out."""
    return torch.tensor([_TOKENS[character] for character in text if character in _TOKENS])


class Windows:
    """A transform from the place where a window begins to its characters and the next ones."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __call__(self, batch: list[Tensor], draws: object) -> list[Tensor]:
        self.tokens = self.tokens.to(batch[0].device)
        windows = self.tokens[batch[0][:, None] + torch.arange(self.context + 1, device=batch[0].device)]
        return [windows[:, :-1], windows[:, 1:]]


def characters(root: str, file: str, context: int = 64, val_share: float = 0.1) -> Datasets:
    """Return windows of `context` characters: all of the beginning of a text, and those of its end side by side.

    file: in the folder `root`; if it isn't there, Python's own documentation. Raises DataError for a short text.
    """
    tokens = encode(_text(Path(root, file).expanduser()))
    train, val = tokens.tensor_split([int(len(tokens) * (1 - val_share))])
    if min(len(train), len(val)) <= context:
        raise DataError(f"The text has {len(tokens)} characters, too few for windows of {context}.")
    return Datasets(
        train=TensorSamples(torch.arange(len(train) - context), transform=Windows(train, context)),
        val=TensorSamples(torch.arange(0, len(val) - context, context), transform=Windows(val, context)),
    )


def _text(file: Path) -> str:
    if file.is_file():
        return file.read_text()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


# Sampling


@torch.no_grad()
def sample(model, context, prompt="\n", length=500, temperature=0.8, top_k=40, seed=1337):  # type: ignore[no-untyped-def]
    """Print a text that the model writes: `job=recipes.gpt.sample checkpoint.path=RUN args.length=200`."""
    if not context.is_main:
        return
    generator = torch.Generator(context.device).manual_seed(seed)
    tokens = encode(prompt).to(context.device)[None]
    for _ in range(length):
        scores = model(tokens[:, -model.context :])[0, -1] / temperature
        best = scores.topk(top_k)
        chosen = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, best.indices[chosen][None]], dim=1)
    print("".join(ALPHABET[token] for token in tokens[0].tolist()))
