"""Files of unknown origin: regular ones are read, up to a size; nothing else is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.helpers.internals import open_regular, parse_json, read_bytes, read_json, read_text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def folder(path: Path) -> None:
    path.mkdir()


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


@pytest.mark.parametrize("make", [fifo, device, listening, folder, large, dangling])
def test_what_is_no_small_regular_file_is_refused(tmp_path, make):
    path = tmp_path / "f"
    make(path)
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(OSError, match="f"):
            read(path)
    if make is not large:
        with pytest.raises(OSError, match="f"):
            open_regular(path)


def test_a_link_to_a_regular_file_is_followed(tmp_path):
    (tmp_path / "real").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to("real")
    assert read_json(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 90_000, "", "{", b"\xff"])
def test_unusable_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
