"""What a GPU adds: MNIST images a second, time to 99 % of the validation images, share of the time the GPU was busy.

    python -m benchmarks.on_gpu [--rounds 3] [--data-root FOLDER]

Batches of 64. Time to 99 % is from the command's start until a validation at the end of an epoch first reaches it, with
the same 5,000 images held out. Busy is what NVML tells of GPU 0, looked at every 50 ms while steps are timed.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, callback, compare, ours, peer, run, take_turns
from benchmarks.mnist_speed import BATCH, THREADS, contestants, unpacked

ROUNDS = 3
WARM_UP, STEPS = 100, 700  # within an epoch of 859
ACCURACY, MAX_EPOCHS = 0.99, 40
_LOOK_EVERY_S = 0.05
_RAW = "raw, 2 workers"
_IMAGES, _SECONDS, _PERCENT = Unit("images/s", 1.0, 0), Unit("s"), Unit("%", 100.0, 0)


def num_gpus() -> int:
    """What NVML counts; 0 without a driver."""
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
    """Fills the list with (time on the wall, share of the time GPU 0 was busy) while this is entered."""
    import pynvml

    samples: list[tuple[float, float]] = []
    ended = threading.Event()

    def look() -> None:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not ended.wait(_LOOK_EVERY_S):
            samples.append((time.time(), pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100))
        pynvml.nvmlShutdown()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def speed(contestant: Contestant) -> dict[str, float]:
    with busy() as samples:
        outcome = run(contestant)
    (report,) = outcome.reports
    inside = [share for when, share in samples if report["begun"] <= when <= report["ended"]]
    return {"images/s": BATCH / report["wall_s"], "busy": statistics.mean(inside) if inside else float("nan")}


def to_accuracy(root: Path) -> list[Contestant]:
    own = (
        "recipe=mnist",
        f"data.root={root}",
        f"data.batch_size={BATCH}",
        "trainer.gpus=1",
        f"trainer.num_threads={THREADS}",
        f"trainer.max_epochs={MAX_EPOCHS}",
        *callback("Until", accuracy=ACCURACY),
    )
    common = ("--work", "mnist", "--root", str(root), "--device", "cuda", "--batch", str(BATCH))
    threads = ("--threads", str(THREADS), "--workers", "2")
    return [ours("ours", *own), peer(_RAW, "raw_loop", *common, *threads, "--until", str(ACCURACY))]


def rows(asked: Asked) -> list[Row]:
    if num_gpus() == 0:
        return [Row("on_gpu", "MNIST on a GPU: images/s, time to 99 %, share of time busy", "not run: no GPU", "–")]
    rounds = asked.rounds_or(ROUNDS)
    with unpacked(asked.data_root) as root:
        every = contestants(root, warm_up=WARM_UP, steps=STEPS, device="cuda")
        contests = take_turns(every, rounds, speed)
        times = take_turns(
            to_accuracy(root), rounds, lambda each: {"s": (outcome := run(each)).worst("reached") - outcome.begun}
        )
    found = []
    for each in every[1:]:
        target = Target(1.5, at_least=True) if each.name.endswith("workers") and each.name.startswith("raw") else None
        names = ("ours", each.name)
        claim = f"GPU: MNIST images/s ÷ {each.name}"
        found.append(compare("on_gpu", claim, contests.get("images/s"), names, unit=_IMAGES, target=target))
    names = ("ours", _RAW)
    found.append(compare("on_gpu", f"GPU: share of time busy ÷ {_RAW}", contests.get("busy"), names, unit=_PERCENT))
    claim = f"GPU: time to {ACCURACY:.0%} ÷ {_RAW}"
    found.append(compare("on_gpu", claim, times.get("s"), names, unit=_SECONDS))
    return found


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "on_gpu", "--print", *sys.argv[1:]]))
