"""Every test here trains through the command."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _settings_may_change(own_state: None) -> None:
    """The command puts the working directory on sys.path, as `python -m` does."""
