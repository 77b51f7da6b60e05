"""Runs in a bucket: `path.outputs=s3://BUCKET/FOLDER`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import yaml

from tests.features.test_bad_input import Answer, Command, command  # noqa: F401
from tests.helpers import results
from tests.helpers.internals import RemotePlace
from tests.helpers.s3 import S3

Train = Callable[..., Path]
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_steps=4", "trainer.limit_test_batches=0")
SAVED = ("checkpoint.every_n_steps=2", "checkpoint.save_last_k=2")


# Which folder stands for a URL


def test_a_run_with_a_url_trains_below_the_cache(command: Command, tmp_path) -> None:  # noqa: F811
    answer = command(*SHORT, "path.outputs=memory://team/ours/", f"path.cache={tmp_path / 'cache'}")
    assert answer.status == 0
    (run,) = (tmp_path / "cache" / "memory" / "team" / "ours" / "toy").iterdir()
    assert (run / "checkpoints" / "last").exists()
    # Another machine has another cache, and the same URL.
    assert yaml.safe_load((run / "config.yaml").read_text())["path"]["outputs"] == "memory://team/ours/"


def test_a_folder_of_the_cache_stands_for_its_url(tmp_path) -> None:
    place = RemotePlace.of_url("sftp://me@host:22/a/b", cache=str(tmp_path))
    place.make_local()
    assert RemotePlace.of_local(place.local) == place
    assert RemotePlace.of_local(place.local / "digits") == place.below("digits")
    assert RemotePlace.of_local(tmp_path) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket", "fsspec knows no protocol s4"),
        ("adl://bucket", "needs a package that isn't installed"),
        ("file:///data/runs", "is a folder of this machine. Type its path: /data/runs"),
        ("sftp://me:secret@host/runs", "a URL must not hold a password"),
        ("simplecache::s3://bucket", "a chain of file systems can't be used"),
        ("s3://", "A URL is PROTOCOL://NAME/FOLDER"),
        ("s3://bucket//runs", "without empty parts"),
        ("s3://bucket/../runs", "without empty parts"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(command: Command, url: str, said: str) -> None:  # noqa: F811
    answer = command(*SHORT, f"path.outputs='{url}'")
    assert answer.status == 2
    assert said in answer.err
    assert "secret" not in answer.err
    assert not Path("outputs").exists()


# Runs in a bucket


@final
@dataclass(frozen=True)
class Uploaded:
    """A run of four steps, with checkpoints of steps 2 and 4, that another machine has put into a bucket."""

    s3: S3
    bucket: str
    name: str
    command: Command
    folder: Path

    @property
    def outputs(self) -> str:
        return f"s3://{self.bucket}/team"

    @property
    def url(self) -> str:
        return f"{self.outputs}/toy/{self.name}"

    @property
    def path(self) -> str:
        """Of the run, in the bucket."""
        return self.url.removeprefix("s3://")

    def run(self, *overrides: str, cache: str = "cache") -> Answer:
        """Run a command on this machine, with a cache of its own."""
        return self.command(*overrides, f"path.outputs={self.outputs}", f"path.cache={self.folder / cache}")

    def local(self, *, cache: str = "cache") -> Path:
        """The folder that stands for the run."""
        return self.folder / cache / "s3" / self.path


@pytest.fixture
def uploaded(s3: S3, shared_run: Train, command: Command, tmp_path: Path) -> Uploaded:  # noqa: F811
    run = shared_run(*SHORT, *SAVED)
    bucket = s3.new_bucket()
    s3.upload(run, f"{bucket}/team/toy/{run.name}")
    return Uploaded(s3, bucket, name=run.name, command=command, folder=tmp_path)


def test_a_run_is_resumed_from_its_url_on_another_machine(uploaded: Uploaded, shared_run: Train) -> None:
    answer = uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=8")
    assert answer.status == 0, answer.err
    assert "step_00000004" in answer.err
    whole = shared_run(*SHORT, *SAVED, "trainer.max_steps=8")
    results.assert_same(results.weights(uploaded.local()), results.weights(whole))
    # Its command can be typed anywhere.
    assert f"resume={uploaded.url} path.outputs={uploaded.outputs}" in answer.out


def test_resume_auto_finds_the_run_in_the_bucket(uploaded: Uploaded) -> None:
    record = json.loads(uploaded.s3.filesystem().cat_file(f"{uploaded.path}/run.json"))
    content = json.dumps({**record, "status": "running"}).encode()
    uploaded.s3.filesystem().pipe_file(f"{uploaded.path}/run.json", content)
    answer = uploaded.run(*SHORT, *SAVED, "resume=auto", "trainer.max_steps=6")
    assert answer.status == 0, answer.err
    assert results.saved_steps(uploaded.local()) == [4, 6]
    # Another user's is left out.
    record["process"]["user"] = "somebody"
    content = json.dumps({**record, "status": "running"}).encode()
    uploaded.s3.filesystem().pipe_file(f"{uploaded.path}/run.json", content)
    answer = uploaded.run(*SHORT, "resume=auto", cache="other")
    assert "somebody has started it" in answer.err
    assert "a new one begins" in answer.err


def test_a_newer_step_of_either_side_is_taken(uploaded: Uploaded) -> None:
    assert uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=6").status == 0
    # Here step 6 is the newest.
    assert uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=8").status == 0
    assert results.saved_steps(uploaded.local()) == [6, 8]
    uploaded.s3.upload(uploaded.local(), uploaded.path)
    shutil.rmtree(uploaded.local() / "checkpoints")
    answer = uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=10")
    assert answer.status == 0
    assert "step_00000008" in answer.err
    assert results.saved_steps(uploaded.local()) == [8, 10]


def test_lists_comparisons_and_reports_read_the_bucket(uploaded: Uploaded) -> None:
    listed = uploaded.run("job=runs")
    assert uploaded.url in listed.out
    assert "1 run in" in listed.out
    # By its URL, and by its name.
    assert uploaded.url in uploaded.command("job=runs", f"runs={uploaded.url}", "path.cache=other").out
    assert uploaded.run(*SHORT).status == 0
    (own,) = set((uploaded.local().parent).glob("2*")) - {uploaded.local()}
    compared = uploaded.run("job=compare", f"runs=[{uploaded.name},{uploaded.outputs}/toy/{own.name}]")
    assert compared.status == 0, compared.err
    reported = uploaded.run("job=report", f"runs={uploaded.url}")
    assert reported.status == 0
    assert uploaded.name in (uploaded.folder / "report.html").read_text()
    # Records only.
    assert not (uploaded.local() / "checkpoints").exists()


def test_what_is_unchanged_is_not_fetched_again(uploaded: Uploaded) -> None:
    uploaded.run("job=runs")
    files = uploaded.s3.filesystem()
    metrics = files.cat_file(f"{uploaded.path}/metrics.jsonl")
    files.pipe_file(f"{uploaded.path}/metrics.jsonl", metrics + metrics.splitlines()[-1] + b"\n")
    uploaded.run("job=runs")
    assert (uploaded.local() / "metrics.jsonl").read_bytes() == files.cat_file(f"{uploaded.path}/metrics.jsonl")
    with uploaded.s3.fault(status=403, requests=r"GET .*/(run.json|config.yaml|metrics.jsonl)$"):
        assert uploaded.run("job=runs").status == 0


@pytest.mark.parametrize(
    "place",
    [
        "",
        "/best",
        pytest.param("/checkpoints/step_00000002", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_is_evaluated_from_its_url(uploaded: Uploaded, place: str) -> None:
    uploaded.s3.filesystem().pipe_file(f"{uploaded.path}/checkpoints/best", b"step_00000002")
    answer = uploaded.run("job=eval", f"checkpoint.path={uploaded.url}{place}", "trainer.limit_test_batches=null")
    assert answer.status == 0, answer.err
    step = "step_00000002" if place else "step_00000004"
    assert [path.name for path in (uploaded.local() / "checkpoints").glob("step_*")] == [step]


@pytest.mark.exhaustive
def test_a_run_is_exported_and_rerun_from_its_url(uploaded: Uploaded) -> None:
    answer = uploaded.run("job=export", f"checkpoint.path={uploaded.url}", "export.output=model.pt")
    assert answer.status == 0, answer.err
    assert (uploaded.folder / "model.pt").is_file()
    answer = uploaded.run(f"rerun={uploaded.url}", "trainer.max_steps=2")
    assert answer.status == 0, answer.err


def test_a_run_starts_from_the_weights_at_a_url(uploaded: Uploaded, train: Train) -> None:
    answer = uploaded.run(*SHORT, f"init_from={uploaded.url}", "optimizer.lr=0.0")
    assert answer.status == 0, answer.err
    (run,) = set(uploaded.local().parent.glob("2*")) - {uploaded.local()}
    results.assert_same(results.weights(run), results.weights(uploaded.local()))
    # Which checkpoint that was then is kept.
    pinned = yaml.safe_load((run / "config.yaml").read_text())["init_from"]
    assert pinned == f"{uploaded.url}/checkpoints/step_00000004"


# What goes wrong


def damaged_last(uploaded: Uploaded) -> None:
    uploaded.s3.flip_bit(f"{uploaded.path}/checkpoints/step_00000004/model.pt")


def damaged_manifest(uploaded: Uploaded) -> None:
    uploaded.s3.flip_bit(f"{uploaded.path}/checkpoints/step_00000004/manifest.json")


def missing_file(uploaded: Uploaded) -> None:
    uploaded.s3.filesystem().rm(f"{uploaded.path}/checkpoints/step_00000004/training.pt")


@pytest.mark.parametrize(
    "damage",
    [
        damaged_last,
        pytest.param(damaged_manifest, marks=pytest.mark.exhaustive),
        pytest.param(missing_file, marks=pytest.mark.exhaustive),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(uploaded: Uploaded, damage: Callable[[Uploaded], None]) -> None:
    damage(uploaded)
    answer = uploaded.run("job=eval", f"checkpoint.path={uploaded.url}")
    assert answer.status == 2
    assert "step_00000004" in answer.err
    answer = uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=6")
    assert answer.status == 0, answer.err
    assert "An earlier one is" in answer.err
    assert (
        results.curve(uploaded.local(), "train/loss").keys() >= {4, 6} or results.saved_steps(uploaded.local())[-1] == 6
    )


def test_only_damaged_checkpoints_are_refused(uploaded: Uploaded) -> None:
    for step in (2, 4):
        uploaded.s3.flip_bit(f"{uploaded.path}/checkpoints/step_0000000{step}/model.pt")
    before = uploaded.s3.filesystem().find(uploaded.path)
    answer = uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=6")
    assert answer.status == 2
    assert "from `last` back, are damaged" in answer.err
    assert not list(uploaded.local().glob("checkpoints/step_*"))
    assert uploaded.s3.filesystem().find(uploaded.path) == before


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param({"refuse": True}, "Check the network", marks=pytest.mark.exhaustive),
        pytest.param({"status": 403}, "Check the credentials", marks=pytest.mark.exhaustive),
        ({"cut_after": 100, "requests": "GET .*/model.pt"}, "can't be read"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing_that_looks_complete(uploaded: Uploaded, fault: dict, said: str) -> None:
    with uploaded.s3.fault(**fault):
        answer = uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=6")
    assert answer.status == 2
    assert said in answer.err
    assert not list(uploaded.local().glob("checkpoints/step_*"))
    # Then it works.
    assert uploaded.run(f"resume={uploaded.url}", "trainer.max_steps=6").status == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("job=runs path.outputs=s3://no-such-bucket/team", "The specified bucket does not exist"),
        ("job=runs path.outputs=s3://{bucket}/empty", "No runs in s3://{bucket}/empty"),
        ("resume=s3://{bucket}/team/toy/nothing", "there is no run"),
        ("resume=s3://{bucket}/others", "there is no run"),
        ("checkpoint.path=s3://{bucket}/others job=eval", "there is no run"),
        ("recipe=toy init_from=s3://{bucket}/nothing", "There is nothing at s3://{bucket}/nothing"),
        ("recipe=toy init_from=s3://{bucket}/others", "There is no complete checkpoint"),
    ],
)
def test_a_url_without_a_run_is_named(uploaded: Uploaded, overrides: str, said: str) -> None:
    files = uploaded.s3.filesystem()
    files.pipe_file(f"{uploaded.bucket}/others/cats/1.jpg", b"somebody else's")
    files.pipe_file(f"{uploaded.bucket}/others/config.yaml", b"lr: 1")
    typed = overrides.format(bucket=uploaded.bucket).split()
    answer = uploaded.command(*typed, f"path.cache={uploaded.folder / 'cache'}")
    assert said.format(bucket=uploaded.bucket) in answer.out + answer.err
    assert files.cat_file(f"{uploaded.bucket}/others/cats/1.jpg") == b"somebody else's"


def test_names_in_a_bucket_lead_nowhere_else(uploaded: Uploaded) -> None:
    uploaded.s3.filesystem().pipe_file(f"{uploaded.path}/../../../../evil.json", b"{}")
    assert uploaded.run("job=runs").status == 0
    assert not list(uploaded.folder.rglob("evil.json"))


def test_without_credentials_the_answer_says_so(uploaded: Uploaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    answer = uploaded.run("job=runs")
    assert answer.status == 2
    assert "Check the credentials" in answer.err


def test_a_run_of_somebody_else_asks_before_its_code_runs(uploaded: Uploaded) -> None:
    cache = f"path.cache={uploaded.folder / 'cache'}"
    answer = uploaded.command(f"resume={uploaded.url}", cache)
    assert answer.status == 2
    assert "isn't known to be yours" in answer.err
    assert "trust=true" in answer.err


# The server of the tests


def test_the_server_fails_as_asked(s3) -> None:
    bucket = s3.new_bucket()
    files = s3.filesystem()
    files.pipe_file(f"{bucket}/a", b"content" * 100)
    with s3.fault(status=403), pytest.raises(PermissionError):
        files.cat_file(f"{bucket}/a")
    with s3.fault(cut_after=10, requests=f"GET /{bucket}/a", count=1):
        # s3fs asks again.
        assert files.cat_file(f"{bucket}/a") == b"content" * 100
    s3.flip_bit(f"{bucket}/a")
    damaged = files.cat_file(f"{bucket}/a")
    assert len(damaged) == 700
    assert damaged != b"content" * 100
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{bucket}/a", b"other", mode="create")
