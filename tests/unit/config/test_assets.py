"""Where configuration is found, and which launchers and jobs there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.config import assets
from framework.errors import ConfigError


def test_the_framework_has_its_own_configuration() -> None:
    assert (assets.config_dir() / "config.yaml").is_file()


def test_the_package_comes_before_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "_PACKAGE", tmp_path / "framework")
    with pytest.raises(ConfigError, match="installation is incomplete"):
        assets.config_dir()
    for place in (tmp_path / "conf", tmp_path / "framework" / "conf"):
        place.mkdir(parents=True)
        (place / "config.yaml").touch()
        assert assets.config_dir() == place


def test_a_folder_of_the_user_is_found(tmp_path: Path) -> None:
    assert assets.user_config_dir(tmp_path) is None
    (tmp_path / "conf").mkdir()
    assert assets.user_config_dir(tmp_path) == (tmp_path / "conf").resolve()
    assert assets.user_config_dir(assets.config_dir().parent) is None


def test_names_come_from_files() -> None:
    assert {"auto", "local", "in_place"} <= set(assets.launcher_names())
    assert not {"fork_server", "keeper", "plan"} & set(assets.launcher_names())
    assert "train" in assets.job_names()
    assert not {"request", "__init__"} & set(assets.job_names())
