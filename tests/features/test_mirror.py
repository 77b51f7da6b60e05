"""A run with `path.outputs` in a bucket, which is uploaded while it is trained."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.features.test_bad_input import Command, command  # noqa: F401
from tests.helpers.command import run_python, started_python
from tests.helpers.internals import Uploader
from tests.unit.remote.faults import Run

TRAINING = (
    "recipe=toy",
    "logger=jsonl",
    "trainer.gpus=0",
    "trainer.max_steps=20",
    "trainer.limit_test_batches=0",
    "checkpoint.every_n_steps=10",
)


def run_in(folder: Path) -> Path:
    """Return the one run of the toy recipe below a folder."""
    (run_file,) = folder.rglob("run.json")
    return run_file.parent


def local_files(run: Path) -> dict[str, bytes]:
    """Return the content of each file that is uploaded; of a symlink, what it names."""
    files = {}
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        is_hidden = any(part.startswith(".") for part in Path(name).parts)
        if path.is_symlink():
            files[name] = path.readlink().name.encode()
        elif path.is_file() and not is_hidden and not path.parent.is_symlink():
            files[name] = path.read_bytes()
    return files


def objects(s3, bucket: str) -> dict[str, bytes]:
    """Return the content of each object of the one run in a bucket, by its path in the run; claims are left out."""
    content = s3.filesystem().cat(s3.filesystem().find(bucket))
    return {path.split("/", 5)[5]: text for path, text in content.items() if "/.claims/" not in path}


@pytest.mark.parametrize("status", [None, 403, pytest.param(507, marks=pytest.mark.exhaustive)])
def test_a_run_is_at_its_url(command: Command, s3, tmp_path, status: int | None) -> None:  # noqa: F811
    bucket = s3.new_bucket()
    where = (f"path.outputs=s3://{bucket}/a/team", f"path.cache={tmp_path / 'cache'}")
    if status is not None:
        # Of what comes after the claim, two uploads are refused.
        s3.set_fault(requests="^PUT .*/(config.yaml|model.pt)", status=status, count=2)
    answer = command(*TRAINING, *where)
    assert answer.status == 0
    assert answer.err.count("can't be written") == answer.err.count("is writable again") == (status is not None)
    run = run_in(tmp_path / "cache")
    assert objects(s3, bucket) == local_files(run)
    assert "checkpoints/step_00000020/manifest.json" in objects(s3, bucket)

    # What was lost at the URL is uploaded again.
    s3.filesystem().rm(f"{bucket}/a", recursive=True)
    answer = command("job=upload", f"runs={run}")
    assert answer.status == 0
    assert "All of" in answer.out
    assert objects(s3, bucket) == local_files(run)


@pytest.mark.exhaustive
def test_a_branch_of_a_run_at_a_url(command: Command, s3, tmp_path) -> None:  # noqa: F811
    """Only the last checkpoint is fetched, so the steps up to an earlier one are repeated."""
    bucket = s3.new_bucket()
    outputs = f"path.outputs=s3://{bucket}/a/team"
    assert command(*TRAINING, outputs, f"path.cache={tmp_path / 'one'}").status == 0
    run = run_in(tmp_path / "one")
    url = f"run=s3://{bucket}/a/team/toy/{run.name}"
    where = (outputs, f"path.cache={tmp_path / 'two'}", "trust=true")
    answer = command("job=branch", url, "step=10", "optimizer.lr=0.02", *where)
    assert answer.status == 0, answer.err
    assert "Repeating 10 steps" in answer.out
    (made,) = [file.parent for file in tmp_path.glob("two/**/run.json") if file.parent.name != run.name]
    names = {path.split("/", 5)[5] for path in s3.filesystem().find(f"{bucket}/a/team/toy/{made.name}")}
    assert {"run.json", "checkpoints/step_00000010/manifest.json", "checkpoints/step_00000020/manifest.json"} <= names


def test_a_sweep_is_at_its_url(command: Command, s3, tmp_path) -> None:  # noqa: F811
    bucket = s3.new_bucket()
    where = (f"path.outputs=s3://{bucket}/a/team", f"path.cache={tmp_path / 'cache'}")
    answer = command("-m", *TRAINING, *where, "optimizer.lr=0.1,0.2")
    assert answer.status == 0
    (sweep,) = (tmp_path / "cache" / "s3" / bucket / "a" / "team" / "multirun").iterdir()
    names = objects(s3, bucket).keys()
    assert {"sweep.json", "0/config.yaml", "1/checkpoints/last", "1/checkpoints/step_00000020/manifest.json"} <= names
    for name in names:
        if not name.startswith(".claims/") and (sweep / name).is_file():
            assert (
                s3.filesystem().cat_file(f"{bucket}/a/team/multirun/{sweep.name}/{name}") == (sweep / name).read_bytes()
            )


@pytest.mark.parametrize(
    ("runs", "said"),
    [("nothing", "neither a run nor a sweep on this machine"), ("{run}", "it has no URL")],
)
def test_what_cannot_be_uploaded_is_refused(command: Command, shared_run, runs: str, said: str) -> None:  # noqa: F811
    run = shared_run(*TRAINING[:2], *TRAINING[3:])
    answer = command("job=upload", f"runs={runs.format(run=run)}")
    assert answer.status == 2
    assert said in answer.err


def test_a_run_without_a_url_loads_nothing_of_this(tmp_path) -> None:
    program = (
        "import sys; from framework.command import compose; "
        f"print(compose.main({list(TRAINING)})); "
        "print(sorted(name for name in sys.modules if name.startswith(('fsspec', 's3fs', 'framework.remote.'))))"
    )
    result = run_python("-c", program, cwd=tmp_path)
    # These say that a path is no URL.
    loaded = "['framework.remote.place', 'framework.remote.weights']"
    assert result.stdout.splitlines()[-2:] == ["0", loaded], result.stdout + result.stderr


@pytest.mark.exhaustive
def test_a_kill_in_a_multipart_upload_leaves_no_file(s3, shared_run, tmp_path) -> None:
    url = f"s3://{s3.new_bucket()}/a/team/toy/run"
    run = Run(tmp_path, shared_run(*TRAINING[:2], *TRAINING[3:]), url=url)
    # In three parts.
    run.save(10, content=bytes(120 * 2**20))
    program = (
        "from pathlib import Path; from tests.helpers.internals import RemotePlace, Uploader; "
        f"place = RemotePlace.of_local(Path({str(run.path)!r})); "
        "Uploader(place, on_progress=lambda: print('part', flush=True)).upload()"
    )
    bucket = url.split("/")[2]
    with started_python("-c", program) as started:
        s3.set_fault(requests="^PUT .*/model.pt", delay_s=1.0)
        deadline_s = time.monotonic() + 60.0
        while not any(path.endswith("run.json") for path in s3.filesystem().find(bucket)):
            assert time.monotonic() < deadline_s, started.printed()
        parts_before = started.stdout().count("part")
        while started.stdout().count("part") == parts_before:
            assert time.monotonic() < deadline_s, started.printed()
        started.process.kill()
        started.process.wait()
    assert not [name for name in objects(s3, bucket) if name.startswith("checkpoints/")]

    s3.set_fault(count=0)
    uploader = Uploader(run.place)
    while uploader.upload():
        pass
    content = objects(s3, bucket)
    assert len(content["checkpoints/step_00000010/model.pt"]) == 120 * 2**20 + 2
    assert content["checkpoints/last"] == b"step_00000010"
