"""What the framework costs and gains on one GPU, compared with other training loops.

    python -m benchmarks.on_gpu [--seconds 200] [--data-root FOLDER] [--device cpu]

Steps of the toy and of MNIST's network, plain, compiled and with CUDA graphs; the share of the time in which the GPU is
busy, from NVML; resident data against a DataLoader; what saving costs; the peak of the memory against its forecast;
seconds to 98 % and 99 % of the validation images. Without MNIST's files the network trains on scikit-learn's digits,
and the rows say so.

Steps are timed for 5 s at least, over as many epochs as that takes, without validation: NVML averages over a second.
First it prints the rows that are planned, then each as soon as it is measured, the most important ones first and the
compiled ones, which take longest, last. After one round of everything more rounds follow while the seconds last; then
the row is printed again, and the last one counts. `--device cpu` runs the same with few steps, to try the code: its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contest import (
    Asked,
    Contest,
    Contestant,
    ContestError,
    Row,
    Unit,
    callback,
    compare,
    ours,
    peer,
    run,
    take_turns,
)
from benchmarks.forecast import CASES
from benchmarks.mnist_speed import BATCH, THREADS, unpacked
from benchmarks.record import HEAD

ROUNDS = 3
SECONDS = 200.0
MILESTONES = (0.98, 0.99)
PLANNED = "planned: "
"""What stands before the claim of each row to come."""

_WINDOW_S = 5.0
# Of one contestant; compiling takes a minute.
_TIMEOUT_S = 150.0
_LOOK_EVERY_S = 0.05
# A reading of NVML is the mean of at most a second before it.
_NVML_MEAN_S = 1.0
_ENDLESS_STEPS = 1_000_000_000
_TOY_BATCH = 20
# Its windows have several epochs, after each of which it would save; ours doesn't save either.
_LIGHTNING = "Lightning without checkpoints"
_NO_CHECKPOINTS = ("--set-up", "no-checkpoints")
_US = Unit("µs", 1e6, 0)
_S = Unit("s", 1.0, 1)
_PERCENT = Unit("%", 100.0, 0)
_MIB = Unit("MiB", 1 / (1 << 20), 1)
# Of `benchmarks.forecast.CASES`.
_FORECAST = (
    "GPT, recomputed",
    "GPT, bf16-mixed",
    "GPT",
    "convolutions, bf16-mixed",
    "convolutions, batches of 128",
)
_PROFILED_STEPS = 60

Measure = Callable[[Contestant], Mapping[str, float]]


@dataclass(frozen=True)
class Place:
    """Where it runs. root: MNIST's files, unpacked; None: the digits take their place."""

    device: str
    root: Path | None

    @property
    def gpus(self) -> str:
        return f"trainer.gpus={int(self.device == 'cuda')}"

    def window(self, warm_up: int, steps: int) -> Window:
        """Return what is timed. steps: at least, on a GPU."""
        return Window(warm_up, steps, _WINDOW_S) if self.device == "cuda" else Window(2, 8, 0.0)


@dataclass(frozen=True)
class Window:
    """The steps that are timed, after some others: so many at least, and for so many seconds at least."""

    warm_up: int
    steps: int
    seconds: float

    @property
    def arguments(self) -> tuple[str, ...]:
        """For a peer."""
        return ("--warm-up", str(self.warm_up), "--steps", str(self.steps), "--seconds", str(self.seconds))

    @property
    def overrides(self) -> tuple[str, ...]:
        """For a run of ours, which does nothing but train and log."""
        return (
            "trainer.max_epochs=null",
            f"trainer.max_steps={_ENDLESS_STEPS if self.seconds else self.warm_up + self.steps}",
            "trainer.check_val_every_n_epoch=null",
            "trainer.limit_test_batches=0",
            "checkpoint.monitor=null",
            "checkpoint.every_n_epochs=null",
            *callback("Clock", warm_up=self.warm_up, steps=self.steps, seconds=self.seconds),
        )


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
    """Fill the list with (wall-clock time, share of the time the GPU was busy) while this is entered.

    That GPU is the first one that CUDA would show, which need not be NVML's first.
    """
    samples: list[tuple[float, float]] = []
    ended = threading.Event()

    def look() -> None:
        import pynvml

        from framework.system.hardware import visible_gpus

        gpus = visible_gpus()
        if not gpus:
            return
        # Some GPUs don't report it.
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByUUID(gpus[0].uuid)
            while not ended.wait(_LOOK_EVERY_S):
                usage = pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
                samples.append((time.time(), usage))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def step_time(contestant: Contestant) -> dict[str, float]:
    return {"wall": run(contestant, timeout_s=_TIMEOUT_S).worst("wall_s")}


def speed(contestant: Contestant) -> dict[str, float]:
    with busy() as samples:
        outcome = run(contestant, timeout_s=_TIMEOUT_S)
    (report,) = outcome.reports
    found = {"wall": float(report["wall_s"])}
    first = report["begun"] + _NVML_MEAN_S
    inside = [share for when, share in samples if first <= when <= report["ended"]]
    return found | ({"busy": statistics.mean(inside)} if inside else {})


def toy(place: Place, compiled: str | None = None) -> Part:
    window = place.window(300, 5000)
    length = (*window.arguments, "--device", place.device)
    own = toy_run(place, window)
    if compiled is None:
        every = [
            ours("ours", *own),
            peer("ready-made batches on the device", "raw_loop", "--ready", *length),
            peer("DataLoader", "raw_loop", *length),
            peer(_LIGHTNING, "lightning_fit", *length, *_NO_CHECKPOINTS, needs="lightning"),
            peer("Accelerate", "accelerate_loop", *length, needs="accelerate"),
        ]
    else:
        every = [
            ours("ours", *own, f"trainer.compile={compiled}"),
            peer("ready-made batches on the device", "raw_loop", "--ready", "--compile", compiled, *length),
        ]
    return Part(every, step_time, _ratios("toy step", every, compiled=compiled))


def network(place: Place, compiled: str | None = None) -> Part:
    window = place.window(100, 700)
    length = (*window.arguments, "--batch", str(BATCH), "--threads", str(THREADS))
    common = (*_work(place), "--device", place.device, *length)
    own = network_run(place, window)
    if compiled is None:
        workers = ("--workers", "2")
        every = [
            ours("ours", *own),
            peer("ready-made batches on the device, fused SGD", "raw_loop", *common, "--ready", "--fused"),
            peer("DataLoader, 2 workers", "raw_loop", *common, *workers),
            ours("ours with data.loader=dataloader", *own, "data.loader=dataloader", "data.num_workers=2"),
            ours("ours with trainer.channels_last=false", *own, "trainer.channels_last=false"),
            peer(f"{_LIGHTNING}, 2 workers", "lightning_fit", *common, *workers, *_NO_CHECKPOINTS, needs="lightning"),
            peer("Accelerate, 2 workers", "accelerate_loop", *common, *workers, needs="accelerate"),
        ]
    else:
        mode = ("--compile", compiled)
        every = [
            # The others drop a short last batch, too, for which the model would be compiled once more.
            ours("ours", *own, f"trainer.compile={compiled}", "data.drop_last=true"),
            peer("ready-made batches on the device, fused SGD", "raw_loop", *common, "--ready", "--fused", *mode),
        ]
    ratios = _ratios(f"{_name(place)} step", every, compiled=compiled)

    def rows(contests: Mapping[str, Contest]) -> list[Row]:
        found = ratios(contests)
        if compiled is None and place.device == "cuda":
            for each in every[1:3]:
                claim = f"{_name(place)}: share of time busy ÷ {each.name}"
                if "wall" in contests and "busy" not in contests:
                    found.append(Row("on_gpu", claim, "not reported by NVML", "–"))
                else:
                    found.append(compare("on_gpu", claim, contests.get("busy"), ("ours", each.name), unit=_PERCENT))
        return found

    return Part(every, speed if compiled is None else step_time, rows)


def toy_run(place: Place, window: Window) -> tuple[str, ...]:
    """Overrides of a run that is timed. An epoch has about as many steps as those of the others."""
    # A fifth of the samples is for validation and test.
    samples = (window.warm_up + window.steps) * _TOY_BATCH * 5 // 4
    data = (f"data.batch_size={_TOY_BATCH}", f"data.datasets.num_samples={samples}")
    return ("recipe=toy", *data, place.gpus, "trainer.num_threads=1", *window.overrides)


def network_run(place: Place, window: Window) -> tuple[str, ...]:
    """Overrides of a run that is timed."""
    data = ("recipe=digits",) if place.root is None else ("recipe=mnist", f"data.root={place.root}")
    return (
        *data,
        "optimizer=sgd_half_momentum",
        "scheduler=none",
        f"data.batch_size={BATCH}",
        place.gpus,
        f"trainer.num_threads={THREADS}",
        *window.overrides,
    )


def saving(place: Place) -> Part:
    """A checkpoint every second, far more often than in practice, and none."""
    own = network_run(place, place.window(100, 700))
    every = [ours("ours", *own, f"checkpoint.every_n_minutes={1 / 60:.4f}"), ours("without", *own, "checkpoint=none")]
    claim = f"{_name(place)} step with a checkpoint every second ÷ without"
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
        # 99 % of the test images are reached in two epochs, of the validation images in three.
        length = ("trainer.max_epochs=3", "trainer.val_check_interval=215")
        data = ("recipe=mnist_fast", f"data.root={place.root}", *length)
    few = ("trainer.limit_train_batches=10", "trainer.max_epochs=1", "trainer.val_check_interval=5")
    short = () if place.device == "cuda" else few
    keys = ("checkpoint.enabled=false", "checkpoint.monitor=null", place.gpus, *short)
    every = [ours("ours", *data, *keys, *callback("Milestones", low=MILESTONES[0], high=MILESTONES[1]))]

    def measure(contestant: Contestant) -> dict[str, float]:
        outcome = run(contestant, timeout_s=_TIMEOUT_S)
        (report,) = outcome.reports
        figures = {"is_done": 1.0}
        for name, at in report["command"].items():
            figures[f"command {name}"] = at - outcome.begun
        for name, seconds in report["training"].items():
            figures[f"training {name}"] = seconds
        return figures

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


def memory(place: Place) -> Part:
    """The peak that job=plan forecasts, beside torch.cuda.max_memory_allocated or, on the CPU, the profiler's."""
    short = (
        "trainer.profiler=summary",
        f"trainer.max_steps={_PROFILED_STEPS}",
        "trainer.limit_val_batches=0",
        "trainer.limit_test_batches=0",
        "data.loader=dataloader",
        "data.num_workers=0",
        "checkpoint=none",
        "logger=none",
    )
    names = _FORECAST if place.device == "cuda" else _FORECAST[:1]
    every = [ours(case.name, *case.overrides, place.gpus, *short) for case in CASES if case.name in names]

    def rows(contests: Mapping[str, Contest]) -> list[Row]:
        found = []
        for each in every:
            figures = {}
            absent = {}
            for kind, contest in contests.items():
                if each.name in contest.figures:
                    figures[kind] = contest.figures[each.name]
                elif each.name in contest.absent:
                    absent[kind] = contest.absent[each.name]
            claim = f"{each.name}: peak of the memory, forecast ÷ measured"
            of_both = Contest(figures, absent) if contests else None
            found.append(compare("on_gpu", claim, of_both, ("forecast", "measured"), unit=_MIB))
        return found

    return Part(every, peaks, rows)


def peaks(contestant: Contestant) -> dict[str, float]:
    """Return the peaks in the record of a profiled run, in bytes. Raises ContestError if it has none."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as outputs:
        run(replace(contestant, arguments=(*contestant.arguments, f"path.outputs={outputs}")), reports=False)
        (record,) = Path(outputs).glob("*/*/run.json")
        profile = json.loads(record.read_text())["profile"]
    found = {"forecast": profile["forecast"]["peak_bytes"], "measured": profile["peak_bytes"]}
    if None in found.values():
        raise ContestError(f"{contestant.name}: {found}, {profile['forecast']['notes']}")
    return found


def parts(place: Place) -> list[Part]:
    """Return all parts, the most important ones first, the compiled ones last."""
    return [
        toy(place),
        network(place),
        milestones(place),
        saving(place),
        memory(place),
        toy(place, "default"),
        toy(place, "reduce-overhead"),
        network(place, "default"),
        network(place, "reduce-overhead"),
    ]


def planned(place: Place) -> list[str]:
    """Return the claims of all rows, in their order."""
    claims: list[str] = []
    for part in parts(place):
        claims += [row.claim for row in part.rows({})]
    return claims


def measured(place: Place, *, seconds: float, rounds: int) -> Iterator[Row]:
    """Yield the rows of all parts after a round of all; then again those of parts that have time for another one."""
    ends = time.monotonic() + seconds
    every = parts(place)
    contests: list[dict[str, Contest]] = [{} for _ in every]
    took_s = [0.0] * len(every)
    for number in range(rounds):
        for position, part in enumerate(every):
            began = time.monotonic()
            if number and began + took_s[position] > ends:
                continue
            first = number % len(part.contestants)
            turns = [*part.contestants[first:], *part.contestants[:first]]
            add_round(contests[position], take_turns(turns, 1, part.measure))
            took_s[position] = time.monotonic() - began
            yield from part.rows(contests[position])


def add_round(contests: dict[str, Contest], one: Mapping[str, Contest]) -> None:
    """Add the figures of a round. A contestant that has failed in any round has none."""
    for key, contest in one.items():
        known = contests.setdefault(key, Contest())
        known.absent = {**known.absent, **contest.absent}
        for name, figures in contest.figures.items():
            known.figures.setdefault(name, []).extend(figures)
        known.figures = {name: figures for name, figures in known.figures.items() if name not in known.absent}


def rows(asked: Asked) -> list[Row]:
    if num_gpus() == 0:
        return [Row("on_gpu", "steps on a GPU, time to 98 % and 99 %, share of time busy", "not run: no GPU", "–")]
    with _place("cuda", asked.data_root) as place:
        rows_measured = measured(place, seconds=float("inf"), rounds=asked.rounds_or(ROUNDS))
        return list({row.claim: row for row in rows_measured}.values())


def main() -> int:
    """Exit status 1 where a contestant failed."""
    asked = _arguments()
    print("\n".join(HEAD), flush=True)
    if asked.device == "cuda" and num_gpus() == 0:
        print("\n".join(map(str, rows(Asked(None, asked.data_root)))), flush=True)
        return 0
    has_failed = False
    with _place(asked.device, asked.data_root) as place:
        for claim in planned(place):
            print(f"{PLANNED}{claim}", flush=True)
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
