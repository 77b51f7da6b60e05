"""A file appears whole under its name or not at all."""

from __future__ import annotations

import os

import pytest

from framework.errors import ConfigError, RunError
from tests.helpers.internals import atomic_output, checked_output

KEY = "some.output"


def contents(folder):
    return {each.name: each.read_text() for each in folder.iterdir()}


def test_unwritable_names_are_refused(tmp_path, monkeypatch):
    def check(text):
        return checked_output(str(text), key=KEY, suffixes=[".pt"])

    monkeypatch.chdir(tmp_path)
    assert check("a.pt") == tmp_path / "a.pt"
    (tmp_path / "there.pt").touch()
    (tmp_path / "dangling.pt").symlink_to("gone")
    refused = {
        "a.txt": r"^some\.output=a\.txt: must end with \.pt\.$",
        "nowhere/a.pt": "the folder doesn't exist",
        "there.pt": "exists already",
        "dangling.pt": "exists already",
    }
    for name, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            check(tmp_path / name)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="isn't writable"):
        check(tmp_path / "a.pt")


def test_a_file_is_whole_when_it_appears(tmp_path):
    output = tmp_path / "a.pt"
    with atomic_output(output, key=KEY) as path:
        assert (path.name, path.parent.parent) == ("a.pt", tmp_path)
        path.write_text("whole")
        (path.parent / "scratch").touch()
        assert not output.exists()
    assert contents(tmp_path) == {"a.pt": "whole"}


def test_nothing_is_left_of_what_failed(tmp_path):
    output = tmp_path / "a.pt"
    with pytest.raises(KeyboardInterrupt), atomic_output(output, key=KEY) as path:  # noqa: PT012
        path.write_text("ha")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {}
    gone = atomic_output(tmp_path / "gone" / "a.pt", key=KEY)
    with pytest.raises(RunError, match=r"some\.output=.*a\.pt can't be written: No such file"):
        gone.__enter__()
