"""How a rank reads a stream: its shards, in whose turn they are read, and where it is in each. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from framework.data.batching import BatchPlan, micro_batches, share
from framework.errors import CheckpointError
from framework.types import Collate


class Digest(NamedTuple):
    """A summary of a sample, by which ranks, and a resumed run, see if they read the same one."""

    # Of its integers, strings and shapes.
    checksum: float
    # The sum of its floats' absolute values. Different processors may compute floats a little differently.
    float_sum: float


class ShardPosition(NamedTuple):
    """Where in a shard to start: after `samples` of the epoch."""

    shard: int
    samples: int = 0
    # Of the dataset there; None: the samples are skipped.
    state: Any = None
    # Of the next sample; None if it isn't known.
    next_digest: Digest | None = None


@dataclass(frozen=True)
class StreamPlan:
    """How a rank reads a split: shards of its own, or the samples of every rank, of which it keeps its share."""

    # `train`, `val` or `test`, for messages.
    split: str
    batches: BatchPlan
    rank: int = 0
    is_sharded: bool = False
    seed: int = 0
    # Samples of an epoch over all ranks at most.
    limit: int | None = None
    # Processes of this rank that read ahead, each a shard of its own; 0: the training process reads.
    num_workers: int = 0
    collate_fn: Collate | None = None

    @property
    def source(self) -> int:
        """Which samples this rank reads: ranks of the same source read the same ones."""
        if self.is_sharded:
            return self.rank
        return 0

    @property
    def num_sources(self) -> int:
        """How many ranks read samples of their own."""
        if self.is_sharded:
            return self.batches.world_size
        return 1

    @property
    def num_readers(self) -> int:
        """The processes of this rank that read."""
        return max(1, self.num_workers)

    @property
    def num_shards(self) -> int | None:
        """The shards that an epoch is read in, one for each reader of every source; None if the stream is whole."""
        if not self.is_sharded and self.num_readers == 1:
            return None
        return self.num_sources * self.num_readers

    def own_samples(self, samples: int) -> int:
        """Return how many of the first `samples` over all ranks this one reads, if all shards are long enough."""
        if not self.is_sharded:
            return samples
        windows, remainder = divmod(samples, self.batches.global_batch_size)
        per_window = self._shard_size(self.batches.global_batch_size, self.rank)
        return windows * per_window + self._shard_size(remainder, self.rank)

    def micro_batches(self, count: int, *, source: int) -> list[range]:
        """Return the positions of each micro-batch in the `count` samples that `source` has for a window."""
        if not self.is_sharded:
            return micro_batches(self.batches, global_count=count, rank=self.rank)
        # The shard is split as if there were no other: how many there are doesn't depend on what others have.
        shard_size = self._shard_size(self.batches.global_batch_size, source)
        plan = BatchPlan(shard_size, self.batches.micro_batches, world_size=1)
        return micro_batches(plan, global_count=count, rank=0)

    def _shard_size(self, count: int, rank: int) -> int:
        return len(share(count, rank=rank, world_size=self.batches.world_size))


# Whose turn it is

Queue = list[ShardPosition]
"""The shards of one reader, in the order in which it reads a window of each."""


@final
class Turns:
    """The shards of a rank that haven't ended, by reader, and the windows that the rank has taken of them.

    Readers take turns: each in its turn reads a whole window from the first shard of its queue, which then moves to the
    end. So the order of windows is fixed, however long a reader takes. It is also the state to resume from.

    Args:
        num_shards: That the stream is read in; None: the stream as a whole.
        queues: The reader whose turn it is comes first.
    """

    def __init__(self, num_shards: int | None, queues: Sequence[Iterable[ShardPosition]]) -> None:
        self.num_shards = num_shards
        self.queues: list[Queue] = [list(queue) for queue in queues]
        self._next = 0

    @staticmethod
    def distributed(num_shards: int | None, positions: Iterable[ShardPosition], plan: StreamPlan) -> Turns:
        """Return this rank's part of all shards: each belongs to one reader of one source."""
        own = sorted(positions, key=lambda position: position.shard)
        if plan.is_sharded:
            own = own[plan.rank :: plan.batches.world_size]
        queues = [own[reader :: plan.num_readers] for reader in range(plan.num_readers)]
        return Turns(num_shards, queues)

    @staticmethod
    def at_start(plan: StreamPlan) -> Turns:
        """Return the turns at the start of an epoch."""
        shards = range(plan.num_shards or 1)
        return Turns.distributed(plan.num_shards, map(ShardPosition, shards), plan)

    def advance(self, reader: int, shard: int, end: ShardPosition | None) -> None:
        """Note that the rank has taken the reader's next window.

        Args:
            reader: Its number, that of its queue.
            end: Where in the shard the window ends; None: with the shard.
        """
        queue = self.queues[reader]
        # The shards before it were empty.
        while queue.pop(0).shard != shard:
            pass
        if end is not None:
            queue.append(end)
        self._next = (reader + 1) % len(self.queues)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain types."""
        queues = []
        for queue in self.queues[self._next :] + self.queues[: self._next]:
            queues.append([_plain(position) for position in queue])
        return {"num_shards": self.num_shards, "queues": queues}


def _plain(position: ShardPosition) -> dict[str, Any]:
    digest = None
    if position.next_digest is not None:
        digest = list(position.next_digest)
    return {**position._asdict(), "next_digest": digest}


def resumed_turns(states: Sequence[Mapping[str, Any]], plan: StreamPlan) -> Turns:
    """Return this rank's turns after a resume, from the `states` of all ranks.

    On the topology of the checkpoint every reader continues with its shards, in its turn. On another, the shards are
    distributed over the readers that there are. Raises CheckpointError if a state isn't one of a stream.
    """
    try:
        return _resumed(states, plan)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"The state of the {plan.split} stream in the checkpoint can't be read: {type(error).__name__}: {error}.\n"
            "Resume from another checkpoint, or train from scratch."
        ) from error


def _resumed(states: Sequence[Mapping[str, Any]], plan: StreamPlan) -> Turns:
    first = states[0]
    num_shards = first["num_shards"] if "queues" in first else first["shards"]
    was_sharded = first["is_sharded"] if "queues" in first else num_shards is not None
    if not was_sharded:
        # All ranks have read the same, and the first has kept the state.
        states = states[:1]
    saved = [_saved_queues(state) for state in states]
    is_same = len(saved) == plan.num_sources and len(saved[plan.source]) == plan.num_readers
    if is_same and was_sharded == plan.is_sharded:
        return Turns(num_shards, saved[plan.source])

    positions = []
    for queues in saved:
        for queue in queues:
            positions += queue
    return Turns.distributed(num_shards, positions, plan)


def _saved_queues(state: Mapping[str, Any]) -> list[Queue]:
    if "queues" not in state:
        return _earlier_queues(state)
    queues = []
    for queue in state["queues"]:
        queues.append([_position(saved) for saved in queue])
    return queues


def _position(saved: Mapping[str, Any]) -> ShardPosition:
    digest = None
    if saved["next_digest"] is not None:
        digest = Digest(*saved["next_digest"])
    return ShardPosition(saved["shard"], saved["samples"], saved["state"], digest)


def _earlier_queues(state: Mapping[str, Any]) -> list[Queue]:
    """Return the queues of a checkpoint from before a process could have several readers."""
    if state["has_ended"]:
        return [[]]
    return [[ShardPosition(state["shard"], state["samples"], state["state"])]]
