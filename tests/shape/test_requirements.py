"""A test that can't run here says why, and fails if it must run: skips can't hide what nobody tests."""

from __future__ import annotations

import pytest

from tests.helpers import slurm
from tests.helpers.requirements import REQUIRE_VARIABLE, require


def test_missing_tools_skip_unless_they_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    # The answer is cached.
    monkeypatch.setattr(slurm, "why_not", slurm.why_not.__wrapped__)
    monkeypatch.setenv(REQUIRE_VARIABLE, "chromium,netns")
    with pytest.raises(pytest.skip.Exception, match="apt-get install slurm-wlm munge"):
        require("slurm")
    monkeypatch.setenv(REQUIRE_VARIABLE, "chromium,slurm")
    with pytest.raises(pytest.fail.Exception, match="no munged and no slurmctld"):
        require("slurm")
