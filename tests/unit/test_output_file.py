"""A file appears whole under its name or not at all, and replaces nothing."""

from __future__ import annotations

import os

import pytest

from framework.errors import ConfigError, RunError
from framework.output_file import checked_output, written_aside

KEY = "some.output"


def contents(folder):
    return {each.name: each.read_text() for each in folder.iterdir()}


def test_a_name_is_made_absolute_and_what_can_not_be_written_is_refused(tmp_path, monkeypatch):
    def check(text):
        return checked_output(str(text), key=KEY, suffixes=[".pt"])

    monkeypatch.chdir(tmp_path)
    assert check("a.pt") == tmp_path / "a.pt"
    (tmp_path / "there.pt").touch()
    (tmp_path / "dangling.pt").symlink_to("gone")
    refused = {
        "a.txt": r"^some\.output=a\.txt: must end with \.pt\.$",
        "nowhere/a.pt": "there is no folder",
        "there.pt": "is there already",
        "dangling.pt": "is there already",
    }
    for name, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            check(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="the folder can't be written"):
        check(tmp_path / "a.pt")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_gets_its_name_when_it_is_whole(tmp_path, monkeypatch, has_links):
    def refuse(*_):
        raise PermissionError

    if not has_links:  # of the file system
        monkeypatch.setattr(os, "link", refuse)
    output = tmp_path / "a.pt"
    with written_aside(output, key=KEY) as path:
        assert (path.name, path.parent.parent) == ("a.pt", tmp_path)
        path.write_text("whole")
        (path.parent / "scratch").touch()
        assert not output.exists()
    assert contents(tmp_path) == {"a.pt": "whole"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_what_failed(tmp_path, error):
    with pytest.raises(error), written_aside(tmp_path / "a.pt", key=KEY) as path:  # noqa: PT012
        path.write_text("ha")
        raise error
    assert contents(tmp_path) == {}


def test_a_name_that_was_taken_meanwhile_is_left_and_a_disk_that_refuses_is_an_error(tmp_path):
    output = tmp_path / "a.pt"
    with pytest.raises(ConfigError, match="written by another"), written_aside(output, key=KEY) as path:  # noqa: PT012
        path.write_text("ours")
        output.write_text("theirs")
    assert contents(tmp_path) == {"a.pt": "theirs"}
    gone = written_aside(tmp_path / "gone" / "a.pt", key=KEY)
    with pytest.raises(RunError, match=r"some\.output=.*a\.pt can't be written: No such file"):
        gone.__enter__()
