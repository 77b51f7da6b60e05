"""What is uploaded of a run, in which order, and what is deleted at its URL."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from framework.errors import RequestError
from tests.helpers.internals import Uploader, newest_claim, note_claim, open_regular, upload_module
from tests.unit.remote.faults import Bucket, Killed, Run, nothing

NewRun = Callable[..., Run]


def upload(run: Run, **settings: Any) -> Uploader:
    """Upload all that is there."""
    uploader = Uploader(run.place, **settings)
    finish(uploader)
    return uploader


def finish(uploader: Uploader) -> None:
    while uploader.upload(at_once=True):
        pass
    assert uploader.left().names == ()


# What is uploaded


def test_the_whole_run_is_uploaded(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)
    (run.path / "logs").mkdir()
    (run.path / "logs" / "rank_0.log").write_text("a line\n")
    (run.path / "secrets.yaml").write_text("token")
    (run.path / ".lock").write_text("")
    (run.path / ".saving_step").mkdir()
    (run.path / ".saving_step" / "model.pt").write_text("half")
    upload(run)

    assert bucket.objects == {
        "config.yaml": (run.path / "config.yaml").read_bytes(),
        "run.json": (run.path / "run.json").read_bytes(),
        "logs/rank_0.log": b"a line\n",
        "checkpoints/last": b"step_00000010",
        "checkpoints/step_00000010/model.pt": b"weights10",
        "checkpoints/step_00000010/training.pt": b"optimizer",
        "checkpoints/step_00000010/manifest.json": (
            run.path / "checkpoints" / "step_00000010" / "manifest.json"
        ).read_bytes(),
    }


def test_what_is_unchanged_is_not_uploaded_again(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)
    upload(run)
    written: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation in ("pipe_file", "put_file") and ".claims" not in path:
            written.append(Path(path).name)

    bucket.hook = note
    # The next command, too, knows what is there.
    uploader = Uploader(run.place)
    finish(uploader)
    assert written == []
    (run.path / "run.json").write_text("{}")
    finish(uploader)
    assert written == ["run.json"]


def test_a_file_that_grows_is_uploaded_as_it_once_was(bucket: Bucket, new_run: NewRun, monkeypatch) -> None:
    monkeypatch.setattr(upload_module, "_IN_MEMORY_BYTES", 100)
    run = new_run()
    metrics = run.path / "metrics.jsonl"
    row = b'{"step": 1}\n'
    metrics.write_bytes(row * 50)

    def grow(operation: str, path: str) -> None:
        with metrics.open("ab") as file:
            file.write(row)

    bucket.hook = grow
    uploader = Uploader(run.place)
    uploader.upload(at_once=True)
    uploaded = bucket.objects["metrics.jsonl"]
    assert metrics.read_bytes().startswith(uploaded)
    assert len(uploaded) % len(row) == 0
    bucket.hook = nothing
    finish(uploader)
    assert bucket.objects["metrics.jsonl"] == metrics.read_bytes()


def test_a_file_that_grows_takes_a_tenth_of_the_time(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    now_s = 0.0

    def work(operation: str, path: str) -> None:
        nonlocal now_s
        if path.endswith("rank_0.log"):
            now_s += 3.0

    bucket.hook = work
    uploader = Uploader(run.place, clock=lambda: now_s)
    log = run.path / "rank_0.log"
    sizes = []
    for length in range(1, 60):
        log.write_bytes(b"x" * length)
        uploader.upload()
        now_s += 1.0
        sizes.append(len(bucket.objects["rank_0.log"]))
    assert sorted(set(sizes)) == [1, 31]


# Kills


def test_whatever_is_killed_a_manifest_is_of_a_complete_checkpoint(bucket: Bucket, new_run: NewRun) -> None:
    """Kill the upload before every single change at the URL, and let another command go on."""
    for number in count():
        bucket.clear()
        run = new_run(f"machine{number}")
        run.save(10, score=5.0)
        upload(run)
        # Training was resumed from an earlier step, and reached this one again.
        run.save(10, score=4.0, content=b"other weights")
        run.save(20, score=1.0)
        run.save(30, score=3.0)
        was_killed = _killed(bucket, run, at=number)

        steps = bucket.steps
        last = bucket.objects["checkpoints/last"].decode()
        assert not steps or last == f"step_{max(steps):08d}" or max(steps) == 30
        run.delete(10)
        upload(run)
        assert bucket.steps == [20, 30]
        assert {name.split("/")[1] for name in bucket.objects if name.startswith("checkpoints/step")} == {
            "step_00000020",
            "step_00000030",
        }
        if not was_killed:
            break


def _killed(bucket: Bucket, run: Run, *, at: int) -> bool:
    """Upload until the change with this number; return False if there aren't so many."""
    numbers = count()

    def kill(operation: str, path: str) -> None:
        is_change = operation in ("pipe_file", "put_file", "rm_file", "rm")
        if is_change and next(numbers) == at:
            raise Killed

    bucket.hook = kill
    try:
        upload(run)
    except Killed:
        return True
    finally:
        bucket.hook = nothing
    return False


def test_metrics_reach_to_the_step_of_a_manifest(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    metrics = run.path / "metrics.jsonl"

    def save_meanwhile(operation: str, path: str) -> None:
        # The records were uploaded; then a checkpoint is saved, and its rows are written before.
        if path.endswith("run.json") and not (run.path / "checkpoints").exists():
            metrics.write_text('{"step": 10}\n')
            run.save(10)
        if path.endswith("manifest.json") and operation == "pipe_file":
            assert bucket.objects["metrics.jsonl"] == b'{"step": 10}\n'

    bucket.hook = save_meanwhile
    uploader = Uploader(run.place)
    uploader.upload()
    finish(uploader)
    assert bucket.steps == [10]


def test_run_json_never_says_more_than_the_metrics_have(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    (run.path / "metrics.jsonl").write_text("")
    (run.path / "run.json").write_text("training")

    def test_meanwhile(operation: str, path: str) -> None:
        if path.endswith("metrics.jsonl"):
            bucket.hook = nothing
            (run.path / "metrics.jsonl").write_text("the test\n")
            (run.path / "run.json").write_text("tested")

    bucket.hook = test_meanwhile
    uploader = Uploader(run.place)
    uploader.upload()
    assert bucket.objects["run.json"] == b"training"
    finish(uploader)
    assert bucket.objects["run.json"] == b"tested"
    assert bucket.objects["metrics.jsonl"] == b"the test\n"


def test_run_json_waits_for_metrics_that_have_to_wait(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    now_s = 0.0

    def take_a_second(operation: str, path: str) -> None:
        nonlocal now_s
        if operation == "pipe_file":
            now_s += 1.0

    bucket.hook = take_a_second
    uploader = Uploader(run.place, clock=lambda: now_s)
    finish(uploader)
    before = bucket.objects["run.json"]
    now_s += 100.0
    (run.path / "metrics.jsonl").write_text("a step\n")
    uploader.upload()

    # The metrics were uploaded a moment ago.
    (run.path / "metrics.jsonl").write_text("a step\nthe test\n")
    (run.path / "run.json").write_text("tested")
    uploader.upload()
    assert (bucket.objects["metrics.jsonl"], bucket.objects["run.json"]) == (b"a step\n", before)
    now_s += 100.0
    uploader.upload()
    assert (bucket.objects["metrics.jsonl"], bucket.objects["run.json"]) == (b"a step\nthe test\n", b"tested")


def test_metrics_are_looked_at_after_run_json_was_read(
    bucket: Bucket, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    (run.path / "metrics.jsonl").write_text("")
    uploader = upload(run)
    (run.path / "run.json").write_text("training")

    def test_meanwhile(path: Path) -> BinaryIO:
        if path.name == "run.json":
            (run.path / "metrics.jsonl").write_text("the test\n")
            (run.path / "run.json").write_text("tested")
        return open_regular(path)

    monkeypatch.setattr(upload_module, "open_regular", test_meanwhile)
    uploader.upload()
    assert (bucket.objects["metrics.jsonl"], bucket.objects["run.json"]) == (b"the test\n", b"tested")


def test_a_checkpoint_deleted_while_it_is_uploaded_leaves_nothing(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)

    def delete(operation: str, path: str) -> None:
        if path.endswith("model.pt") and operation == "put_file" and "step_00000010" in path:
            bucket.hook = nothing
            run.save(20)
            run.delete(10)

    bucket.hook = delete
    upload(run)
    assert bucket.steps == [20]
    assert not [name for name in bucket.objects if "step_00000010" in name]


def test_what_a_killed_upload_left_elsewhere_is_deleted(bucket: Bucket, new_run: NewRun) -> None:
    bucket.put({"checkpoints/step_00000005/model.pt": b"half of a checkpoint"})
    run = new_run()
    run.save(10)
    upload(run)
    assert not [name for name in bucket.objects if "step_00000005" in name]


# Retention


def test_the_same_checkpoints_stay_at_the_url_as_here(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    uploader = Uploader(run.place)
    for step, score in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0)):
        run.save(step, score=score)
        finish(uploader)
    # The best, and the last.
    assert bucket.steps == [20, 40]


def test_a_checkpoint_of_the_users_symlink_stays(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)
    (run.path / "checkpoints" / "mine").symlink_to("step_00000010")
    run.save(20)
    uploader = upload(run)
    run.save(30)
    run.delete(20)
    finish(uploader)
    assert bucket.steps == [10, 30]
    assert bucket.objects["checkpoints/mine"] == b"step_00000010"


def test_abandoned_checkpoints_are_deleted(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run(save_last_k=3)
    for step in (10, 20, 30):
        run.save(step)
    upload(run)
    # Resumed from step 10.
    uploader = Uploader(run.place)
    uploader.upload()
    run.delete(20)
    run.delete(30)
    run.save(15)
    finish(uploader)
    assert bucket.steps == [10, 15]
    assert bucket.objects["checkpoints/last"] == b"step_00000015"


def test_a_newer_checkpoint_of_another_machine_is_not_deleted(bucket: Bucket, new_run: NewRun) -> None:
    elsewhere = new_run("elsewhere")
    elsewhere.save(40)
    upload(elsewhere)
    here = new_run("here")
    here.save(15)
    upload(here)
    assert bucket.steps == [15, 40]


def test_a_file_deleted_here_stays_at_the_url(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    picture = run.path / "picture.png"
    report = run.path / "failure.json"
    picture.write_text("a picture")
    report.write_text("{}")
    uploader = upload(run)
    assert "failure.json" in bucket.objects
    picture.unlink()
    # Resuming the run removes the failure report of the start before.
    report.unlink()
    finish(uploader)
    assert "picture.png" in bucket.objects
    assert "failure.json" not in bucket.objects


# Claims


def test_of_two_machines_that_resume_at_once_one_is_refused(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    one = Uploader(first.place)
    other = Uploader(second.place)

    def claim_meanwhile(operation: str, path: str) -> None:
        if operation == "pipe_file":
            bucket.hook = nothing
            other.hold_claim()

    bucket.hook = claim_meanwhile
    with pytest.raises(RequestError, match="was resumed by process") as refused:
        one.hold_claim()
    assert "end that command first" in str(refused.value)
    assert bucket.claims == ["00000001"]


def test_a_machine_that_lost_the_run_writes_nothing_more(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    first.save(10)
    lost = upload(first)
    second.save(20)
    upload(second)
    first.save(30)
    objects = bucket.objects
    with pytest.raises(RequestError, match="it was resumed by process"):
        lost.upload(at_once=True)
    assert bucket.objects == objects


def test_a_run_lost_in_the_middle_of_a_checkpoint_gets_no_manifest(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    upload(first)
    first.save(10)

    def resume_elsewhere(operation: str, path: str) -> None:
        if operation == "put_file" and path.endswith("training.pt"):
            bucket.hook = nothing
            Uploader(second.place).hold_claim()

    bucket.hook = resume_elsewhere
    with pytest.raises(RequestError, match="it was resumed by"):
        upload(first)
    assert bucket.steps == []


def test_a_copy_that_lacks_another_machines_training_is_refused(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    second = new_run("second")
    upload(first)
    upload(second)
    with pytest.raises(RequestError, match="was resumed by process"):
        Uploader(first.place).hold_claim()
    # It is fetched.
    newest = newest_claim(Uploader(first.place).filesystem, "/bucket/toy/run")
    assert newest is not None
    note_claim(first.path, newest.number)
    Uploader(first.place).hold_claim()
    assert bucket.claims == ["00000001", "00000002", "00000003"]


def test_two_commands_in_one_directory_both_upload(bucket: Bucket, new_run: NewRun) -> None:
    """Two workers of a sweep."""
    run = new_run()
    one = upload(run)
    upload(run)
    (run.path / "run.json").write_text("{}")
    finish(one)
    assert bucket.objects["run.json"] == b"{}"


def test_a_copied_directory_is_another_one(bucket: Bucket, new_run: NewRun) -> None:
    first = new_run("first")
    upload(first)
    second = new_run("second")
    (second.path / ".remote.json").write_bytes((first.path / ".remote.json").read_bytes())
    upload(second)
    with pytest.raises(RequestError, match="was resumed by process"):
        Uploader(first.place).hold_claim()


def test_a_claim_whose_answer_is_lost_counts(bucket: Bucket, new_run: NewRun, monkeypatch) -> None:
    run = new_run()
    uploader = Uploader(run.place)
    filesystem = uploader.filesystem
    create = filesystem.pipe_file

    def answer_is_lost(path: str, value: bytes, mode: str = "overwrite") -> None:
        create(path, value, mode=mode)
        # s3fs tries again.
        create(path, value, mode=mode)

    monkeypatch.setattr(filesystem, "pipe_file", answer_is_lost)
    uploader.hold_claim()
    assert bucket.claims == ["00000001"]


def test_a_run_deleted_at_the_url_is_uploaded_again(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)
    uploader = upload(run)
    everything = bucket.objects
    bucket.clear()
    (run.path / "run.json").write_text("{}")
    finish(uploader)
    assert bucket.objects == {**everything, "run.json": b"{}"}
    assert bucket.claims == ["00000001"]


def test_a_damaged_claim_is_named(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    bucket.put({".claims/00000001": json.dumps({"number": 1}).encode()})
    with pytest.raises(RequestError, match=r"00000001 is damaged.*Remove it"):
        Uploader(run.place).hold_claim()


def test_a_node_uploads_only_its_own_files(bucket: Bucket, new_run: NewRun) -> None:
    run = new_run()
    run.save(10)
    (run.path / "logs").mkdir()
    for rank in (0, 1, 2):
        (run.path / "logs" / f"rank_{rank}.log").write_text(str(rank))
    upload(run, only=["logs/rank_2.log"])
    assert bucket.objects == {"logs/rank_2.log": b"2"}
    assert bucket.claims == []
