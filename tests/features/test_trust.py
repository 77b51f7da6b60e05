"""What a saved run brings along runs only if the run is the user's own, or if `trust=true` is typed."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import framework
from framework.errors import ConfigError
from tests.helpers import results
from tests.helpers.internals import RunDir, compose, trust_module

SHORT = ("recipe=toy", "logger=jsonl", "trainer.limit_test_batches=0", "trainer.max_steps=20")
LIMITED = "trainer.limit_test_batches=1"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(fork_server, monkeypatch, tmp_path, capfd) -> Command:
    """The command in `tmp_path`: its exit status and what it printed on stderr. Nothing is trusted by itself."""

    def run(*overrides: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = compose.main(["trainer.gpus=0", *overrides], fork_server=fork_server)
        return status, capfd.readouterr().err

    return run


def copied(run_dir: Path, place: Path) -> Path:
    return Path(shutil.copytree(run_dir, place, symlinks=True))


@pytest.fixture
def own(shared_run, tmp_path: Path) -> Path:
    """A run below the outputs of the command."""
    return copied(shared_run(*SHORT), tmp_path / "outputs" / "toy" / "own")


@pytest.fixture
def foreign(shared_run, tmp_path: Path) -> Path:
    """A run somewhere else, with a module that leaves a mark when it is imported."""
    run_dir = copied(shared_run(*SHORT), tmp_path / "elsewhere" / "toy" / "run")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["callbacks"] = {"bad": {"_target_": "bad_module.Bad"}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "bad_module.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\nclass Bad:\n    def on_train_step_end(self, report): pass\n"
    )
    # An attacker would remove the record with its checksums, too.
    (run_dir / "run.json").unlink()
    return run_dir


REQUESTS = {
    "resume": ("resume={run}", "trainer.max_steps=25"),
    "rerun": ("rerun={run}", "trainer.max_steps=5"),
    "plan": ("job=plan", "rerun={run}"),
    "parity": ("job=parity", "rerun={run}"),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_run_that_lies_elsewhere_is_asked_for(command, foreign, tmp_path, kind):
    typed = [text.format(run=foreign) for text in REQUESTS[kind]]
    before = {file: file.read_bytes() for file in foreign.rglob("*") if file.is_file()}
    status, printed = command(*typed)
    assert status == 2
    for text in ("isn't below outputs", "trust=true", "target  bad_module.Bad  (callbacks.bad)", "bad_module.py"):
        assert text in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "ran").exists()
    assert {file: file.read_bytes() for file in foreign.rglob("*") if file.is_file()} == before
    if kind in ("resume", "rerun"):
        assert command(*typed, "trust=true")[0] == 0
        assert (tmp_path / "ran").exists()
        for config in tmp_path.glob("*/toy/*/config.yaml"):
            assert "trust: true" not in config.read_text()
            assert "trust" not in (config.parent / "overrides.yaml").read_text()
        assert command(*typed)[0] == 2, "the answer isn't kept"


@pytest.mark.parametrize("job", ["eval", "predict", "export", "tests.features.own_jobs.nothing"])
def test_jobs_on_foreign_weights_ask_first(command, shared_run, tmp_path, job):
    run_dir = copied(shared_run(*SHORT), tmp_path / "elsewhere" / "toy" / "run")
    for path in (run_dir, run_dir / "checkpoints" / "last"):
        status, printed = command(f"job={job}", f"checkpoint.path={path}")
        assert status == 2
        assert "trust=true" in printed
        assert "checkpoint.path would run code" in printed
    if job == "eval":
        assert command(f"job={job}", f"checkpoint.path={run_dir}", "trust=true", LIMITED)[0] == 0


def test_a_checkpoint_outside_its_run_asks_first(command, own, tmp_path):
    shutil.copytree(own / "checkpoints" / "step_00000020", tmp_path / "mine")
    assert command("job=eval", f"checkpoint.path={tmp_path}/mine", LIMITED)[0] == 2
    shutil.move(tmp_path / "mine", tmp_path / "outputs" / "mine")
    assert command("job=eval", f"checkpoint.path={tmp_path}/outputs/mine", LIMITED) == (0, "")


def test_a_typed_outputs_folder_is_trusted(command, shared_run, tmp_path):
    run_dir = copied(shared_run(*SHORT), tmp_path / "runs" / "toy" / "run")
    assert command(f"resume={run_dir}", "trainer.max_steps=25")[0] == 2
    assert command(f"resume={run_dir}", "trainer.max_steps=25", f"path.outputs={tmp_path}/runs")[0] == 0


def test_outputs_of_the_users_recipe_are_trusted(command, tmp_path):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [toy]\npath: {outputs: runs}\ntrainer: {max_steps: 4}\n"
    )
    assert command("recipe=mine", "logger=jsonl")[0] == 0
    (run_dir,) = (tmp_path / "runs" / "mine").iterdir()
    assert command(f"resume={run_dir}", "trainer.max_steps=6")[0] == 0


def test_symlinked_outputs_are_trusted_but_runs_are_not(command, own, foreign, tmp_path):
    (tmp_path / "disk").mkdir()
    shutil.move(tmp_path / "outputs", tmp_path / "disk" / "outputs")
    (tmp_path / "outputs").symlink_to("disk/outputs")
    assert command(f"resume={tmp_path}/outputs/toy/own", "trainer.max_steps=25")[0] == 0
    (tmp_path / "outputs" / "toy" / "linked").symlink_to(foreign)
    assert command(f"resume={tmp_path}/outputs/toy/linked")[0] == 2


@pytest.mark.parametrize("name", ["config.yaml", "", "checkpoints/step_00000020/config.yaml", "run.json"])
def test_a_world_writable_file_asks_first(command, own, name):
    place = own / name
    place.chmod(place.stat().st_mode | 0o002)
    status, printed = command(f"resume={own}", "trainer.max_steps=25")
    assert status == 2
    assert "everybody can write" in printed
    place.chmod(place.stat().st_mode & ~0o002)
    assert command(f"resume={own}", "trainer.max_steps=25")[0] == 0


@needs_root
@pytest.mark.parametrize("name", ["overrides.yaml", "", "checkpoints"])
def test_a_file_of_somebody_else_is_asked_for(command, own, name):
    os.chown(own / name, NOBODY, -1)
    status, printed = command(f"rerun={own}", "trainer.max_steps=5")
    assert status == 2
    assert "belongs to nobody" in printed


@needs_root
def test_a_group_counts_unless_it_is_ones_own(command, own, monkeypatch):
    """With umask 002, the default of Debian and Fedora, each user has a group without other members."""
    for place in (own, *own.rglob("*")):
        if not place.is_symlink():
            place.chmod(place.stat().st_mode | 0o020)
    assert command(f"resume={own}", "trainer.max_steps=25")[0] == 0
    os.chown(own / "config.yaml", -1, NOBODY)
    (own / "config.yaml").chmod(0o664)
    status, printed = command(f"resume={own}", "trainer.max_steps=30")
    assert status == 2
    assert "the group nogroup can write" in printed
    # On NFS, for example, owners may be other people.
    monkeypatch.setattr(trust_module, "_is_local", lambda _: False)
    assert command(f"resume={own}", "trainer.max_steps=30")[0] == 0


# Restarts and requeues never ask


@needs_root
def test_auto_skips_runs_of_other_users(command, own, tmp_path):
    crashed = '"status": "running"'
    text = (own / "run.json").read_text()
    (own / "run.json").write_text(text.replace('"status": "finished"', crashed))
    (own / "config.yaml").chmod(0o666)
    status, printed = command("recipe=toy", "resume=auto", "trainer.max_steps=25")
    assert status == 0
    assert "resume=auto: outputs/toy/own" in printed
    (own / "run.json").write_text((own / "run.json").read_text().replace('"status": "finished"', crashed))
    os.chown(own / "config.yaml", NOBODY, -1)
    status, printed = command(*SHORT, "resume=auto")
    assert status == 0
    assert "outputs/toy/own is left out" in printed
    assert results.results(own)["steps"] == 25
    assert len([*(tmp_path / "outputs" / "toy").iterdir()]) == 2


def test_a_requeued_job_is_not_asked(command, shared_run, tmp_path, monkeypatch):
    run_dir = copied(shared_run(*SHORT), tmp_path / "elsewhere" / "toy" / "run")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert command(f"resume={run_dir}", "trainer.max_steps=25")[0] == 0


# What runs no code


def test_reading_any_run_asks_nothing(command, foreign, tmp_path, shared_run):
    run_dir = copied(shared_run(*SHORT), tmp_path / "elsewhere" / "toy" / "other")
    assert command(*SHORT, f"init_from={run_dir}")[0] == 0
    assert command("job=runs", f"runs={run_dir}")[0] == 0
    assert command("job=report", f"runs={run_dir}")[0] == 0
    loaded = framework.load(run_dir)
    assert loaded.metrics is not None
    assert loaded.status == "finished"
    assert loaded.config["seed"] == 0
    assert len(loaded.history)
    assert not (tmp_path / "ran").exists()


class Marks:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("ran",)


def test_loaded_runs_ask_unless_they_are_trusted(shared_run, tmp_path, monkeypatch, own_state):
    monkeypatch.chdir(tmp_path)
    run_dir = copied(shared_run(*SHORT), tmp_path / "elsewhere" / "toy" / "run")
    (run_dir / "run.json").unlink()
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    (run_dir / "objects_0.pkl").write_bytes(pickle.dumps({"bad": Marks()}))
    (run_dir / "config.yaml").write_text(yaml.safe_dump({**config, "objects": [str(run_dir / "objects_0.pkl")]}))
    run = framework.load(run_dir)
    for call in (
        run.best_model,
        run.last_model,
        run.evaluate,
        run.predict,
        run.resume,
        lambda: run.to_yaml(tmp_path / "conf" / "recipe" / "mine.yaml"),
    ):
        with pytest.raises(ConfigError, match=r"(?s)pickle  elsewhere/toy/run/objects_0.pkl.*trust=True"):
            call()
    assert not (tmp_path / "ran").exists()
    trusted = framework.load(run_dir, trust=True)
    trusted.to_yaml(tmp_path / "conf" / "recipe" / "mine.yaml")
    assert (tmp_path / "ran").exists()


def test_objects_that_lie_elsewhere_are_asked_for(command, own, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "objects_0.pkl"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(pickle.dumps({"bad": Marks()}))
    config = yaml.safe_load((own / "config.yaml").read_text())
    (own / "run.json").unlink()
    (own / "config.yaml").write_text(yaml.safe_dump({**config, "objects": [str(elsewhere)]}))
    status, printed = command(f"rerun={own}")
    assert status == 2
    assert "elsewhere/objects_0.pkl isn't below outputs" in printed
    assert not (tmp_path / "ran").exists()
    command(f"rerun={own}", "trust=true")
    assert (tmp_path / "ran").exists()


def test_trust_must_be_true_or_false(command, own):
    status, printed = command(f"resume={own}", "trust=maybe")
    assert status == 2
    assert "trust=maybe: must be true or false" in printed
    assert RunDir(own).read_run()["status"] == "finished"
