"""Corrupt a file of a run, resume the run, and see what comes of it: right weights or an error in words.

    python -m benchmarks.corruptions --runs 300 --seed 0

A run that Python started is stopped half-way: it has objects with its data, records, metrics, media, and checkpoints.
Each time, one file of a copy of it is corrupted, and the copy is resumed. The run must end with exactly the weights of
an undamaged one, or be refused in words: without a traceback, and within a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from framework.command import compose
from framework.launch.fork_server import PRELOAD, ForkServer, OwnForkServer

LIMIT_S = 60
PROGRAM = """
import torch, framework
from torch import nn
from torch.utils.data import TensorDataset

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

if __name__ == "__main__":
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(dim=1) > 0).long())
    run = framework.train(model=make, data=(data, data), task="classification", name="corrupted",
        trainer={"max_steps": 8, "gpus": 0, "log_every_n_steps": 1, "val_check_interval": 4},
        checkpoint={"every_n_steps": 4, "save_top_k": -1}, logger=["jsonl", "tensorboard"])
    print(run.directory)
"""


def flip_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def put_newline(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] = draw.choice(b"\n\x0c\x00\xff")
    path.write_bytes(content)


def zero_block(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    begin = draw.randrange(len(content) + 1)
    end = min(begin + 512, len(content))
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


def append_garbage(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.randbytes(100))


def nest(path: Path, draw: random.Random) -> None:
    path.write_bytes(b"[" * draw.choice([500, 100_000]))


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def make_fifo(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_device(path: Path, _: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def make_folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_huge(path: Path, _: random.Random) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)


CORRUPTIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_bit,
    flip_bit,
    flip_bit,
    flip_bit,
    cut,
    put_newline,
    put_newline,
    zero_block,
    append_garbage,
    nest,
    remove,
    make_fifo,
    link_to_device,
    make_folder,
    make_huge,
)


def make_run(folder: Path) -> Path:
    """Return the directory of a run that was stopped half-way."""
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, env=environment, check=True
    )
    return Path(done.stdout.split()[-1])


def corrupt_and_resume(original: Path, copy: Path, draw: random.Random, *, server: ForkServer, right: Any) -> str:
    """Return `FILE CORRUPTION: OUTCOME`; a bad outcome begins with a word in capitals."""
    shutil.copytree(original, copy, symlinks=True)
    files = [file for file in sorted(copy.rglob("*")) if file.is_file() and not _is_linked(file)]
    file = draw.choice(files)
    corrupt = draw.choice(CORRUPTIONS)
    corrupt(file, draw)
    outcome = resume(copy, server=server, right=right)
    name = file.relative_to(copy)
    for path in copy.rglob("*"):
        if path.is_fifo():
            path.unlink()
    shutil.rmtree(copy)
    return f"{name} {corrupt.__name__}: {outcome}"


def _is_linked(file: Path) -> bool:
    """Return True if the file, or a folder above it, is a symlink."""
    return any(path.is_symlink() for path in (file, *file.parents))


def resume(run: Path, *, server: ForkServer, right: Any) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), deadline():
            status = compose.main([f"resume={run}", "trainer.max_steps=16", "trainer.gpus=0"], fork_server=server)
    except TimeoutError:
        return "HANG"
    except Exception as error:
        return f"TRACEBACK {error!r}"
    if "Traceback (most recent call last)" in said.getvalue():
        return f"TRACEBACK {said.getvalue()}"
    if status != 0:
        return f"refused ({status})" if said.getvalue().strip() else "WITHOUT A WORD"
    return "right weights" if same(weights(run), right) else "WRONG WEIGHTS"


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def weights(run: Path) -> Any:
    return torch.load(run / "checkpoints" / "step_00000016" / "model.pt", weights_only=True)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fuzz(folder: Path, *, runs: int, seed: int, server: ForkServer) -> list[str]:
    """Return the outcomes of so many corruptions."""
    original = make_run(folder)
    os.chdir(folder)
    whole = original.with_name("whole")
    shutil.copytree(original, whole, symlinks=True)
    with contextlib.redirect_stdout(io.StringIO()):
        assert compose.main([f"resume={whole}", "trainer.max_steps=16", "trainer.gpus=0"], fork_server=server) == 0
    right = weights(whole)
    draw = random.Random(seed)
    copy = original.with_name("copy")
    return [corrupt_and_resume(original, copy, draw, server=server, right=right) for _ in range(runs)]


def bad_ones(outcomes: list[str]) -> list[str]:
    return [outcome for outcome in outcomes if outcome.partition(": ")[2][:2].isupper()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w")
    # What ranks print goes nowhere.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server = OwnForkServer(PRELOAD)
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = fuzz(Path(folder), runs=arguments.runs, seed=arguments.seed, server=server)
            os.chdir("/")
    finally:
        server.close()
    bad = bad_ones(outcomes)
    good = [outcome for outcome in outcomes if outcome not in bad]
    counts = Counter(outcome.partition(": ")[2] for outcome in good)
    lines = [f"{number:4} {name}" for name, number in sorted(counts.items())]
    print("\n".join([*lines, f"{len(bad):4} bad", *bad]), file=answer, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
