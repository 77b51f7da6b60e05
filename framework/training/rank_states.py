"""Compare what ranks should have in common before it is saved: weights, and the states of tasks and callbacks.

An object with `state_is_per_rank = True` may have another state on each rank: then the state of each rank is saved.
With `state_is_rank_zero = True`, as for a clock, all ranks get rank 0's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from framework.checkpoint.replicas import gather_replicas
from framework.distributed.context import Context
from framework.errors import CheckpointError, RunError
from framework.training.content_hash import hash_of

# The key in `training`: a list of the states by name, of rank 1, 2, …; rank 0's is where every checkpoint has it.
RANK_STATES = "rank_states"

# The object's name → an entry of its state → a hash of its value.
Fingerprints = Mapping[str, Mapping[str, str]]


class WeightHashes(NamedTuple):
    """The weights of a rank, by which they are compared with those of other ranks."""

    # Which part of the model the rank has; None: it is compared with no other rank.
    part: int | None
    # By the parameters' names.
    hashes: Mapping[str, int]


def check_weights_are_equal(of_ranks: Sequence[WeightHashes], *, step: int) -> None:
    """Raise RunError if ranks with the same part of the model have different weights."""
    parts: defaultdict[int, dict[int, Mapping[str, int]]] = defaultdict(dict)
    for rank, weights in enumerate(of_ranks):
        if weights.part is not None:
            parts[weights.part][rank] = weights.hashes

    for by_rank in parts.values():
        names = next(iter(by_rank.values())).keys()
        unequal = _unequal(names, list(by_rank.values()))
        if not unequal:
            continue
        groups = _groups(unequal[0], by_rank)
        more = ""
        if len(unequal) > 1:
            more = f" and of {len(unequal) - 1} of the other {len(names) - 1} parameters"
        raise RunError(
            f"Replicas have drifted apart: after step {step} the ranks have different values of {unequal[0]} "
            f"(ranks {groups}){more}. This checkpoint isn't saved.\n"
            "Something changes weights on some ranks only: a callback, hook or forward that writes to them (as "
            "nn.Embedding(max_norm=...) does), an optimizer that draws random numbers, processors of different "
            "kinds, or defective hardware. Fix the cause, then resume from an earlier checkpoint."
        )


def fingerprints(objects: Mapping[str, Any], states: Mapping[str, Any], *, replicas_differ: bool) -> Fingerprints:
    """Return hashes of the states that must be the same on all ranks, or are saved for each.

    objects: task and callbacks by name. replicas_differ: each rank's state is saved anyway.
    """
    compared = {}
    for name, state in states.items():
        is_per_rank = getattr(objects[name], "state_is_per_rank", False)
        is_rank_zero = getattr(objects[name], "state_is_rank_zero", False)
        if is_per_rank or not (is_rank_zero or replicas_differ):
            entries: Mapping[Any, Any] = {"": state}
            if isinstance(state, Mapping):
                entries = state
            compared[name] = {str(key): hash_of(value) for key, value in entries.items()}
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
    names: set[str] = set()
    for prints in of_ranks:
        names |= prints.keys()
    differing = []
    for name in sorted(names):
        of_object = [prints.get(name, {}) for prints in of_ranks]
        if all(prints == of_object[0] for prints in of_object):
            continue
        if not getattr(objects.get(name), "state_is_per_rank", False):
            raise _difference(name, of_object, step=step)
        differing.append(name)
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
        remedy = ""
        if name != "task":
            remedy = f"\nLeave it out with ~{name}, and it is lost; or resume as before."
        raise CheckpointError(
            f"The checkpoint has the state of {name} of {ranks} processes, each its own (state_is_per_rank), and this "
            f"run has {context.world_size}.\nResume on {ranks} processes, or start a new run from these weights with "
            f"init_from.{remedy}"
        )
    if context.is_main:
        return state
    return others[context.rank - 1][name]


def _difference(name: str, of_ranks: Sequence[Mapping[str, str]], *, step: int) -> RunError:
    """Return the error for a state that differs. of_ranks: its entries' hashes on each rank."""
    keys: set[str] = set()
    for hashes in of_ranks:
        keys |= hashes.keys()
    unequal = _unequal(sorted(keys), of_ranks)
    groups = _groups(unequal[0], dict(enumerate(of_ranks)))
    # A state that isn't a dict is one entry without a name.
    named = ", ".join(key for key in unequal if key) or "it"
    return RunError(
        f"The state of {name} differs between ranks: after step {step} the ranks have different values of "
        f"{named} (ranks {groups}). This checkpoint isn't saved, since a resumed run would continue with rank 0's.\n"
        "Compute what changes from what all ranks have, for example values reduced over ranks. If each rank needs its "
        "own, set state_is_per_rank = True in the class: then the run resumes on the same number of processes. If rank "
        "0's is enough, set state_is_rank_zero = True."
    )


def _unequal(names: Iterable[str], of_ranks: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of which ranks have different values. A rank may have none."""
    unequal = []
    for name in names:
        values = {hashes.get(name) for hashes in of_ranks}
        if len(values) > 1:
            unequal.append(name)
    return unequal


def _groups(name: str, by_rank: Mapping[int, Mapping[str, object]]) -> str:
    """Return the ranks by their value of `name`, such as `0, 2 | 1`."""
    ranks_by_value: defaultdict[object, list[str]] = defaultdict(list)
    for rank, hashes in by_rank.items():
        ranks_by_value[hashes.get(name)].append(str(rank))
    return " | ".join(", ".join(ranks) for ranks in ranks_by_value.values())
