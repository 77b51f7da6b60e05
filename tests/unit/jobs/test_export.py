"""What `job=export` refuses before anything is done, and for how many devices the model is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.checkpoint import write
from framework.config.parse import parse
from framework.errors import ConfigError
from framework.jobs import export
from framework.jobs.request import Place, Request
from tests.conf.test_options import composed


def request(*overrides: str, checkpoint: Path | None = None) -> Request:
    raw: dict[str, Any] = composed("recipe=toy", "job=export", *overrides)
    raw["checkpoint"]["path"] = None if checkpoint is None else str(checkpoint)
    return Request(config=parse(raw), raw=raw, overrides=overrides)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state: dict[str, Any] = {"model": {}, "training": {}, "generators": []}
    return write(tmp_path / "checkpoints", state, step=1200, epoch=0, metrics={}, config_text="")


@pytest.mark.parametrize(
    ("format_", "name"),
    [
        ("state_dict", "toy_1200.pt"),
        ("safetensors", "toy_1200.safetensors"),
        ("onnx", "toy_1200.onnx"),
        ("torch_export", "toy_1200.pt2"),
    ],
)
def test_without_a_name_recipe_and_step_give_one_here(checkpoint, tmp_path, monkeypatch, format_, name):
    monkeypatch.chdir(tmp_path)
    asked = request(f"export.format={format_}", checkpoint=checkpoint)
    assert export.check(asked) == tmp_path / name
    Path(name).touch()
    with pytest.raises(ConfigError, match=f"{name} is there already"):
        export.check(asked)


def test_a_recipe_in_a_folder_gives_a_name_without(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = request(checkpoint=checkpoint)
    asked = replace(asked, config=replace(asked.config, recipe="vision/toy"))
    assert export.check(asked) == tmp_path / "vision_toy_1200.pt"


def test_the_name_of_another_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"export\.output=model\.pt: must end with \.onnx\."):
        export.check(request("export.format=onnx", f"export.output={tmp_path}/model.pt"))


@pytest.mark.parametrize(
    ("format_", "there", "missing"),
    [
        ("onnx", {"onnx"}, "onnxscript"),
        ("onnx", set(), "onnx onnxscript"),
        ("safetensors", set(), "safetensors"),
    ],
)
def test_a_missing_package_is_named_before_anything_else(monkeypatch, format_, there, missing):
    """Before the file's name too, which is wrong here."""
    monkeypatch.setattr(export, "_is_installed", lambda name: name in there)
    with pytest.raises(ConfigError) as caught:
        export.main(request(f"export.format={format_}", "export.output=some.txt"))
    names = " and ".join(missing.split())
    assert str(caught.value) == (f"export.format={format_} needs {names}, which isn't installed: pip install {missing}")


def test_a_folder_where_one_is_has_no_package_in_it(tmp_path, monkeypatch):
    (tmp_path / "onnx_of_mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert not export._is_installed("onnx_of_mine")
    assert not export._is_installed("nowhere_at_all")
    assert export._is_installed("pytest")


def test_a_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't go with a sweep"):
        export.check(replace(request(f"export.output={tmp_path}/a.pt"), place=Place(tmp_path, number=0)))


@pytest.mark.parametrize(
    ("overrides", "span"),
    [
        ((), 1),
        (("trainer.gpus=8",), 1),
        (("trainer.gpus=8", "topology.procs_per_node=2"), 4),
        (("topology=model_parallel",), 2),
        (("topology.gpus_per_process=3", "topology.nnodes=16", "topology.procs_per_node=8"), 3),
    ],
)
def test_a_model_is_made_for_the_devices_of_one_process_of_the_run(overrides, span):
    assert export._span(request(*overrides).config) == span
