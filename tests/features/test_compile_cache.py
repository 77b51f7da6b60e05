"""A model is compiled once: what is compiled is kept in the user's cache, which nobody else can write."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import torch

from framework import ConfigError, StepOutput
from tests.helpers import results
from tests.helpers.disks import small_disk
from tests.helpers.internals import compile_cache_folder, compile_cache_module

CPU = torch.device("cpu")
SHORT = ("recipe=toy", "trainer.max_steps=3", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1")
TWO_COMPILED = ("trainer.compile=default", "topology.procs_per_node=2")
COUNTING_COMPILER = """#!/bin/sh
echo "$@" >> {log}
exec {compiler} "$@"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path / "cache"


class Notes:
    """Doesn't call the model, so that nothing is compiled; notes where it would be kept."""

    def training_step(self, model, batch):
        Path("noted").write_text(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "nowhere"))
        return StepOutput(sum(parameter.square().sum() for parameter in model.parameters()), len(batch[0]))


@pytest.mark.parametrize(
    ("mode", "variable", "place"),
    [
        ("default", None, "cache/framework/compiled"),
        pytest.param("default", "/of/the/user", "/of/the", marks=pytest.mark.exhaustive),
        pytest.param("null", None, ".", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_compiles_into_the_users_cache(train, cache, tmp_path, monkeypatch, mode, variable, place):
    if variable is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", variable)
    task = ("~task", f"+task._target_={__name__}.Notes", "trainer.max_steps=1", "checkpoint=none")
    limits = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    train("recipe=toy", *limits, *task, f"trainer.compile={mode}")
    folder = Path((tmp_path / "noted").read_text())
    assert tmp_path / folder.parent == tmp_path / place


def test_the_folder_is_private_and_named_by_version(cache):
    folder = compile_cache_folder(CPU)
    assert re.fullmatch(rf"torch_{re.escape(torch.__version__)}_cpu_[0-9a-f]{{16}}", folder.name)
    assert folder == compile_cache_folder(CPU)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_another_cpu_compiles_for_itself(cache, tmp_path, monkeypatch):
    folder = compile_cache_folder(CPU)
    other = tmp_path / "cpuinfo"
    other.write_text("processor\t: 0\nflags\t\t: fpu avx2\ncpu MHz\t\t: 2450.0\n\nprocessor\t: 1\nflags\t\t: fpu\n\n")
    monkeypatch.setattr(compile_cache_module, "_CPU_INFO", other)
    of_other = compile_cache_folder(CPU)
    assert of_other != folder
    # Neither its present speed nor another core changes the folder.
    other.write_text("processor\t: 0\nflags\t\t: fpu avx2\ncpu MHz\t\t: 3450.0\n\n")
    assert compile_cache_folder(CPU) == of_other


def test_nothing_is_read_from_where_others_can_write(cache, tmp_path):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    folder = compile_cache_folder(CPU).parent
    assert folder == tmp_path / f"framework_compiled_{os.getuid()}"
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=f"neither {cache}.* nor {folder} .*\n.*TORCHINDUCTOR_CACHE_DIR"):
        compile_cache_folder(CPU)


def test_a_cache_with_a_space_is_passed_over(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert compile_cache_folder(CPU).parent == tmp_path / f"framework_compiled_{os.getuid()}"


def test_a_full_disk_is_passed_over(tmp_path, cache):
    with small_disk(cache) as mount:
        mount(300)
        assert compile_cache_folder(CPU).parent == tmp_path / f"framework_compiled_{os.getuid()}"


@pytest.mark.exhaustive
@pytest.mark.multiproc
@pytest.mark.timeout(300)
def test_a_resumed_run_compiles_nothing(train, cache, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(COUNTING_COMPILER.format(log=log, compiler="/usr/bin/g++"))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)

    def compiled() -> list[str]:
        """Return the files that the compiler has made since the last call. `-E` only reads headers."""
        outputs = [re.search(r" -o (\S+)", call) for call in log.read_text().splitlines() if " -E " not in call]
        log.write_text("")
        return [output[1] for output in outputs if output is not None]

    run = train(*SHORT, *TWO_COMPILED, "checkpoint.every_n_steps=1")
    files = compiled()
    assert files
    assert len(files) == len(set(files)), "the second rank waits for what the first one compiles"
    train(f"resume={run}", "trainer.max_steps=5")
    assert compiled() == []
    assert results.results(run)["steps"] == 5
