from __future__ import annotations

import os
import select
import signal

import pytest

from framework.launch.signals import STOP_SIGNALS, heeded


def test_signals_are_given_out_in_their_order_and_interrupt_nothing() -> None:
    with heeded() as signals:
        assert select.select([signals], [], [], 0)[0] == []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert select.select([signals], [], [], 5)[0] == [signals]
        assert signals.take() == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]
        assert select.select([signals], [], [], 0)[0] == []
        assert signals.take() == []
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.take() == [signal.SIGHUP]


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with heeded():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("own_state")
def test_an_ignored_signal_stays_so() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with heeded() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.take() == [signal.SIGUSR1]
