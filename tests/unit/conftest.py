from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a checkpoint outlives a power cut is tested where it is written; elsewhere it would only take time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
