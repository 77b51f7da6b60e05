"""Call `set_epoch(epoch)` of datasets, transforms, collate functions and samplers."""

from __future__ import annotations

from typing import Any, final

from framework.data.fetch import user_error
from framework.data.keyed_random import KeyedRandom
from framework.data.object_graph import attributes, reachable
from framework.distributed.seed import mix, preserved_generators


@final
class EpochListeners:
    """The objects with `set_epoch` among the roots and what they hold: a Subset's dataset, a Compose's transforms.

    Args:
        split: `train`, `val` or `test`, for messages.
        besides: Objects to leave out, with all that they hold.
        seeds_own: Before `set_epoch`, also seed the generators that the roots hold, not only the global ones.
    """

    def __init__(
        self, *roots: Any, split: str, seed: int, besides: tuple[Any, ...] = (), seeds_own: bool = True
    ) -> None:
        left_out = {id(part) for part in reachable(*besides)}
        listeners = [part for part in reachable(*roots) if id(part) not in left_out and _has_set_epoch(part)]
        # Inner objects first: an outer one whose `set_epoch` passes another number on to them then overrides it.
        self._listeners = listeners[::-1]
        self._random_roots = roots if seeds_own else ()
        self._split = split
        self._seed = seed
        self._epoch: int | None = None

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def set_epoch(self, epoch: int, *, again: bool = False) -> bool:
        """Call `set_epoch(epoch)` of each listener and return True if the epoch is new or `again` is set.

        Random numbers that `set_epoch` draws depend on seed and epoch alone. Raises RunError if one raises.
        """
        if not self._listeners or (epoch == self._epoch and not again):
            return False
        self._epoch = epoch
        random = KeyedRandom(*self._random_roots)
        # The roots' own generators aren't restored: `set_epoch` may seed one, to draw from it later.
        with preserved_generators():
            for number, listener in enumerate(self._listeners):
                random.seed(mix(self._seed, "set_epoch", epoch, number))
                try:
                    listener.set_epoch(epoch)
                except Exception as error:
                    raise user_error(f"set_epoch({epoch}) for the {self._split} dataset", error) from error
        return True


def _has_set_epoch(part: Any) -> bool:
    """Return True if the object or its class defines the method; one forwarded by `__getattr__` doesn't count."""
    if isinstance(part, type):
        return False
    method = attributes(part).get("set_epoch") or getattr(type(part), "set_epoch", None)
    return callable(method)
