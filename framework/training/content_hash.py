"""Hashes of values and weights, by which ranks compare what they have without exchanging it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from framework.distributed.sharded import local_tensor

# 64-bit words that are hashed at once: 8 MB.
_WORDS = 1 << 20
_PRIME = 0x100000001B3
_FACTOR = 0x1CE4E5B9BF58476D


def weight_hashes(model: nn.Module) -> dict[str, int]:
    """Return for each parameter the sum of its bytes read as 64-bit integers; waits for the device once.

    A single changed number always changes the sum. Several changes cancel out with a probability of 2**-64.
    """
    sums = {name: _sum_of_bits(local_tensor(parameter)) for name, parameter in model.named_parameters()}
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    flat = torch.stack([total.to(device) for total in sums.values()])
    return dict(zip(sums, flat.tolist(), strict=True))


def parameter_hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash of each parameter's content, by all its names; waits for the device once for each."""
    hashes: dict[int, str] = {}
    named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in hashes:
            hashes[id(parameter)] = hash_of(parameter.detach())
        named[name] = hashes[id(parameter)]
    return named


def hash_of(value: Any) -> str:
    """Return a hash of a value's content. Containers are compared by their content, dicts and sets without order."""
    digest = hashlib.blake2b(type(value).__name__.encode(), digest_size=8)
    for part in _parts_of(value):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _parts_of(value: Any) -> list[str]:
    """Return texts that are the same for values of the same content."""
    if isinstance(value, Tensor):
        return [str(value.dtype), str(tuple(value.shape)), _hash_of_bits(value)]
    if isinstance(value, Mapping):
        return sorted(hash_of(key) + hash_of(item) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(hash_of(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [hash_of(item) for item in value]
    if isinstance(value, (int, float, complex, str, bytes, bytearray, torch.dtype)):
        return [repr(value)]
    # None; a device, of which each rank has its own; or a type that checkpoints refuse.
    return []


def _sum_of_bits(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    num_word_bytes = raw.numel() // 8 * 8
    words = raw[:num_word_bytes].view(torch.int64)
    remaining_bytes = raw[num_word_bytes:]
    return words.sum() + remaining_bytes.sum(dtype=torch.int64)


def _hash_of_bits(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes and their order, computed on its device; waits for the device once."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        file = io.BytesIO()
        torch.save(tensor.cpu(), file)
        return hashlib.blake2b(file.getvalue(), digest_size=8).hexdigest()
    plain = local_tensor(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        num_words = -(-raw.numel() // 8)
        padded = raw.new_zeros(num_words * 8)
        padded[: raw.numel()] = raw
        raw = padded
    words = raw.view(torch.int64)

    # A factor for each position makes the hash depend on the order. Overflows wrap around.
    factors = 2 * torch.arange(min(words.numel(), _WORDS), device=words.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_WORDS):
        # Mixed before they are summed: sums of plain products are the same for different small numbers
        # (3·1 + 0·3 = 0·1 + 1·3), and the products of two opposite float64 numbers cancel out.
        mixed = _mixed(_mixed(chunk + _PRIME) * factors[: chunk.numel()])
        total = total * _PRIME + mixed.sum()
    return str(total.item())


def _mixed(words: Tensor) -> Tensor:
    """Scramble each word, so that each bit depends on many others; different words stay different."""
    for shift in (32, 29):
        # Shifted with zeros: `>>` fills with the sign.
        shifted = (words >> shift) & ((1 << (64 - shift)) - 1)
        words = (words ^ shifted) * _FACTOR
    return words
