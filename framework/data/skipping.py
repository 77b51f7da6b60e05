"""Steps whose samples are left out of training (`data.skip_steps`) or trained last in their epoch (`data.defer_steps`).

A step is named by its *number*: the step that it would be if none was skipped. The loader passes over its samples. All
others keep their positions in the epoch's order, hence their random draws, and take the step counts that are left:

    number     1  2  3  4  5  6 | 7  8 …      data.skip_steps=[3], 6 global batches an epoch
    step       1  2  -  3  4  5 | 6  7 …

    number     1  2  4  5  6  3 | 7  8 …      data.defer_steps=[3]
    step       1  2  3  4  5  6 | 7  8 …

So the number of the next step is `Progress.step + Progress.skipped + 1`. Pure arithmetic, the same on every rank.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, final

from framework.config.schema import DataConfig
from framework.data.batching import count_windows
from framework.types import Passed, Span, Window


class EpochSkips(NamedTuple):
    """What the loader passes over in an epoch, from where it is begun or resumed."""

    # The number of the first global batch that would be loaded.
    first: int = 1
    # Numbers of steps.
    dropped: Collection[int] = ()
    deferred: Collection[int] = ()
    # Samples of the epoch that were deferred before.
    late: Sequence[Span] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.deferred or self.late)


NO_SKIPS = EpochSkips()


@final
@dataclass(frozen=True)
class SkippedSteps:
    """The numbers of the steps that a run passes over."""

    dropped: frozenset[int] = frozenset()
    deferred: frozenset[int] = frozenset()

    @staticmethod
    def of(data: DataConfig, *, added: Iterable[int] = ()) -> SkippedSteps:
        """Return those of a configuration. added: others that are left out, too."""
        return SkippedSteps(frozenset(data.skip_steps).union(added), frozenset(data.defer_steps).difference(added))

    def from_number(self, first: int, *, late: Sequence[Span]) -> EpochSkips:
        """Return what is passed over of an epoch whose next global batch has the number `first`."""
        dropped = [number for number in self.dropped if number >= first]
        deferred = [number for number in self.deferred if number >= first]
        return EpochSkips(first, dropped, deferred, tuple(late))


NO_STEPS = SkippedSteps()


def with_skipped_steps(data: Mapping[str, Any], numbers: Iterable[int]) -> dict[str, Any]:
    """Return the section `data` of a configuration with these steps among those that are left out."""
    left_out = set(numbers)
    # Configurations of earlier versions have neither.
    deferred = [number for number in data.get("defer_steps", ()) if number not in left_out]
    return {**data, "skip_steps": sorted(left_out.union(data.get("skip_steps", ()))), "defer_steps": deferred}


class SkippedSamples(NamedTuple):
    """The samples of a step that is passed over."""

    # Of the step.
    number: int
    epoch: int
    # In the order of the epoch.
    positions: Span
    # Of the dataset; None for a stream.
    indices: tuple[int, ...] | None
    # They are trained at the end of the epoch.
    is_deferred: bool


def ignore_skipped(skipped: Sequence[SkippedSamples]) -> None:
    """Do nothing."""


def numbers_of_steps(*, step: int, skipped: int, passed: Collection[int]) -> Iterator[int]:
    """Yield the numbers of the steps `step + 1`, `step + 2`, … of a run: what names them in `data.skip_steps`.

        numbers = numbers_of_steps(step=100, skipped=0, passed={103})
        list(islice(numbers, 4))                                      # [101, 102, 104, 105]

    A branch that skips step 18,423 of a run that has skipped steps itself must name its number. Where samples were
    deferred to the end of an epoch, this doesn't hold from there to that end.

    Args:
        step: of a checkpoint of the run, as `progress` has it.
        skipped: of the same checkpoint.
        passed: the numbers in `data.skip_steps` and `data.defer_steps` of the run.
    """
    return (number for number in count(step + skipped + 1) if number not in passed)


def number_of_step(wanted: int, *, step: int, skipped: int, passed: Collection[int]) -> int:
    """Return the number of step `wanted` of a run, which is after a checkpoint at `step`; see `numbers_of_steps`."""
    numbers = numbers_of_steps(step=step, skipped=skipped, passed=passed)
    return next(islice(numbers, wanted - step - 1, None))


class LateChange(NamedTuple):
    """A change of `data.skip_steps` or `data.defer_steps` that comes too late: the run has passed that step."""

    key: str
    # As a command has them.
    before: str
    now: str
    # The first number that was added or left out too late.
    number: int
    # The last step of the run before it.
    last_step: int


def late_changes(
    before: Mapping[str, Any], now: DataConfig, *, step: int, rolled_back: Collection[int] = ()
) -> list[LateChange]:
    """Return what has changed for steps that a run has passed after `step` steps.

    Args:
        before: the section `data` of the run so far.
        now: the one with which it continues.
        rolled_back: other numbers whose samples the run has left out.
    """
    if step == 0:
        return []
    passed = {*before.get("skip_steps", ()), *rolled_back}
    last = number_of_step(step, step=0, skipped=0, passed=passed)
    changes = []
    for key in ("skip_steps", "defer_steps"):
        numbers_before = before.get(key, ())
        numbers_now = getattr(now, key)
        changed = {*numbers_before} ^ {*numbers_now}
        late = [number for number in changed.difference(rolled_back) if number <= last]
        if late:
            first = min(late)
            passed_before = [number for number in passed if number < first]
            last_step = first - 1 - len(passed_before)
            changes.append(LateChange(key, _typed(numbers_before), _typed(numbers_now), first, last_step))
    return changes


def _typed(numbers: Iterable[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"


class Part(NamedTuple):
    """Global batches that follow each other in the epoch's order, and are trained one after the other."""

    # Of their samples in the order.
    positions: Span
    # What is passed over right before the first of them.
    passed: Passed
    # What is passed over after the last of them, at the epoch's end.
    after: tuple[Span, ...] = ()
    is_last: bool = False

    def marked(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield this part's windows, the first and the epoch's last of which say what is passed over."""
        passed: Passed | None = self.passed
        for window in windows:
            if window.epoch_end:
                passed = (passed or Passed())._replace(after=self.after)
                yield window._replace(epoch_end=self.is_last, passed=passed)
            else:
                yield window._replace(passed=passed)
            # If the global batch is smaller since a resume, deferred samples are several windows.
            passed = Passed(is_late=True) if self.passed.is_late else None


def parts(num_windows: int, begin_of: Callable[[int], int], skips: EpochSkips) -> list[Part]:
    """Return what is left of an epoch of `num_windows` global batches, in the order in which it is trained.

    The last part is empty if all is passed over.

    begin_of: returns the position of the first sample of a global batch, counted from 0; at `num_windows`, the end.
    """
    result: list[Part] = []
    late = list(skips.late)
    passed = Passed()
    first = 0
    for number in sorted({*skips.dropped, *skips.deferred}):
        index = number - skips.first
        if not 0 <= index < num_windows:
            continue
        if first < index:
            result.append(Part(Span(begin_of(first), begin_of(index)), passed))
            passed = Passed()
        span = Span(begin_of(index), begin_of(index + 1))
        if number in skips.deferred:
            late.append(span)
            passed = passed._replace(deferred=(*passed.deferred, span))
        else:
            passed = passed._replace(dropped=(*passed.dropped, span))
        first = index + 1
    if first < num_windows:
        result.append(Part(Span(begin_of(first), begin_of(num_windows)), passed))
        passed = Passed()
    for span in late:
        result.append(Part(span, passed._replace(is_late=True)))
        passed = Passed()

    if not result:
        end = begin_of(num_windows)
        return [Part(Span(end, end), passed, is_last=True)]
    result[-1] = result[-1]._replace(is_last=True, after=passed.dropped)
    return result


def parts_of_positions(positions: slice, global_batch_size: int, skips: EpochSkips) -> list[Part]:
    """Return what is left of the samples at these positions, of which each global batch takes as many; see `parts`."""
    start = positions.start
    end = positions.stop
    num_windows = count_windows(end - start, global_batch_size=global_batch_size)
    return parts(num_windows, lambda index: min(end, start + index * global_batch_size), skips)


def end_without_step(passed: Passed) -> Window:
    """Return what a loader yields in place of an epoch's last window if all that was left is passed over."""
    return Window(iter(()), 0, global_count=0, epoch_end=True, passed=passed)
