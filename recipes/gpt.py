"""A compact GPT (Radford et al., 2019, after Karpathy's nanoGPT) on the characters of a text file.

The alphabet is printable ASCII and the newline. Shapes in the comments:

    B  samples of a batch
    T  places in a sample: its characters, at most `context`
    C  channels
    V  characters of the alphabet
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from framework import DataError, Datasets, StepOutput, TensorSamples, TokenFile

ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
TOKENS = {character: token for token, character in enumerate(ALPHABET)}


# Model


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each on its own branch of the residual stream."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(channels, bias=False)
        self.norm_2 = nn.LayerNorm(channels, bias=False)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.proj = nn.Linear(channels, channels, bias=False)
        self.up = nn.Linear(channels, 4 * channels, bias=False)
        self.down = nn.Linear(4 * channels, channels, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x), mask))  # (B, T, C)
        return x + self.drop(self.mlp(self.norm_2(x)))

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)  # each (B, T, C)
        # Each head attends by itself: (B, heads, T, C / heads).
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)

        dropout = self.dropout if self.training else 0.0
        # Without a mask, each place attends to all before it.
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout)

        y = y.transpose(1, 2).reshape(B, T, C)
        return self.proj(y)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Embedding(nn.Module):
    """The sum of a vector for each character and one for its place."""

    def __init__(self, vocab_size: int, context: int, channels: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, channels)
        self.place = nn.Embedding(context, channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        # By a call, for which FSDP gathers the weights.
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.place(places)  # (B, T, C)
        return self.drop(x)


class GPT(nn.Module):
    """The whole model: from tokens (B, T) to the scores of the next character at each place (B, T, V).

    Args:
        layers: Number of blocks.
        heads: Attention heads of a block.
        channels: Size of the vector at each place.
        context: The longest text that the model sees, in characters.
        dropout: Dropout probability.
        tie_weights: The head uses the embedding's weights. Use false with strategy=pipeline, where the two are on
            different ranks.
        vocab_size: Number of tokens; by default the characters of the alphabet.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        channels: int,
        context: int,
        dropout: float = 0.0,
        tie_weights: bool = True,
        vocab_size: int = len(ALPHABET),
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = Embedding(vocab_size, context, channels, dropout)
        self.blocks = nn.ModuleList([Block(channels, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(channels, bias=False)
        self.head = nn.Linear(channels, vocab_size, bias=False)

        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                # These end a branch, and the residual stream adds up two branches per layer.
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

        if tie_weights:
            self.head.weight = self.embed.token.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        mask = None
        if documents is not None:
            # Each place attends to those before it in its own document: (B, 1, T, T), for all heads.
            is_same = documents[:, :, None] == documents[:, None, :]
            mask = is_same.tril()[:, None]
        x = self.embed(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # (B, T, V)

    def stages(self, number: int) -> list[nn.Module]:
        """Return the layers in `number` parts of about the same length, for strategy=pipeline."""
        layers = [self.embed, *self.blocks, nn.Sequential(self.norm, self.head)]
        stages: list[nn.Module] = []
        for stage in range(number):
            begin = len(layers) * stage // number
            end = len(layers) * (stage + 1) // number
            stages.append(nn.Sequential(*layers[begin:end]))
        return stages


# Task


class NextCharacter:
    """Cross entropy of each next character.

    Args:
        context: Characters of a sample.
        metrics: name → metric of the scores and the next characters, computed in evaluations.
    """

    def __init__(self, context: int, metrics: dict[str, Any] | None = None) -> None:
        self.metrics = metrics or {}
        # With this, the framework logs train/tokens_per_s.
        self.per_sample = {"tokens": context}

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        # Packed documents have a third tensor, the number of each token's document.
        tokens, next_tokens, *documents = batch  # each (B, T)
        scores = model(tokens, *documents).flatten(0, 1)  # (B * T, V)
        targets = next_tokens.flatten()  # (B * T)
        loss = cross_entropy(scores, targets)
        # In an evaluation, each metric's update(scores, targets) is called.
        updates = dict.fromkeys(self.metrics, (scores, targets))
        return StepOutput(loss, num_samples=len(tokens), updates=updates)

    def validation_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        return self.training_step(model, batch)


# Data


class Windows:
    """Turn a batch of places where windows begin into the characters of each window and those that follow them.

    This is a transform of TensorSamples. `draws` would give random numbers; none are needed.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __call__(self, batch: list[Tensor], draws: object) -> list[Tensor]:
        begins = batch[0]  # (B)
        # The text is copied with the first batch; then it is on the device already.
        self.tokens = self.tokens.to(begins.device)
        offsets = torch.arange(self.context + 1, device=begins.device)  # (T + 1)
        windows = self.tokens[begins[:, None] + offsets]  # (B, T + 1)
        return [windows[:, :-1], windows[:, 1:]]


def encode(text: str) -> Tensor:
    """Return the tokens of the text. Characters outside the alphabet are left out."""
    return torch.tensor([TOKENS[character] for character in text if character in TOKENS])


def characters(root: str, file: str, context: int, val_share: float = 0.1) -> Datasets:
    """Return the windows of a text: its beginning for training, its end for validation.

    A training window begins at every character; validation windows don't overlap.

    Args:
        root: Folder of the file.
        file: The text. If it isn't there, Python's own documentation is used.
        context: Characters of a window.
        val_share: Share of the text that is held out for validation.

    Raises:
        DataError: The text is shorter than a window.
    """
    path = Path(root, file).expanduser()
    if path.is_file():
        text = path.read_text()
    else:
        # `topics` has the pages of Python's language reference, by name.
        text = "\n".join(topics[name] for name in sorted(topics))

    tokens = encode(text)
    num_train = int(len(tokens) * (1 - val_share))
    train_tokens = tokens[:num_train]
    val_tokens = tokens[num_train:]
    if min(len(train_tokens), len(val_tokens)) <= context:
        raise DataError(f"{path} has {len(tokens)} characters, too few for windows of {context}.")

    train_begins = torch.arange(len(train_tokens) - context)
    val_begins = torch.arange(0, len(val_tokens) - context, context)
    return Datasets(
        train=TensorSamples(train_begins, transform=Windows(train_tokens, context)),
        val=TensorSamples(val_begins, transform=Windows(val_tokens, context)),
    )


def token_files(
    root: str, context: int, vocab_size: int, stride: int | None = None, document_end: int | None = None
) -> Datasets:
    """Return the windows of `train.bin` and `val.bin`, files of uint16 tokens as nanoGPT's.

    Args:
        root: Folder of the files.
        context: Tokens of a window.
        vocab_size: Number of tokens.
        stride: Tokens from one training window to the next; null: `context`. Validation windows don't overlap.
        document_end: The token that ends a document; null: windows aren't divided into documents.
    """
    folder = Path(root).expanduser()
    train = TokenFile(folder / "train.bin", context, stride=stride, vocab_size=vocab_size, document_end=document_end)
    val = TokenFile(folder / "val.bin", context, vocab_size=vocab_size, document_end=document_end)
    return Datasets(train=train, val=val)


def write_token_files(text_file: str, folder: str, val_share: float = 0.1) -> None:
    """Write the characters of a text as the token files `train.bin` and `val.bin`."""
    tokens = encode(Path(text_file).read_text()).numpy().astype("uint16")
    num_train = int(len(tokens) * (1 - val_share))
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokens[:num_train].tofile(Path(folder, "train.bin"))
    tokens[num_train:].tofile(Path(folder, "val.bin"))
    print(f"{folder}: {num_train:,} tokens in train.bin, {len(tokens) - num_train:,} in val.bin")


# Job


@torch.no_grad()
def sample(model: Any, context: Any, prompt: str = "\n", length: int = 500, temperature: float = 0.8) -> None:
    """Print a text that the model writes: job=recipes.gpt.sample checkpoint.path=RUN args.length=200."""
    # `context` is the rank's, which the framework passes. With several processes, one of them is enough.
    if not context.is_main:
        return
    tokens = encode(prompt).to(context.device)[None, :]  # (1, T)
    for _ in range(length):
        # The model sees at most its last `model.context` characters.
        scores = model(tokens[:, -model.context :])  # (1, T, V)
        probabilities = torch.softmax(scores[0, -1] / temperature, dim=0)  # (V)
        next_token = torch.multinomial(probabilities, num_samples=1)[None, :]  # (1, 1)
        tokens = torch.cat([tokens, next_token], dim=1)
    print("".join(ALPHABET[token] for token in tokens[0].tolist()))


if __name__ == "__main__":
    # python -m recipes.gpt data/tinyshakespeare/input.txt data/tokens
    write_token_files(sys.argv[1], sys.argv[2])
