from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from framework.checkpoint.format import (
    FORMAT_VERSION,
    FileFacts,
    Manifest,
    NewerFormatError,
    decode,
    encode,
    step_name,
    step_of,
)
from framework.errors import CheckpointError

HERE = Path("run/checkpoints/step_00000007")


def manifest(**changes) -> Manifest:
    content = {
        "step": 7,
        "epoch": 1,
        "metrics": {"val/loss": 0.1 + 0.2},
        "files": {"model.pt": FileFacts(size_bytes=12, crc32="00ff00ff")},
        "framework_version": "1.2.3",
        "torch_version": "2.10.0",
    }
    return Manifest(**{**content, **changes})


def test_what_is_encoded_is_decoded() -> None:
    assert decode(encode(manifest()), directory=HERE) == manifest()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_valid_json_and_comes_back_as_nan(value: float) -> None:
    text = encode(manifest(metrics={"val/loss": value}))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(decode(text, directory=HERE).metrics["val/loss"])


@pytest.mark.parametrize(
    ("old", "new"), [('"step": 7', '"step": 8'), ('"size_bytes": 12', '"size_bytes": 13'), ("{", "")]
)
def test_a_changed_manifest_is_refused(old: str, new: str) -> None:
    text = encode(manifest())
    with pytest.raises(CheckpointError, match="damaged"):
        decode(text.replace(old, new, 1), directory=HERE)


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"format_version": "new"}', '{"format_version": 1}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        decode(text, directory=HERE)


def test_a_newer_format_says_to_update_even_if_all_else_is_unknown() -> None:
    text = json.dumps({"format_version": FORMAT_VERSION + 1, "framework_version": "9.0", "shards": []})
    with pytest.raises(
        CheckpointError,
        match=rf"format {FORMAT_VERSION + 1}, written by framework 9\.0.*up to format {FORMAT_VERSION}\.",
    ):
        decode(text, directory=HERE)


def test_a_newer_format_that_is_damaged_is_damaged() -> None:
    text = encode(manifest()).replace('"format_version": 1', '"format_version": 9')
    with pytest.raises(CheckpointError, match="damaged"):
        decode(text, directory=HERE)


def test_a_newer_format_with_its_checksum_is_newer() -> None:
    with pytest.raises(NewerFormatError, match="Update the framework"):
        decode(encode(manifest(format_version=FORMAT_VERSION + 1)), directory=HERE)


def test_step_names() -> None:
    assert step_name(1200) == "step_00001200"
    assert step_of("step_00001200") == 1200
    assert step_of(step_name(123_456_789)) == 123_456_789
    assert [step_of(name) for name in ("step_1200", "step_00001200_old", "step_0000001200", "last")] == [None] * 4
