"""MNIST images a second with the small convolutional network, two threads: ours against torchvision and a DataLoader.

    python -m benchmarks.mnist_speed [--rounds 5] [--data-root FOLDER]

Batches of 64, the recipe's SGD with momentum. Ours is the command `recipe=mnist` with all defaults on; the others read
torchvision's MNIST with ToTensor and Normalize. One has what ours has by default: batches in memory and a fused
optimizer. All of it is within the first epoch. On a GPU: benchmarks/on_gpu.py.
"""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.contest import Asked, Contestant, Row, Target, Unit, callback, compare, ours, peer, run, take_turns

ROUNDS = 5
BATCH = 64
THREADS = 2
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IMAGES = Unit("images/s", 1.0, 0)


@contextmanager
def unpacked(root: Path) -> Iterator[Path]:
    """A folder as torchvision wants it, with the files of `root` unpacked. Raises SystemExit where they are missing."""
    with tempfile.TemporaryDirectory(prefix="benchmark_mnist_") as name:
        raw = Path(name, "MNIST", "raw")
        raw.mkdir(parents=True)
        for file in _FILES:
            sources = [*(root / "MNIST" / "raw").glob(f"{file}*"), *root.glob(f"{file}*")]
            if not sources:
                sys.exit(f"MNIST's {file} isn't in {root}: give --data-root, or set FRAMEWORK_TEST_DATA.")
            opener = gzip.open if sources[0].suffix == ".gz" else open
            with opener(sources[0], "rb") as packed, (raw / file).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        yield Path(name)


def contestants(root: Path, *, warm_up: int, steps: int, device: str = "cpu") -> list[Contestant]:
    """Ours first."""
    length = ("--warm-up", str(warm_up), "--steps", str(steps), "--batch", str(BATCH), "--threads", str(THREADS))
    common = ("--work", "mnist", "--root", str(root), "--device", device, *length)
    overrides = (
        "recipe=mnist",
        f"data.root={root}",
        f"data.batch_size={BATCH}",
        f"trainer.gpus={0 if device == 'cpu' else 1}",
        f"trainer.num_threads={THREADS}",
        f"trainer.max_steps={warm_up + steps}",
        "trainer.limit_test_batches=1",
        *callback("Clock", warm_up=warm_up, steps=steps),
    )
    return [
        ours("ours", *overrides),
        peer("raw, 0 workers", "raw_loop", *common),
        peer("raw, 2 workers", "raw_loop", *common, "--workers", "2"),
        peer("raw, ready-made batches", "raw_loop", *common, "--ready"),
        peer("raw, ready-made batches, fused SGD", "raw_loop", *common, "--ready", "--fused"),
        peer("Lightning as it comes, 0 workers", "lightning_fit", *common, needs="lightning"),
        peer("Accelerate, 0 workers", "accelerate_loop", *common, needs="accelerate"),
    ]


TARGETS = {"raw, 0 workers": Target(1.5, at_least=True), "raw, 2 workers": Target(1.5, at_least=True)}


def images_per_second(contestant: Contestant) -> dict[str, float]:
    return {"images/s": BATCH / run(contestant).worst("wall_s")}


def rows(asked: Asked) -> list[Row]:
    with unpacked(asked.data_root) as root:
        everyone = contestants(root, warm_up=20, steps=100)
        contest = take_turns(everyone, asked.rounds_or(ROUNDS), images_per_second).get("images/s")
    table = []
    for other in everyone[1:]:
        claim = f"MNIST images/s ÷ {other.name}"
        target = TARGETS.get(other.name)
        table.append(compare("mnist_speed", claim, contest, ("ours", other.name), unit=_IMAGES, target=target))
    return table


if __name__ == "__main__":
    from benchmarks.__main__ import main

    sys.exit(main(["--only", "mnist_speed", "--print", *sys.argv[1:]]))
