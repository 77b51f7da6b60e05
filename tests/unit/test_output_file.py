"""A file appears whole under its name or not at all, and replaces nothing."""

from __future__ import annotations

import os

import pytest

from framework.errors import ConfigError, RunError
from framework.output_file import checked_output, put, written_aside

KEY = "some.output"


def check(text):
    return checked_output(str(text), key=KEY, suffixes=[".pt"])


def test_a_name_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check("a.pt") == tmp_path / "a.pt"


def test_what_can_not_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^some\.output=a\.txt: must end with \.pt\.$"):
        check(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="there is no folder"):
        check(tmp_path / "nowhere" / "a.pt")
    (tmp_path / "there.pt").touch()
    (tmp_path / "dangling.pt").symlink_to("gone")
    for name in ("there.pt", "dangling.pt"):
        with pytest.raises(ConfigError, match="is there already"):
            check(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="the folder can't be written"):
        check(tmp_path / "a.pt")


def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    output = tmp_path / "a.pt"
    with written_aside(output, key=KEY) as path:
        assert (path.name, path.parent.parent) == ("a.pt", tmp_path)
        path.write_text("whole")
        (path.parent / "scratch").touch()
        assert not output.exists()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"a.pt": "whole"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_what_failed(tmp_path, error):
    with pytest.raises(error), written_aside(tmp_path / "a.pt", key=KEY) as path:  # noqa: PT012
        path.write_text("ha")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_was_taken_meanwhile_is_left(tmp_path):
    output = tmp_path / "a.pt"
    with pytest.raises(ConfigError, match="written by another"), written_aside(output, key=KEY) as path:  # noqa: PT012
        path.write_text("ours")
        output.write_text("theirs")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"a.pt": "theirs"}


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "aside").write_text("whole")
    put(tmp_path / "aside", tmp_path / "a.pt", key=KEY)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"a.pt": "whole"}


def test_a_disk_that_refuses_is_told(tmp_path):
    with (
        pytest.raises(RunError, match=r"some\.output=.*a\.pt can't be written: No such file"),
        written_aside(tmp_path / "gone" / "a.pt", key=KEY),
    ):
        pass
