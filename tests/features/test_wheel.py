"""What is uploaded to a package index: it installs by itself, and takes no name but `framework`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.command import run_python
from tests.helpers.documents import links

pytestmark = pytest.mark.exhaustive
REPOSITORY = Path(__file__).parents[2]
SHORT = ("launcher=in_process", "trainer.max_steps=2", "trainer.progress=off")


class Installed(NamedTuple):
    """An environment with the wheel, and an empty folder to work in."""

    python: Path
    working_dir: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), "-m", "framework", *arguments]
        return subprocess.run(command, cwd=self.working_dir, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source distribution, and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    built = run_python("-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture
def installed(distributions: Path, tmp_path: Path) -> Installed:
    """The wheel in an environment of its own; what it depends on is taken from that of the tests."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    site_packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    # A .pth file in a folder that a .pth file names isn't read, so the tested repository isn't found by this.
    dependencies = metadata.distribution("torch").locate_file("")
    Path(site_packages, "dependencies.pth").write_text(f"{dependencies}\n")
    [wheel] = distributions.glob("*.whl")
    install = ["-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    working_dir = tmp_path / "work"
    working_dir.mkdir()
    return Installed(python, working_dir)


def test_the_wheel_has_one_top_level_package(distributions: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"framework"}
    data = ("conf/config.yaml", "conf/schema.json", "docs/AGENTS.md", "installed/recipes/digits.py", "py.typed")
    for name in (*data, *(f"command/completion.{shell}" for shell in ("bash", "zsh", "fish"))):
        assert f"framework/{name}" in names


def test_the_source_distribution_has_what_the_repository_has(distributions: Path) -> None:
    [archive] = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.splitlines()) - names == set()


def test_an_index_would_take_both_files(distributions: Path) -> None:
    checked = run_python("-m", "twine", "check", "--strict", *map(str, distributions.iterdir()))
    assert checked.returncode == 0, checked.stdout


def description(*, env: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The text that an index shows, and the project's addresses, of a build with these variables."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=REPOSITORY, env={**outside, **env}, capture_output=True, text=True, check=True)
    metadata = json.loads(done.stdout)
    return metadata["readme"]["text"], metadata.get("urls", {})


def test_links_on_an_index_lead_to_the_repository() -> None:
    built = {"GITHUB_REPOSITORY": "someone/framework", "GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v1.2.3"}
    text, urls = description(env=built)
    readme = (REPOSITORY / "README.md").read_text()
    relative = [link for link in links(readme) if not link.startswith("https://")]
    assert len(relative) > 40
    address = "https://github.com/someone/framework"
    assert len(links(text)) == len(links(readme))
    for link in relative:
        kind = "raw" if link.endswith(".png") else "blob"
        assert f"{address}/{kind}/v1.2.3/{link}" in links(text)
    assert urls["Source"] == address
    assert urls["Documentation"] == f"{address}/tree/v1.2.3/docs"


def test_without_a_known_repository_an_index_shows_no_broken_links() -> None:
    text, urls = description(env={})
    assert [link for link in links(text) if not link.startswith("https://")] == []
    assert len(links(text)) > 5
    assert "[composes]" not in text
    assert urls == {}


def test_an_installed_recipe_trains_and_is_resumed(installed: Installed) -> None:
    trained = installed.run("recipe=digits", *SHORT)
    assert trained.returncode == 0, trained.stderr
    assert "Finished digits after 2 steps" in trained.stdout

    resumed = installed.run("resume=auto", "recipe=digits", "trainer.max_steps=4", *SHORT[:1])
    assert resumed.returncode == 0, resumed.stderr
    assert "Finished digits after 4 steps" in resumed.stdout


def test_own_recipes_stand_beside_the_installed_ones(installed: Installed) -> None:
    recipes = installed.working_dir / "recipes"
    recipes.mkdir()
    (recipes / "mine.py").write_text("from recipes.digits import ConvNet\n\n\nclass Net(ConvNet):\n    pass\n")
    trained = installed.run("recipe=digits", "model._target_=recipes.mine.Net", *SHORT)
    assert trained.returncode == 0, trained.stderr

    (recipes / "toy.py").touch()
    refused = installed.run("recipe=toy", *SHORT)
    assert refused.returncode == 2
    assert f"there is no ToyModel in recipes.toy ({recipes / 'toy.py'}). It hides" in refused.stderr


def test_an_own_package_that_hides_the_installed_recipes_is_named(installed: Installed) -> None:
    recipes = installed.working_dir / "recipes"
    recipes.mkdir()
    (recipes / "__init__.py").touch()
    trained = installed.run("recipe=digits", *SHORT)
    assert trained.returncode == 2
    assert "there is no digits in recipes" in trained.stderr
    assert "delete this __init__.py" in trained.stderr
