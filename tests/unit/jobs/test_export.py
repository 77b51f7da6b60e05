"""What `job=export` refuses before torch is needed, and which devices the model is made for."""

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
from tests.unit.config.raw import raw_config

SUFFIX = {"state_dict": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state: dict[str, Any] = {"model": {}, "training": {}, "generators": []}
    folder = tmp_path_factory.mktemp("run")
    return write(folder / "checkpoints", state, step=1200, epoch=0, metrics={}, config_text="")


def request(changes: dict[str, Any], checkpoint: Path | None = None) -> Request:
    path = {"checkpoint.path": None if checkpoint is None else str(checkpoint)}
    raw = raw_config({"job": "export", **path, **changes})
    return Request(config=parse(raw), raw=raw, overrides=())


@pytest.mark.parametrize("format_", SUFFIX)
def test_a_file_is_named_after_recipe_and_step(checkpoint, tmp_path, monkeypatch, format_):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"vision_some_1200{SUFFIX[format_]}"
    asked = request({"export.format": format_, "recipe": "vision/some"}, checkpoint)
    assert export.check(asked) == file
    file.touch()
    with pytest.raises(ConfigError, match=f"{file.name} is there already"):
        export.check(asked)


@pytest.mark.parametrize(
    ("format_", "installed", "missing"),
    [("onnx", {"onnx"}, "onnxscript"), ("onnx", set(), "onnx onnxscript"), ("safetensors", set(), "safetensors")],
)
def test_a_missing_package_is_named_before_anything_else(monkeypatch, format_, installed, missing):
    monkeypatch.setattr(export, "_is_installed", lambda name: name in installed)
    with pytest.raises(ConfigError, match=f"export.format={format_} needs .*: pip install {missing}$"):
        export.main(request({"export.format": format_, "export.output": "some.txt"}))


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "onnx_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not export._is_installed("onnx_of_mine")
    assert export._is_installed("pytest")


def test_wrong_names_and_sweeps_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"export\.output=model\.pt: must end with \.onnx\."):
        export.check(request({"export.format": "onnx", "export.output": f"{tmp_path}/model.pt"}))
    with pytest.raises(ConfigError, match="can't go with a sweep"):
        export.check(replace(request({"export.output": f"{tmp_path}/a.pt"}), place=Place(tmp_path, number=0)))


@pytest.mark.parametrize(
    ("gpus", "topology", "span"),
    [
        (8, {}, 1),
        (8, {"procs_per_node": 2}, 4),
        (0, {"gpus_per_process": 2}, 2),
        (0, {"gpus_per_process": 3, "nnodes": 16, "procs_per_node": 8}, 3),
    ],
)
def test_a_model_is_made_for_the_devices_of_one_process_of_the_run(gpus, topology, span):
    keys = {f"topology.{name}": value for name, value in topology.items()}
    assert export._span(request({"trainer.gpus": gpus, **keys}).config) == span
