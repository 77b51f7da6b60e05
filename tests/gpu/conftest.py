"""Each test runs on a GPU, and without one as a stand-in on the CPU, so that no time on a GPU is lost to a typo.

What only a GPU can show is asserted where `gpus` is 1. The stand-ins are `exhaustive`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.cases import on
from tests.helpers.internals import ForkServer, compose
from tests.helpers.requirements import missing


def need_gpus(number: int) -> None:
    """Skip the test where torch sees fewer; fail it where FRAMEWORK_TEST_REQUIRE has `gpu`."""
    import torch

    seen = torch.cuda.device_count()
    if seen < number:
        missing("gpu", f"needs {number} GPU(s), and torch {torch.__version__} sees {seen}")


# Fixtures have grouped the tests before.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the compiled models last: a run that is cut has the results of all other tests by then."""
    items.sort(key=lambda item: item.path == Path(__file__).with_name("test_compiled.py"))


@pytest.fixture(autouse=True)
def _settings_may_change(own_state: None) -> None:
    """The command puts the working directory on sys.path, as `python -m` does."""


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(1, id="gpu", marks=pytest.mark.gpu),
        pytest.param(0, id="cpu", marks=pytest.mark.exhaustive),
    ],
)
def gpus(request: pytest.FixtureRequest) -> int:
    """For `trainer.gpus`."""
    number: int = request.param
    need_gpus(number)
    if number:
        import torch

        # Open the GPU before the leak guards of any test look.
        torch.cuda.mem_get_info(0)
    return number


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(2, id="gpu", marks=pytest.mark.gpu),
        pytest.param(0, id="cpu", marks=pytest.mark.exhaustive),
    ],
)
def two_gpus(request: pytest.FixtureRequest) -> int:
    """For `trainer.gpus` of two processes."""
    number: int = request.param
    need_gpus(number)
    return number


@pytest.fixture
def on_both(train: Callable[..., Path], gpus: int) -> Callable[..., tuple[Path, Path]]:
    """Runs the same on the GPU and on the CPU. A stand-in trains once: its second run would be the same."""

    def run(*overrides: str) -> tuple[Path, Path]:
        there = train(*overrides, on(gpus))
        here = train(*overrides, on(0)) if gpus else there
        return there, here

    return run


@pytest.fixture
def command(fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command in `tmp_path` that makes no run directory; gives its exit status."""

    def run(*overrides: str) -> int:
        monkeypatch.chdir(tmp_path)
        return compose.main(list(overrides), fork_server=fork_server)

    return run
