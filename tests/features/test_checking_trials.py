"""A sweep of many trials says that they are being checked, and is interrupted before the first one starts."""

from __future__ import annotations

import signal
from pathlib import Path

from framework.errors import EXIT_INTERRUPTED
from tests.helpers.command import started_framework

MANY = ("-m", "recipe=toy", "trainer.gpus=0", "seed=range(0,3000)")


def test_ctrl_c_ends_the_check_of_many_trials(tmp_path: Path) -> None:
    with started_framework(*MANY, cwd=tmp_path) as started:
        started.wait_for_output("Checking 3,000 trials\n", timeout=60.0)
        started.process.send_signal(signal.SIGINT)
        assert started.wait(timeout=30.0) == EXIT_INTERRUPTED
        started.assert_all_gone()
        assert (started.stdout(), started.stderr()) == ("", "Checking 3,000 trials\n")
    assert list(tmp_path.iterdir()) == []
