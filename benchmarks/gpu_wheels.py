"""Download the wheels that `make gpu` needs on a machine without a network: all of gpu_wheels.txt but torch.

    python -m benchmarks.gpu_wheels [--wheels FOLDER] [--python-version 3.12] [--have FILE]

pip resolves what the packages of the list need in turn. What comes with torch is left out, and so is what the other
machine has already, if `--have` names a file with the output of its `pip list`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# pip brings it along; a bare machine has no other.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).with_name("gpu_wheels.txt")
_ONLY_SOURCE = "antlr4-python3-runtime"
_TORCH = "torch"
# torchvision needs it, so it is there.
_TOO_LARGE = {"numpy"}
# Extras of packages that torch needs.
_CUDA = ("nvidia-", "cuda-")
_LISTED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*?)(?:==| @ |\s+)(?P<version>\d\S*)")


@dataclass(frozen=True)
class Package:
    """One of the packages that pip has chosen."""

    name: str
    version: str
    # The names of other packages, without those of its extras.
    needs: frozenset[str]


def read_requirements() -> dict[str, Requirement]:
    """Return the lines of gpu_wheels.txt by the names of their packages."""
    requirements: dict[str, Requirement] = {}
    for line in REQUIREMENTS.read_text().splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            requirement = Requirement(text)
            requirements[canonicalize_name(requirement.name)] = requirement
    return requirements


def read_pip_list(text: str) -> dict[str, str]:
    """Return name → version from the output of `pip list`, as columns or as `--format=freeze`."""
    found = (_LISTED.match(line) for line in text.splitlines())
    return {canonicalize_name(match["name"]): match["version"] for match in found if match is not None}


def is_satisfied(name: str, version: str | None, requirements: Mapping[str, Requirement]) -> bool:
    """Return True if a package of this version (None: it isn't installed) is recent enough for gpu_wheels.txt."""
    if version is None:
        return False
    requirement = requirements.get(canonicalize_name(name))
    return requirement is None or bool(requirement.specifier.contains(version, prereleases=True))


def chosen(report: Mapping[str, Any]) -> list[Package]:
    """Return the packages of a report of pip's: https://pip.pypa.io/en/stable/reference/installation-report/."""
    packages = []
    for entry in report["install"]:
        metadata = entry["metadata"]
        needs = [Requirement(text) for text in metadata.get("requires_dist", ())]
        names = [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
        package = Package(
            canonicalize_name(metadata["name"]), metadata["version"], frozenset(map(canonicalize_name, names))
        )
        packages.append(package)
    return packages


def to_download(
    packages: Iterable[Package], *, have: Mapping[str, str], requirements: Mapping[str, Requirement]
) -> list[Package]:
    """Return the packages without torch, what torch needs, and what the other machine has."""
    by_name = {package.name: package for package in packages}
    left_out = with_needs(_TORCH, by_name) | _TOO_LARGE
    for name in by_name:
        if name.startswith(_CUDA) and name not in requirements:
            left_out.add(name)
    wanted = []
    for name, package in by_name.items():
        if name not in left_out and not is_satisfied(name, have.get(name), requirements):
            wanted.append(package)
    return wanted


def with_needs(name: str, packages: Mapping[str, Package]) -> set[str]:
    """Return the name and those of all packages that it needs, directly or in turn."""
    found: set[str] = set()
    remaining = {name}
    while remaining:
        current = remaining.pop()
        found.add(current)
        if current in packages:
            remaining |= packages[current].needs - found
    return found & packages.keys()


def resolve(options: Collection[str]) -> list[Package]:
    """Return what pip would install for gpu_wheels.txt. Raises CalledProcessError if nothing fits together."""
    with tempfile.TemporaryDirectory(prefix="gpu_wheels_") as folder:
        report = Path(folder, "report.json")
        target = ("--dry-run", "--ignore-installed", "--target", folder, "--report", str(report))
        _pip("install", *target, *options, "--requirement", str(REQUIREMENTS))
        return chosen(json.loads(report.read_text()))


def main() -> int:
    asked = _arguments()
    requirements = read_requirements()
    have: dict[str, str] = {}
    if asked.have is not None:
        have = read_pip_list(asked.have.read_text())
        if not have:
            print(f"{asked.have} has no packages. Write the output of `python3 -m pip list` to it.", file=sys.stderr)
            return 2
    shutil.rmtree(asked.wheels, ignore_errors=True)
    asked.wheels.mkdir(parents=True)
    _pip("wheel", "--no-deps", "--wheel-dir", str(asked.wheels), str(requirements[_ONLY_SOURCE]))
    # pip matches these tags exactly, so all are listed.
    platforms = [f"manylinux_2_{number}_x86_64" for number in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", asked.python_version]
    options += ["--find-links", str(asked.wheels)]
    for platform in platforms:
        options += ["--platform", platform]
    wanted = to_download(resolve(options), have=have, requirements=requirements)
    names = [f"{package.name}=={package.version}" for package in wanted]
    if names:
        _pip("download", "--no-deps", "--dest", str(asked.wheels), *options, *names)
    if all(package.name != _ONLY_SOURCE for package in wanted):
        for file in asked.wheels.glob("antlr4*.whl"):
            file.unlink()
    files = sorted(asked.wheels.glob("*.whl"))
    size_mb = sum(file.stat().st_size for file in files) / 1e6
    print(f"{len(files)} wheels for Python {asked.python_version}, {size_mb:.0f} MB, in {asked.wheels}")
    return 0


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], check=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="the folder to create or replace")
    parser.add_argument("--python-version", default="3.12", help="of the other machine")
    parser.add_argument("--have", type=Path, default=None, help="a file with the output of that machine's pip list")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
