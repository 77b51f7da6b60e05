"""How a batch of one process makes an optimizer step: what is tried, and what the run is then to use. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from framework.data.batching import BatchPlan, micro_batches
from framework.errors import RunError


@dataclass(frozen=True)
class Dealing:
    """What a run keeps while the batch of a process changes: its processes, and accumulation or the global batch.

    samples: of the data set. accumulate: forward passes of a step, where no global batch is given.
    """

    world_size: int
    accumulate: int
    global_batch_size: int | None
    samples: int

    def most(self, limit: int | None) -> tuple[int, str]:
        """The largest batch of one pass that makes sense, and what limits it: a key, or "data"."""
        if self.global_batch_size is not None:
            most = self._share(self.global_batch_size)
            by = "data.global_batch_size" if self.global_batch_size <= self.samples else "data"
        else:
            most, by = max(1, self.samples // (self.world_size * self.accumulate)), "data"
        return (limit, "tune.max_batch_size") if limit is not None and limit < most else (most, by)

    def passes(self, size: int) -> int:
        """What trainer.accumulate_grad_batches is to be, so that no pass has more than `size` samples.

        Of a global batch that is larger than the data set, a step makes fewer passes: so many that they are as large as
        those of a full one would be.
        """
        if self.global_batch_size is None:
            return self.accumulate
        full, share = -(-self.global_batch_size // self.world_size), self._share(self.global_batch_size)
        # The least whose part, rounded up, is what `share` needs.
        return full * (-(-share // size) - 1) // share + 1

    def pass_size(self, size: int) -> int:
        """The samples of the largest pass, where at most `size` are to be in one: a global batch is dealt evenly."""
        if self.global_batch_size is None:
            return size
        share = self._share(self.global_batch_size)
        return -(-share // -(-share // size))

    def trial(self, size: int) -> BatchPlan:
        """A step to try `size` with. Two passes stand for any number: gradients of the first are there in the second,
        and more aren't in a third."""
        passes = min(self.passes(size), 2)
        return BatchPlan(self.pass_size(size) * self.world_size * passes, passes, self.world_size)

    def plan(self, size: int) -> BatchPlan:
        """The run's steps with `size`. Raises RunError where its global batch can't be dealt in such parts."""
        passes = self.passes(size)
        if self.global_batch_size is None:
            return BatchPlan(size * self.world_size * passes, passes, self.world_size)
        if passes * self.world_size > self.global_batch_size:
            raise RunError(
                f"No more than {size} sample(s) fit, and data.global_batch_size={self.global_batch_size} over "
                f"{self.world_size} processes can't be dealt in such parts.\nUse a multiple of {self.world_size}."
            )
        return BatchPlan(self.global_batch_size, passes, self.world_size)

    def whole_steps(self, plan: BatchPlan) -> int:
        """Steps of an epoch without the last one, where it is short: few samples tell little. One at least."""
        return max(1, self.samples // plan.global_batch_size)

    def made(self, plan: BatchPlan) -> tuple[int, int]:
        """Samples and passes of the largest step that the data give."""
        samples = min(plan.global_batch_size, self.samples)
        return samples, len(micro_batches(plan, global_count=samples, rank=0))

    def overrides(self, size: int) -> dict[str, int]:
        """What is to be typed for `size`: the batch, or where the global one is given, the passes it takes."""
        if self.global_batch_size is None:
            return {"data.batch_size": size}
        return {"trainer.accumulate_grad_batches": self.passes(size)}

    def _share(self, global_batch_size: int) -> int:
        """The most samples of a step that one process gets."""
        return -(-min(global_batch_size, self.samples) // self.world_size)
