"""What `job=export` refuses before torch is needed, and what its file is called."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from framework.errors import ConfigError
from tests.helpers.internals import Export, Request, output_path, parse
from tests.unit.checkpoint.states import write_small
from tests.unit.config.raw import raw_config


def request(changes: dict[str, Any]) -> Request:
    raw = raw_config({"job": "export", **changes})
    return Request(config=parse(raw), raw=raw, overrides=())


@pytest.mark.parametrize(
    ("format_", "suffix"),
    [
        ("state_dict", ".pt"),
        ("safetensors", ".safetensors"),
        ("pretrained", ""),
        ("onnx", ".onnx"),
        ("torch_export", ".pt2"),
    ],
)
def test_a_file_is_named_after_recipe_and_step(tmp_path, monkeypatch, format_, suffix):
    monkeypatch.chdir(tmp_path)
    checkpoint = write_small(tmp_path / "checkpoints", 1200)
    asked = request({"export.format": format_, "recipe": "vision/some", "checkpoint.path": str(checkpoint)})
    file = tmp_path / f"vision_some_1200{suffix}"
    assert output_path(asked.config) == file
    file.touch()
    with pytest.raises(ConfigError, match=f"{file.name} exists already"):
        output_path(asked.config)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "onnx").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for name in ("onnx", "onnxscript"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"export\.format=onnx needs .*: pip install onnx onnxscript$"):
        Export().run(request({"export.format": "onnx", "export.output": "some.txt"}))


def test_wrong_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"export\.output=model\.pt: must end with \.onnx\."):
        Export().check(request({"export.format": "onnx", "export.output": f"{tmp_path}/model.pt"}))
