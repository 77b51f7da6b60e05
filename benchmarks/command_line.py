"""What `--help` and `--cfg job` cost against a bare `@hydra.main` program with as many groups and options.

    python benchmarks/command_line.py [--repeats 12]

Interleaved runs, medians and ranges, as ratios: the machine's noise is in all of them alike.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONF = Path(__file__).resolve().parents[1] / "conf"
BARE = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config)

main()
"""


def timed(command: list[str], *, cwd: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(CONF, folder / "conf")
        (folder / "bare.py").write_text(BARE)
        commands = {"bare": [sys.executable, "bare.py"], "framework": [sys.executable, "-m", "framework"]}
        print("| command | bare @hydra.main, s | framework, s | ratio |\n|---|---|---|---|")
        for flags in (["--help"], ["--cfg", "job"]):
            seconds: dict[str, list[float]] = {who: [] for who in commands}
            for _ in range(repeats):
                for who, command in commands.items():
                    seconds[who].append(timed([*command, *flags], cwd=folder))
            medians = {who: statistics.median(values) for who, values in seconds.items()}
            cells = [f"{medians[who]:.2f} ({min(seconds[who]):.2f}–{max(seconds[who]):.2f})" for who in commands]
            ratio = medians["framework"] / medians["bare"]
            print(f"| `{' '.join(flags)}` | {cells[0]} | {cells[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
