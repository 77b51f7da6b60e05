"""What the first step of a compiled GPT takes: the first time, and once its code is kept in the user's cache.

    python -m benchmarks.compile_once [--layers 3]

Each line is a command with `trainer.compile=default` and a log at every step; its first step's time is what that log
says. All use one cache, which is empty at first.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers import results
from tests.helpers.command import run_framework

_TIMEOUT_S = 600.0
_COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
exec g++ "$@"
"""
_STEPS = 3
_COMMON = (
    "trainer.gpus=0",
    "trainer.compile=default",
    "scheduler=none",
    "logger=jsonl",
    "checkpoint.monitor=null",
    f"checkpoint.every_n_steps={_STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3, help="blocks of the GPT")
    model = f"model.layers={parser.parse_args(argv).layers}"
    print("| run | first step, s | second step, s | files compiled |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="compile_once_") as name:
        folder = Path(name)
        new = ("recipe=gpt_char", model, f"trainer.max_steps={_STEPS}", *_COMMON)
        first = _measure("the first one", *new, folder=folder)
        _measure("the same command again", *new, folder=folder)
        _measure("resumed", f"resume={first}", f"trainer.max_steps={2 * _STEPS}", folder=folder)
        _measure("two processes, each with the same micro-batch", *new, *_two_processes(), folder=folder)
        _measure("the same again", *new, *_two_processes(), folder=folder)
    return 0


def _two_processes() -> tuple[str, str]:
    return "topology.procs_per_node=2", "data.global_batch_size=24"


def _measure(title: str, *overrides: str, folder: Path) -> Path:
    """Run the command; print the line of its table; return its run directory."""
    log = folder / "calls"
    log.write_text("")
    compiler = folder / "compiler"
    compiler.write_text(_COMPILER.format(log=log))
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CXX": str(compiler),
    }
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    ended = run_framework(*overrides, cwd=folder, env=environment, timeout=_TIMEOUT_S)
    if ended.returncode != 0:
        raise RuntimeError(f"the command ended with {ended.returncode}\n{ended.stderr}")
    run_dir = max(folder.glob("outputs/*/*"), key=lambda path: (path / "metrics.jsonl").stat().st_mtime)
    speeds = list(results.curve(run_dir, "train/steps_per_s").values())[-_STEPS:]
    files = [call for call in log.read_text().splitlines() if re.search(r" -o ", call) and " -E " not in call]
    print(f"| {title} | {1 / speeds[0]:.1f} | {1 / speeds[1]:.2f} | {len(files)} |", flush=True)
    return run_dir


if __name__ == "__main__":
    sys.exit(main())
