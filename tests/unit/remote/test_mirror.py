"""The mirror beside training: what it reports when the URL can't be written, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from framework.errors import RequestError
from tests.helpers.internals import Pace, Uploader, mirrored
from tests.unit.remote.faults import Bucket, Run, nothing

NewRun = Callable[..., Run]
DEADLINE_S = 30.0
FAST = Pace(look_s=0.01, retry_s=0.01, max_retry_s=0.01, give_up_s=DEADLINE_S, quiet_s=DEADLINE_S)
IMPATIENT = Pace(look_s=0.01, retry_s=0.01, max_retry_s=0.01, claim_s=0.1, give_up_s=0.1, quiet_s=DEADLINE_S)

REFUSALS = {
    "cut connection": ConnectionResetError(104, "Connection reset by peer"),
    "expired credentials": PermissionError("The provided token has expired."),
    "full bucket": OSError(5, "QuotaExceeded: the bucket is full"),
    "slow server": TimeoutError("Read timeout on endpoint URL"),
    "an error that fsspec doesn't translate": ValueError("EndpointConnectionError"),
    "wrong clock": PermissionError("The difference between the request time and the server's time is too large."),
    "missing bucket": FileNotFoundError("The specified bucket does not exist"),
}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it doesn't happen"
        time.sleep(0.005)


def blocking(released: threading.Event) -> Callable[[str, str], None]:
    def block(operation: str, path: str) -> None:
        released.wait(DEADLINE_S)

    return block


def refusing(error: Exception) -> Callable[[str, str], None]:
    def refuse(operation: str, path: str) -> None:
        raise error

    return refuse


@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS.keys())
def test_trouble_is_reported_once_and_uploading_goes_on(bucket: Bucket, new_run: NewRun, error: Exception) -> None:
    run = new_run()
    said: list[str] = []
    with mirrored(run.place, say=said.append, pace=FAST):
        wait_for(lambda: "run.json" in bucket.objects)
        bucket.hook = refusing(error)
        run.save(10)
        wait_for(lambda: said)
        # It is tried again and again.
        attempts = threading.Semaphore(0)

        def refuse_and_count(operation: str, path: str) -> None:
            attempts.release()
            raise error

        bucket.hook = refuse_and_count
        for _ in range(4):
            assert attempts.acquire(timeout=DEADLINE_S)
        assert bucket.steps == []
        bucket.hook = nothing
        wait_for(lambda: bucket.steps == [10])
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    assert said == [
        f"memory://bucket/toy/run can't be written: {reason}. It is tried again.",
        "memory://bucket/toy/run is writable again.",
    ]


def test_credentials_are_read_again_after_a_failure(bucket: Bucket, new_run: NewRun, monkeypatch) -> None:
    connections: list[Uploader] = []
    connect = Uploader.connect

    def connect_and_note(self: Uploader) -> None:
        connections.append(self)
        connect(self)

    monkeypatch.setattr(Uploader, "connect", connect_and_note)
    run = new_run()
    said: list[str] = []
    with mirrored(run.place, say=said.append, pace=FAST):
        wait_for(lambda: "run.json" in bucket.objects)
        assert len(connections) == 1
        bucket.hook = refusing(PermissionError("expired"))
        run.save(10)
        wait_for(lambda: len(connections) > 1)
        bucket.hook = nothing
    assert bucket.steps == [10]


def test_a_server_that_is_down_for_the_whole_run(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    bucket.hook = refusing(ConnectionRefusedError(111, "Connection refused"))
    said: list[str] = []
    with mirrored(run.place, say=said.append, pace=IMPATIENT):
        run.save(10)
    assert len(said) == 2
    assert "Not everything is at memory://bucket/toy/run: Connection refused" in said[1]
    assert "checkpoints/step_00000010" in said[1]
    assert f"python -m framework job=upload runs={run.path}" in said[1]

    # The next command uploads it.
    bucket.hook = nothing
    with mirrored(run.place, say=said.append, pace=FAST):
        pass
    assert len(said) == 2
    assert bucket.steps == [10]


def test_a_call_that_hangs_holds_up_nothing(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    released = threading.Event()
    bucket.hook = blocking(released)
    said: list[str] = []
    with mirrored(run.place, say=said.append, pace=IMPATIENT):
        run.save(10)
    assert len(said) == 1
    assert "Not everything" in said[0]
    assert bucket.objects == {}
    released.set()


def test_ctrl_c_ends_the_wait_at_the_end(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    bucket.hook = refusing(ConnectionRefusedError(111, "Connection refused"))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "Ctrl-C ends this" in text:
            raise KeyboardInterrupt

    pace = Pace(look_s=0.01, retry_s=0.01, max_retry_s=0.01, claim_s=0.1, give_up_s=DEADLINE_S, quiet_s=0.0)
    with mirrored(run.place, say=say, pace=pace):
        pass
    assert "Not everything" in said[-1]


def test_an_interrupted_run_is_not_waited_for(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    released = threading.Event()
    said: list[str] = []

    def train() -> None:
        wait_for(lambda: "run.json" in bucket.objects)
        bucket.hook = blocking(released)
        run.save(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), mirrored(run.place, say=said.append, pace=FAST):
        train()
    assert "checkpoints/step_00000010" in said[-1]
    released.set()


def test_a_failed_run_is_uploaded(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()

    def train() -> None:
        (run.path / "failure.json").write_text("{}")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), mirrored(run.place, say=pytest.fail, pace=FAST):
        train()
    assert "failure.json" in bucket.objects


def test_a_refused_run_leaves_nothing_at_its_url(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()

    def refuse() -> None:
        wait_for(lambda: "run.json" in bucket.objects)
        raise RequestError("wrong")

    with pytest.raises(RequestError, match="wrong"), mirrored(run.place, say=pytest.fail, pace=FAST):
        refuse()
    assert bucket.objects == {}
    assert bucket.claims == []


def test_a_refused_run_does_not_wait_for_a_server_that_is_down(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    bucket.hook = refusing(ConnectionRefusedError(111, "Connection refused"))
    said: list[str] = []
    with pytest.raises(RequestError, match="wrong"), mirrored(run.place, say=said.append, pace=FAST):
        raise RequestError("wrong")
    assert len(said) == 1


def test_a_refused_resume_leaves_the_run_at_its_url(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    with mirrored(run.place, say=pytest.fail, pace=FAST):
        run.save(10)
    with pytest.raises(RequestError, match="wrong"), mirrored(run.place, say=pytest.fail, pace=FAST):
        raise RequestError("wrong")
    assert bucket.steps == [10]


def test_a_run_that_another_machine_has_is_refused_before_it_starts(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    for run in (first, second):
        with mirrored(run.place, say=pytest.fail, pace=FAST):
            pass
    with pytest.raises(RequestError, match="was resumed by process"), mirrored(first.place, say=pytest.fail):
        pytest.fail("it starts")


def test_a_missing_bucket_is_refused_before_the_run_starts(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    bucket.hook = refusing(FileNotFoundError("The specified bucket does not exist"))
    with pytest.raises(RequestError, match="Create the bucket"), mirrored(run.place, say=pytest.fail, pace=FAST):
        pytest.fail("it starts")


def test_a_run_lost_to_another_machine_is_trained_on(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    said: list[str] = []
    with mirrored(first.place, say=said.append, pace=FAST):
        wait_for(lambda: "run.json" in bucket.objects)
        Uploader(second.place).hold_claim()
        first.save(10)
        wait_for(lambda: said)
    assert len(said) == 1
    assert "Nothing more is uploaded to memory://bucket/toy/run: it was resumed by process" in said[0]
    assert bucket.steps == []
