"""What a test needs of the machine: without it the test is skipped and says why, or fails where it must be here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

import pytest

REQUIRE_VARIABLE = "FRAMEWORK_TEST_REQUIRE"
"""Names, separated by commas, what must be on this machine: chromium, fish, gpu, netns, slurm, zsh."""


def missing(name: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where FRAMEWORK_TEST_REQUIRE has the name."""
    if name in os.environ.get(REQUIRE_VARIABLE, "").split(","):
        pytest.fail(f"{reason}; {REQUIRE_VARIABLE} says that it must be here")
    pytest.skip(reason)


def require(name: str) -> None:
    """Skip or fail the test where this machine has no `netns` or no `slurm`."""
    from tests.helpers import network, slurm

    checks: dict[str, Callable[[], str | None]] = {"netns": network.why_not, "slurm": slurm.why_not}
    reason = checks[name]()
    if reason is not None:
        missing(name, reason)
