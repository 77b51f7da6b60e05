"""Save the state of tasks and callbacks: one for all ranks, or one for each rank if the class says so.

An object with `state_is_per_rank = True` may have another state on each rank, such as the hidden state of truncated
backpropagation. With `state_is_rank_zero = True`, as for a clock, all ranks get rank 0's.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint.replicas import gather_replicas
from framework.distributed.context import Context
from framework.distributed.sharded import local_tensor
from framework.errors import CheckpointError, RunError

RANK_STATES = "rank_states"
"""The key in `training`: a list of the states by name, of rank 1, 2, …; rank 0's is where every checkpoint has it."""

Fingerprints = Mapping[str, Mapping[str, str]]
"""The object's name → an entry of its state → a hash of its value."""

_WORDS = 1 << 20  # 64-bit words that are hashed at once: 8 MB
_PRIME = 0x100000001B3
_FACTOR = 0x1CE4E5B9BF58476D


def fingerprints(objects: Mapping[str, Any], states: Mapping[str, Any], *, replicas_differ: bool) -> Fingerprints:
    """Return hashes of the states that must be the same on all ranks, or are saved for each.

    objects: task and callbacks by name. replicas_differ: each rank's state is saved anyway.
    """
    compared = {}
    for name, state in states.items():
        is_per_rank = getattr(objects[name], "state_is_per_rank", False)
        is_rank_zero = getattr(objects[name], "state_is_rank_zero", False)
        if is_per_rank or not (is_rank_zero or replicas_differ):
            entries = state if isinstance(state, Mapping) else {"": state}
            compared[name] = {str(key): _fingerprint(value) for key, value in entries.items()}
    return compared


def states_of_ranks(
    objects: Mapping[str, Any],
    states: Mapping[str, Any],
    of_ranks: Sequence[Fingerprints],
    *,
    step: int,
    context: Context,
) -> list[dict[str, Any]]:
    """Return on rank 0 the states of ranks 1, 2, … that differ from rank 0's. Every rank must call it.

    of_ranks: the fingerprints of all ranks. Raises RunError, on every rank, for a difference in an object that doesn't
    say `state_is_per_rank`.
    """
    names = sorted({name for each in of_ranks for name in each})
    differing = [name for name in names if any(each.get(name) != of_ranks[0].get(name) for each in of_ranks)]
    for name in differing:
        if not getattr(objects.get(name), "state_is_per_rank", False):
            raise _difference(name, [each.get(name, {}) for each in of_ranks], step=step)
    if not differing:
        return []
    return gather_replicas({name: states[name] for name in differing}, context)


def own_state(name: str, state: Any, training: Mapping[str, Any], context: Context) -> Any:
    """Return the state of an object on this rank. state: rank 0's.

    Raises CheckpointError if each rank has its own and the number of ranks has changed.
    """
    others = training.get(RANK_STATES, [])
    if not others or name not in others[0]:
        return state
    ranks = 1 + len(others)
    if ranks != context.world_size:
        remedy = "" if name == "task" else f"\nLeave it out with ~{name}, and it is lost; or resume as before."
        raise CheckpointError(
            f"The checkpoint has the state of {name} of {ranks} processes, each its own (state_is_per_rank), and this "
            f"run has {context.world_size}.\nResume on {ranks} processes, or start a new run from these weights with "
            f"init_from.{remedy}"
        )
    return state if context.is_main else others[context.rank - 1][name]


def _difference(name: str, of_ranks: Sequence[Mapping[str, str]], *, step: int) -> RunError:
    """Return the error for a state that differs. of_ranks: its entries' fingerprints on each rank."""
    keys = sorted({key for each in of_ranks for key in each})
    unequal = [key for key in keys if len({each.get(key) for each in of_ranks}) > 1]
    groups = defaultdict(list)  # hash → the ranks that have it
    for rank, each in enumerate(of_ranks):
        groups[each.get(unequal[0])].append(str(rank))
    in_groups = " | ".join(", ".join(group) for group in groups.values())
    return RunError(
        f"The state of {name} differs between ranks: after step {step} the ranks have different values of "
        f"{', '.join(filter(None, unequal)) or 'it'} (ranks {in_groups}). This checkpoint isn't saved, since a resumed "
        "run would continue with rank 0's.\n"
        "Compute what changes from what all ranks have, for example values reduced over ranks. If each rank needs its "
        "own, set state_is_per_rank = True in the class: then the run resumes on the same number of processes. If rank "
        "0's is enough, set state_is_rank_zero = True."
    )


def _fingerprint(value: Any) -> str:
    """Return a hash of a value's content. Containers are compared by their content, dicts and sets without order."""
    digest = hashlib.blake2b(type(value).__name__.encode(), digest_size=8)
    parts: list[str]
    if isinstance(value, Tensor):
        parts = [str(value.dtype), str(tuple(value.shape)), _hash_of_bits(value)]
    elif isinstance(value, Mapping):
        parts = sorted(_fingerprint(key) + _fingerprint(each) for key, each in value.items())
    elif isinstance(value, (set, frozenset)):
        parts = sorted(map(_fingerprint, value))
    elif isinstance(value, (list, tuple)):
        parts = [_fingerprint(each) for each in value]
    elif isinstance(value, (int, float, complex, str, bytes, bytearray, torch.dtype)):
        parts = [repr(value)]
    else:  # None; a device, of which each rank has its own; or a type that checkpoints refuse
        parts = []
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _hash_of_bits(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes and their order, computed on its device; waits for the device once."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        file = io.BytesIO()
        torch.save(tensor.cpu(), file)
        return hashlib.blake2b(file.getvalue(), digest_size=8).hexdigest()
    plain = local_tensor(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
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
