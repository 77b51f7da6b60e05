"""A test that can't run here says why, and fails where it has to run."""

from __future__ import annotations

import pytest

from tests.helpers import network, slurm
from tests.helpers.requirements import REQUIRE_VARIABLE, require


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any of the programs."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    for check in (network.why_not, slurm.why_not):
        monkeypatch.setattr(f"{check.__module__}.why_not", check.__wrapped__)  # what it said before isn't remembered


@pytest.mark.parametrize(("name", "package"), [("netns", "iproute2"), ("slurm", "slurm-wlm munge")])
def test_what_is_missing_skips_with_the_reason(name: str, package: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"apt-get install {package}"):
        require(name)


@pytest.mark.parametrize("value", ["slurm", "chromium,netns,slurm"])
def test_what_is_required_fails(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, value)
    with pytest.raises(pytest.fail.Exception, match="no munged and no slurmctld"):
        require("slurm")


def test_another_name_requires_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_VARIABLE, "slurm")
    with pytest.raises(pytest.skip.Exception, match="no ip and no unshare"):
        require("netns")
