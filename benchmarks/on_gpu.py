"""What the framework costs and gains on one GPU, compared with other training loops.

    python -m benchmarks.on_gpu [--seconds 200] [--data-root FOLDER] [--device cpu]

Steps of the toy and of MNIST's network, plain, compiled and with CUDA graphs; the share of the time in which the GPU is
busy, from NVML; resident data against a DataLoader; what saving costs; seconds to 98 % and 99 % of the validation
images. Without MNIST's files the network trains on scikit-learn's digits, and the rows say so. Every row is printed as
soon as it is measured, the most important ones first; a part is repeated while its share of the seconds lasts.
`--device cpu` runs the same with few steps, to try the code: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contest import Asked, Contest, Contestant, Row, Unit, callback, compare, ours, peer, run, take_turns
from benchmarks.mnist_speed import BATCH, THREADS, unpacked
from benchmarks.record import HEAD

ROUNDS = 3
SECONDS = 200.0
MILESTONES = (0.98, 0.99)
_LOOK_EVERY_S = 0.05
_US, _S, _PERCENT = Unit("µs", 1e6, 0), Unit("s", 1.0, 1), Unit("%", 100.0, 0)

Measure = Callable[[Contestant], Mapping[str, float]]


@dataclass(frozen=True)
class Place:
    """Where it runs. root: MNIST's files, unpacked; None: the digits take their place."""

    device: str
    root: Path | None

    @property
    def gpus(self) -> str:
        return f"trainer.gpus={int(self.device == 'cuda')}"

    def length(self, warm_up: int, steps: int) -> tuple[int, int]:
        return (warm_up, steps) if self.device == "cuda" else (2, 8)


@dataclass(frozen=True)
class Part:
    """Contestants that take turns, ours first, and how their figures become rows."""

    contestants: list[Contestant]
    measure: Measure
    rows: Callable[[Mapping[str, Contest]], list[Row]]


def num_gpus() -> int:
    """Return how many GPUs NVML counts; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def busy() -> Iterator[list[tuple[float, float]]]:
    """Fill the list with (wall-clock time, share of the time GPU 0 was busy) while this is entered."""
    samples: list[tuple[float, float]] = []
    ended = threading.Event()

    def look() -> None:
        import pynvml

        with suppress(pynvml.NVMLError):  # no driver, or a GPU that doesn't report it
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not ended.wait(_LOOK_EVERY_S):
                samples.append((time.time(), pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def step_time(contestant: Contestant) -> dict[str, float]:
    return {"wall": run(contestant).worst("wall_s")}


def speed(contestant: Contestant) -> dict[str, float]:
    with busy() as samples:
        outcome = run(contestant)
    (report,) = outcome.reports
    found = {"wall": float(report["wall_s"])}
    inside = [share for when, share in samples if report["begun"] <= when <= report["ended"]]
    return found | ({"busy": statistics.mean(inside)} if inside else {})


def toy(place: Place, compiled: str | None = None) -> Part:
    warm_up, steps = place.length(300, 3000)
    from benchmarks.steps import toy_run

    length = ("--warm-up", str(warm_up), "--steps", str(steps), "--device", place.device)
    own = (*toy_run(warm_up, steps), place.gpus)
    if compiled is None:
        every = [
            ours("ours", *own),
            peer("ready-made batches on the device", "raw_loop", "--ready", *length),
            peer("DataLoader", "raw_loop", *length),
            peer("Lightning as it comes", "lightning_fit", *length, needs="lightning"),
            peer("Accelerate", "accelerate_loop", *length, needs="accelerate"),
        ]
    else:
        every = [
            ours("ours", *own, f"trainer.compile={compiled}"),
            peer("ready-made batches on the device", "raw_loop", "--ready", "--compile", compiled, *length),
        ]
    return Part(every, step_time, _ratios("toy step", every, compiled=compiled))


def network(place: Place, compiled: str | None = None) -> Part:
    warm_up, steps = place.length(100, 700)  # within an epoch of MNIST's 859
    length = ("--warm-up", str(warm_up), "--steps", str(steps), "--batch", str(BATCH), "--threads", str(THREADS))
    common = (*_work(place), "--device", place.device, *length)
    own = network_run(place, warm_up, steps)
    if compiled is None:
        every = [
            ours("ours", *own),
            peer("ready-made batches on the device, fused SGD", "raw_loop", *common, "--ready", "--fused"),
            peer("DataLoader, 2 workers", "raw_loop", *common, "--workers", "2"),
            ours("ours with data.loader=dataloader", *own, "data.loader=dataloader", "data.num_workers=2"),
            peer("Lightning as it comes, 2 workers", "lightning_fit", *common, "--workers", "2", needs="lightning"),
            peer("Accelerate, 2 workers", "accelerate_loop", *common, "--workers", "2", needs="accelerate"),
        ]
    else:
        mode = ("--compile", compiled)
        every = [
            ours("ours", *own, f"trainer.compile={compiled}"),
            peer("ready-made batches on the device, fused SGD", "raw_loop", *common, "--ready", "--fused", *mode),
        ]
    ratios = _ratios(f"{_name(place)} step", every, compiled=compiled)

    def rows(contests: Mapping[str, Contest]) -> list[Row]:
        found = ratios(contests)
        if compiled is None and "busy" in contests:
            for each in every[1:3]:
                claim = f"{_name(place)}: share of time busy ÷ {each.name}"
                found.append(compare("on_gpu", claim, contests["busy"], ("ours", each.name), unit=_PERCENT))
        return found

    return Part(every, speed if compiled is None else step_time, rows)


def network_run(place: Place, warm_up: int, steps: int) -> tuple[str, ...]:
    """Overrides of a run that is timed, without validation and checkpoints."""
    data = ("recipe=digits",) if place.root is None else ("recipe=mnist", f"data.root={place.root}")
    return (
        *data,
        "optimizer=sgd_half_momentum",
        "scheduler=none",
        f"data.batch_size={BATCH}",
        place.gpus,
        f"trainer.num_threads={THREADS}",
        f"trainer.max_steps={warm_up + steps}",
        "trainer.max_epochs=null",
        "trainer.check_val_every_n_epoch=null",
        "trainer.limit_test_batches=0",
        "checkpoint.monitor=null",
        "checkpoint.every_n_epochs=null",
        *callback("Clock", warm_up=warm_up, steps=steps),
    )


def saving(place: Place) -> Part:
    """A checkpoint every 50 steps, far more often than in practice, and none."""
    own = network_run(place, *place.length(100, 700))
    every = [ours("ours", *own, "checkpoint.every_n_steps=50"), ours("without", *own, "checkpoint=none")]
    claim = f"{_name(place)} step with a checkpoint every 50 steps ÷ without"
    return Part(
        every,
        step_time,
        lambda contests: [compare("on_gpu", claim, contests.get("wall"), ("ours", "without"), unit=_US)],
    )


def milestones(place: Place) -> Part:
    """Seconds to each accuracy, which is validated a few times an epoch."""
    if place.root is None:
        data: tuple[str, ...] = ("recipe=digits", "trainer.max_epochs=30", "trainer.val_check_interval=10")
    else:
        data = ("recipe=mnist_fast", f"data.root={place.root}", "trainer.val_check_interval=215")
    few = ("trainer.limit_train_batches=10", "trainer.max_epochs=1", "trainer.val_check_interval=5")
    short = () if place.device == "cuda" else few
    keys = ("checkpoint.enabled=false", "checkpoint.monitor=null", place.gpus, *short)
    every = [ours("ours", *data, *keys, *callback("Milestones", low=MILESTONES[0], high=MILESTONES[1]))]

    def measure(contestant: Contestant) -> dict[str, float]:
        outcome = run(contestant)
        (report,) = outcome.reports
        return {"is_done": 1.0} | {
            f"{kind} {name}": at - (outcome.begun if kind == "command" else 0.0)
            for kind in ("command", "training")
            for name, at in report[kind].items()
        }

    def rows(contests: Mapping[str, Contest]) -> list[Row]:
        found = []
        nothing = "not reached" if "is_done" in contests else "failed"
        for kind in ("command", "training"):
            for accuracy in MILESTONES:
                contest = contests.get(f"{kind} {accuracy:.0%}")
                figures = [] if contest is None else contest.figures.get("ours", [])
                since = "from the command" if kind == "command" else "of training alone"
                claim = f"{_name(place)}: seconds {since} to {accuracy:.0%} of the validation images"
                found.append(Row("on_gpu", claim, _S.show(figures) if figures else nothing, "–"))
        return found

    return Part(every, measure, rows)


def parts(place: Place) -> list[Part]:
    """Return all parts, the most important ones first."""
    modes = ("default", "reduce-overhead")
    plain = [toy(place), network(place), milestones(place), saving(place)]
    return [*plain, *(toy(place, mode) for mode in modes), *(network(place, mode) for mode in modes)]


def measured(place: Place, *, seconds: float, rounds: int) -> Iterator[Row]:
    """Yield the rows of all parts; each part gets its share of the seconds left, and at least one round."""
    ends = time.monotonic() + seconds
    every = parts(place)
    for number, part in enumerate(every):
        share = (ends - time.monotonic()) / (len(every) - number)
        contests = take_turns(part.contestants, rounds, part.measure, until=time.monotonic() + share)
        yield from part.rows(contests)


def rows(asked: Asked) -> list[Row]:
    if num_gpus() == 0:
        return [Row("on_gpu", "steps on a GPU, time to 98 % and 99 %, share of time busy", "not run: no GPU", "–")]
    with _place("cuda", asked.data_root) as place:
        return list(measured(place, seconds=float("inf"), rounds=asked.rounds_or(ROUNDS)))


def main() -> int:
    """Exit status 1 where a contestant failed."""
    asked = _arguments()
    print("\n".join(HEAD), flush=True)
    if asked.device == "cuda" and num_gpus() == 0:
        print("\n".join(map(str, rows(Asked(None, asked.data_root)))), flush=True)
        return 0
    has_failed = False
    with _place(asked.device, asked.data_root) as place:
        for row in measured(place, seconds=asked.seconds, rounds=ROUNDS if asked.device == "cuda" else 1):
            print(row, flush=True)
            has_failed |= "failed" in (row.ours, row.theirs)
    return int(has_failed)


@contextmanager
def _place(device: str, data_root: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        try:
            root: Path | None = stack.enter_context(unpacked(data_root))
        except SystemExit as error:
            print(f"{error}\nThe digits take MNIST's place.", file=sys.stderr, flush=True)
            root = None
        yield Place(device, root)


def _name(place: Place) -> str:
    return "digits (no MNIST here)" if place.root is None else "MNIST"


def _work(place: Place) -> tuple[str, ...]:
    return ("--work", "digits") if place.root is None else ("--work", "mnist", "--root", str(place.root))


def _ratios(
    claim: str, every: list[Contestant], *, compiled: str | None
) -> Callable[[Mapping[str, Contest]], list[Row]]:
    shown = claim if compiled is None else f"{claim}, compiled ({compiled})"

    def rows(contests: Mapping[str, Contest]) -> list[Row]:
        wall = contests.get("wall")
        return [compare("on_gpu", f"{shown} ÷ {each.name}", wall, ("ours", each.name), unit=_US) for each in every[1:]]

    return rows


def _arguments() -> Any:
    import os

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = os.environ.get("FRAMEWORK_TEST_DATA", "data")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--data-root", type=lambda text: Path(text).resolve(), default=Path(known).resolve())
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
