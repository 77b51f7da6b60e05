"""Runs in a bucket: `path.outputs=s3://BUCKET/FOLDER`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.features.test_bad_input import Command, command  # noqa: F401
from tests.helpers.internals import RemotePlace

SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_steps=4", "trainer.limit_test_batches=0")


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
