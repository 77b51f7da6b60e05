"""Runs that somebody else made, or that hold passwords: what is shown of them, and where a resumed one writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.errors import RequestError
from tests.features.test_runs import SHORT, Page
from tests.helpers import results
from tests.helpers.internals import RunDir, check_no_way_out, compose

NASTY = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>\x1b]0;title\x07\x9b31m\u202e\x7f\r\nfake\ud800"
KEPT = {"job", "started", "ended", "time", "mode", "pid", "monitor"}
"""Keys of run.json without which it isn't a run."""
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]")
FORMATS = ("text", "csv", "json")


def poisoned(value: Any, key: str = "") -> Any:
    """Return a record in which every text and every name of a metric is hostile."""
    if isinstance(value, dict):
        record = {}
        for name, entry in value.items():
            is_metric = "/" in name
            record[f"{name}{NASTY}" if is_metric else name] = poisoned(entry, name)
        return record
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    return NASTY if isinstance(value, str) and key not in KEPT else value


@pytest.fixture
def copied(shared_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Copies a run to `outputs/toy/NAME`."""
    monkeypatch.chdir(tmp_path)

    def copy(name: str) -> Path:
        place = tmp_path / "outputs/toy" / name
        shutil.copytree(shared_run(*SHORT), place, symlinks=True)
        return place

    return copy


@pytest.fixture
def hostile(copied: Callable[[str], Path]) -> Path:
    """Two runs whose records hold markup, terminal escapes and reversed text wherever they can; their folder."""
    for name in ("a", "b"):
        run_dir = copied(name)
        record = results.run_file(run_dir)
        record["results"]["last"]["texts"] = {"val/t": f"| {NASTY.splitlines()[0]} |\n|---|\n| 1 |", "val/u": NASTY}
        record["git"] = {"revision": NASTY + name, "diff": NASTY + name}
        (run_dir / "run.json").write_text(json.dumps(poisoned(record)))
        config = yaml.safe_load((run_dir / "config.yaml").read_text())
        config["recipe"] = NASTY.replace("\ud800", "") + name
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
        with (run_dir / "metrics.jsonl").open("a") as file:
            for step in (50, 60):
                file.write(json.dumps({"step": step, "epoch": 0, "time": 0, f"val/{NASTY}": 1.0}) + "\n")
            file.write(json.dumps({"step": 60, "epoch": 0, "time": 0, "val/loss": NASTY}) + "\n")
        (run_dir / "failure.json").write_text(json.dumps({"first": NASTY}))
        (run_dir / "media").mkdir(exist_ok=True)
        (run_dir / "media" / "val<b>\x1b_1.csv").write_bytes(NASTY.encode(errors="replace"))
        (run_dir / "media" / "val__x_1.png").write_bytes(NASTY.encode(errors="replace"))
    return run_dir.parent


def test_a_page_escapes_markup_and_control_characters(hostile: Path) -> None:
    assert compose.main(["job=report", f"runs={hostile}"]) == 0
    text = Path("report.html").read_text()
    page = Page(text)
    assert CONTROL.search(text) is None
    assert [tag for tag, _ in page.tags if tag in ("script", "style")] == ["style", "script", "script"]
    assert [attributes["type"] for tag, attributes in page.tags if tag == "script" and attributes] == [
        "application/json"
    ]
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    assert page.text.count(r"<script>alert(1)</script><img src=x onerror=alert(1)>\x1b]0;title\x07\x9b31m\u202e") > 20
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert "unsafe" not in str(policy)
    assert "val__x_1.png can't be shown" in page.text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("job", ["runs", "compare"])
def test_the_terminal_gets_no_control_characters(
    hostile: Path, capsys: pytest.CaptureFixture[str], job: str, form: str
) -> None:
    capsys.readouterr()
    assert compose.main([f"job={job}", f"runs={hostile}", f"runs.format={form}"]) == 0
    out = capsys.readouterr().out
    assert CONTROL.search(out) is None
    assert "alert(1)" in out
    # A text can't look like two rows.
    assert not any(line.startswith("fake") for line in out.splitlines())


def test_errors_show_names_of_runs_as_text(copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    copied("run\x1b[31m")
    assert compose.main(["job=runs", "runs=outputs/toy/run"]) == 2
    err = capsys.readouterr().err
    assert CONTROL.search(err) is None
    assert r"run\x1b[31m" in err


def test_a_page_holds_only_files_of_its_run(copied: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    run_dir = copied("a")
    private = tmp_path / "private.csv"
    private.write_text("hidden,words\n")
    media = run_dir / "media"
    media.mkdir(exist_ok=True)
    (media / "val__linked_1.csv").symlink_to(private)
    os.mkfifo(media / "val__pipe_1.csv")
    (media / "val__bomb_1.png").write_bytes(
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + b"\x7f\xff\xff\xff" * 2 + b"\x08\x02" + b"\0" * 9
    )
    (run_dir / "failure_x.json").symlink_to(private)
    (run_dir / "eval").mkdir()
    (run_dir / "eval" / "other").symlink_to(copied("b"))
    assert compose.main(["job=report", f"runs={run_dir}"]) == 0
    text = Path("report.html").read_text()
    assert "hidden" not in text
    assert "Evaluations" not in text
    for name in ("val__linked_1.csv", "val__pipe_1.csv", "val__bomb_1.png", "failure_x.json"):
        assert f"{name} can&#39;t be shown" in text

    config = run_dir / "config.yaml"
    config.rename(tmp_path / "config.yaml")
    config.symlink_to(tmp_path / "config.yaml")
    assert compose.main(["job=report", f"runs={run_dir}", "report.output=other.html"]) == 2
    assert "config.yaml is a symlink" in capsys.readouterr().err
    assert not Path("other.html").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/rank_0.log", "media", ".lock", "run.json", "media/x_1.png"])
def test_a_resumed_run_writes_nothing_outside_of_it(
    copied: Callable[[str], Path], tmp_path: Path, capsys: Any, name: str
) -> None:
    run_dir = copied("a")
    target = tmp_path / "target"
    place = run_dir / name
    place.parent.mkdir(exist_ok=True)
    if place.is_dir() or place.exists():
        place.rename(target)
    else:
        target.write_text("keep\n")
    before = target.stat()
    place.symlink_to(target)
    assert compose.main([f"resume={run_dir}", "trainer.max_steps=50"]) == 2
    assert f"{place} is a symlink to {target}" in capsys.readouterr().err
    assert target.stat().st_mtime_ns == before.st_mtime_ns


def test_symlinks_within_a_run_are_followed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run_dir = copied("a")
    (run_dir / "newest.log").symlink_to("logs/rank_0.log")
    (run_dir / "checkpoints" / "mine").symlink_to(tmp_path)
    check_no_way_out(RunDir(run_dir))
    (run_dir / "up").symlink_to("..")
    with pytest.raises(RequestError, match="up is a symlink"):
        check_no_way_out(RunDir(run_dir))


TRACKER = """
from pathlib import Path

class Tracker:
    def __init__(self, tracking_uri, settings, run_dir):
        self.seen, self.run_dir = (tracking_uri, settings["api_key"]), run_dir
    def log(self, values, *, step, epoch):
        assert "hunter2" not in repr(values) and "key12345" not in repr(values)
    def on_results(self, metrics):
        Path("seen").write_text(repr(self.seen))
    def close(self):
        pass
"""
TYPED = (
    "+logger.own._target_=own.Tracker",
    "+logger.own.tracking_uri=http://me:hunter2@127.0.0.1:1",
    "+logger.own.settings={api_key:key12345}",
)


def test_passwords_stay_private_and_survive_a_resume(train: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "own.py").write_text(TRACKER)
    run_dir = train(*SHORT, "logger=[jsonl,tensorboard]", *TYPED)
    seen = Path("seen").read_text()
    assert seen == repr(("http://me:hunter2@127.0.0.1:1", "key12345"))
    Path("seen").unlink()
    assert train(f"resume={run_dir}", "trainer.max_steps=50") == run_dir
    assert Path("seen").read_text() == seen
    again = train(f"rerun={run_dir}", "trainer.max_steps=20")
    assert Path("seen").read_text() == seen
    assert compose.main(["job=report", f"runs=[{run_dir},{again}]"]) == 0
    assert compose.main(["job=runs"]) == 0
    assert compose.main(["job=compare", f"runs=[{run_dir},{again}]"]) == 0
    out, err = capfd.readouterr()
    secrets = re.compile("hunter2|key12345")
    assert not secrets.search(out + err)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    with_secrets = {path.relative_to(tmp_path) for path in files if secrets.search(path.read_text(errors="replace"))}
    kept = {run / "secrets.yaml" for run in (run_dir.relative_to(tmp_path), again.relative_to(tmp_path))}
    assert with_secrets == {Path("seen"), Path("own.py"), *kept}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)

    # A copy without the secrets asks for them.
    (run_dir / "secrets.yaml").unlink()
    assert compose.main([f"resume={run_dir}", "trainer.max_steps=60"]) == 2
    assert "logger.own.tracking_uri" in capfd.readouterr().err
    assert train(f"resume={run_dir}", "trainer.max_steps=60", *TYPED[1:]) == run_dir
    assert Path("seen").read_text() == seen


def test_passwords_that_an_earlier_version_recorded_are_masked(copied: Callable[[str], Path], capsys: Any) -> None:
    run_dir = copied("a")
    record = results.run_file(run_dir)
    address = "http://me:hunter2@host"
    record["overrides"].append(f"logger.mlflow.tracking_uri={address}")
    record["command"] += f" logger.mlflow.tracking_uri={address} model.hf_token=hunter2"
    (run_dir / "run.json").write_text(json.dumps(record))
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["logger"]["mlflow"] = {"_target_": "framework.loggers.MLflowLogger", "tracking_uri": address}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    copied("b")
    for arguments in (
        ["job=report"],
        ["job=runs"],
        ["job=compare"],
        *(["job=runs", f"runs.format={each}"] for each in FORMATS),
    ):
        assert compose.main([*arguments, "runs=outputs/toy"]) == 0
    assert "hunter2" not in capsys.readouterr().out
    assert "hunter2" not in Path("report.html").read_text()
    assert "me:***@host" in Path("report.html").read_text()
