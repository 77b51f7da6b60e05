"""What saving costs the training: the stall, and the loop time lost to it in all, beside plain `torch.save`.

    python -m benchmarks.saving [--rounds 9] [--steps 10] [--folder FOLDER]

One process on the CPU trains 209 MB of weights with Adam, so that a checkpoint has 629 MB. In every round each way of
saving trains the same number of steps, the ways in a random order, each right after a part in which nothing is saved;
what it takes longer than that part is the loop time lost: the stall, and the steps that are slower while something else
is at the cores, the memory and the disk. The parts are long enough for a save to come to its end. Medians over rounds.

    torch.save       what one writes by hand: the state dicts to one file, without fsync
    ... no CRC       the same, told not to sum up what it writes
    synchronous      checkpoint.asynchronous=false: the framework's format, fsynced, with a manifest
    asynchronous     the default: copied to buffers that are kept, written by a thread
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.utils.serialization
from torch import nn

from benchmarks.contest import Asked, Contest, Row, Target, Unit, compare
from framework.checkpoint import LocalStorage
from framework.checkpoint.manager import CheckpointManager
from framework.config.schema import CheckpointConfig
from framework.config.topology import Topology
from framework.distributed.context import Context
from framework.training.meter import Meter, check_finite

ROUNDS = 9
STEPS = 10

_CONTEXT = Context(Topology(1, 1, 0, 1), 0, 0, 0, (torch.device("cpu"),), "gloo")
_WIDTH = 2560
_LAYERS = 8
_BATCH = 64


@final
class Training:
    """A model with Adam, and its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.inputs = torch.randn(_BATCH, _WIDTH)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        training = {"optimizer": self.optimizer.state_dict()}
        return {"model": self.model.state_dict(), "training": training, "generators": []}


class Way:
    """One way of saving. `save` returns when training may go on."""

    def __init__(self, name: str, save: Callable[[], None]) -> None:
        self.name = name
        self.save = save
        self.stalls_s: list[float] = []
        self.lost_s: list[float] = []


def ways(training: Training, folder: Path) -> list[Way]:
    def by_hand(crc32: bool) -> Callable[[], None]:
        def save() -> None:
            torch.utils.serialization.config.save.compute_crc32 = crc32
            torch.save(training.state(), folder / "by_hand.pt")
            torch.utils.serialization.config.save.compute_crc32 = True

        return save

    def managed(asynchronous: bool) -> Callable[[], None]:
        storage = LocalStorage(folder / str(asynchronous))
        manager = CheckpointManager(
            _settings(asynchronous),
            storage,
            config_text="",
            is_writer=True,
            warn=sys.exit,
        )
        count = iter(range(1, 1000))
        parameters = list(training.model.parameters())

        def save() -> None:
            step = next(count)
            check_finite(parameters, Meter(), step=step, epoch=0, context=_CONTEXT)
            manager.save(training.state(), step=step, epoch=0, metrics=None)

        return save

    return [
        Way("torch.save", by_hand(True)),
        Way("... no CRC", by_hand(False)),
        Way("synchronous", managed(False)),
        Way("asynchronous", managed(True)),
    ]


def _settings(asynchronous: bool) -> CheckpointConfig:
    return CheckpointConfig(
        path=None,
        enabled=True,
        monitor=None,
        mode="min",
        save_top_k=0,
        save_last_k=1,
        every_n_steps=None,
        every_n_epochs=None,
        every_n_minutes=None,
        asynchronous=asynchronous,
    )


def measure(training: Training, way: Way, *, steps: int) -> None:
    began = time.perf_counter()
    training.steps(steps)
    without_s = time.perf_counter() - began
    began = time.perf_counter()
    way.save()
    stall_s = time.perf_counter() - began
    training.steps(steps)
    way.lost_s.append(time.perf_counter() - began - without_s)
    way.stalls_s.append(stall_s)


def table(measured: Sequence[Way]) -> str:
    """Markdown: medians in seconds, and as parts of what torch.save loses."""
    whole_s = statistics.median(measured[0].lost_s)
    lines = ["| saving | stall (s) | loop time lost (s) | of torch.save's |", "|---|---|---|---|"]
    for way in measured:
        stall_s = statistics.median(way.stalls_s)
        lost_s = statistics.median(way.lost_s)
        parts = f"stall {stall_s / whole_s:.0%}, lost {lost_s / whole_s:.0%}"
        lines.append(f"| {way.name} | {stall_s:.3f} | {lost_s:.2f} | {parts} |")
    return "\n".join(lines)


def measured(rounds: int, *, steps: int, folder: Path | None = None) -> list[Way]:
    """Every way, with its figures of so many rounds. folder: where to save; None: the system's for such."""
    choose = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="saving_", dir=folder) as name:
        training = Training()
        every = ways(training, Path(name))
        training.steps(2)
        for way in every:
            # The first time, buffers and files are made.
            measure(training, way, steps=steps)
            way.stalls_s.clear()
            way.lost_s.clear()
        for _ in range(rounds):
            for way in choose.sample(every, len(every)):
                measure(training, way, steps=steps)
    return every


def rows(asked: Asked) -> list[Row]:
    """Lines for `python -m benchmarks`: what is lost to a save, against what plain `torch.save` loses."""
    by_name = {way.name: way for way in measured(asked.rounds_or(ROUNDS), steps=STEPS)}
    lost = Contest({name: way.lost_s for name, way in by_name.items()})
    stalls = Contest(
        {"asynchronous": by_name["asynchronous"].stalls_s, "torch.save": by_name["torch.save"].lost_s},
    )
    unit = Unit("s", decimals=3)
    return [
        compare(
            "saving",
            "a save's stall ÷ loop time lost to torch.save",
            stalls,
            ("asynchronous", "torch.save"),
            unit=unit,
            target=Target(0.20),
        ),
        compare(
            "saving",
            "loop time lost to a save ÷ torch.save's",
            lost,
            ("asynchronous", "torch.save"),
            unit=unit,
            target=Target(0.40),
        ),
        compare("saving", "… checkpoint.asynchronous=false", lost, ("synchronous", "torch.save"), unit=unit),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each part")
    parser.add_argument("--folder", type=Path, default=None, help="where to save; default: the system's for such")
    asked = parser.parse_args(argv)
    print(table(measured(asked.rounds, steps=asked.steps, folder=asked.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
