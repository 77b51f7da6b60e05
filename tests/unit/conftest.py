from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync, which only takes time here: tests of the writer show that a checkpoint outlives a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
