"""What a run wrote of its configuration, even if its files were edited or damaged since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.config.nested import flatten
from framework.config.overrides import dotted_key
from framework.config.values import show
from framework.config.yaml_files import checked, load_as, load_yaml_text
from framework.errors import ConfigError
from framework.system.files import FileFacts, read_bytes
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir

_NOT_THERE = object()


def written_config(run_dir: RunDir) -> str:
    """Return the text of `config.yaml` as the run wrote it: `run.json` has a copy, in case the file was edited since.

    Raises RequestError if neither can be read.
    """
    facts = run_dir.recorded_facts(run_dir.config_file.name)
    try:
        content = read_bytes(run_dir.config_file)
    except OSError as error:
        if facts is None:
            raise ConfigError(f"{run_dir.config_file} can't be read: {error.strerror or error}") from error
        content = b""

    if facts is not None and FileFacts.of(content) != facts:
        content = str(run_dir.read_run().get("config", "")).encode()
        if FileFacts.of(content) != facts:
            raise ConfigError(f"{run_dir.config_file} and its copy in run.json are damaged. Restore them from a copy.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{run_dir.config_file} can't be read: {error}") from error


def load_written_config(run_dir: RunDir) -> dict[str, Any]:
    """Return the configuration as the run wrote it, secrets masked. Raises RequestError if it can't be read."""
    config: dict[str, Any] = checked(run_dir.config_file, dict, lambda: load_yaml_text(written_config(run_dir)))
    return config


def load_unchanged(run_dir: RunDir, *, typed: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration that the run wrote, and what was typed for it.

    Raises RequestError if a file was changed since, except for a `config.yaml` whose changed keys are all typed.
    """
    written = load_written_config(run_dir)
    if run_dir.recorded_facts(run_dir.config_file.name) is not None:
        _check_edits(run_dir, written=written, typed=typed)
    return written, load_overrides(run_dir)


def load_overrides(run_dir: RunDir) -> list[str]:
    """Return what was typed for the run. Raises ConfigError if the file was changed since."""
    overrides = load_as(run_dir.overrides_file, list)
    if not is_unchanged(run_dir, run_dir.overrides_file):
        recorded = " ".join(map(str, run_dir.read_run().get("overrides", [])))
        raise ConfigError(
            f"{run_dir.overrides_file} isn't what the run wrote. Restore it, and type what you want to change.\n"
            f"The run was started with: {recorded or 'no overrides'}"
        )
    return list(map(str, overrides))


def is_unchanged(run_dir: RunDir, file: Path) -> bool:
    """Return True if a readable file is what the run wrote, or if that wasn't recorded."""
    facts = run_dir.recorded_facts(file.name)
    return facts is None or FileFacts.of(read_bytes(file)) == facts


def _check_edits(run_dir: RunDir, *, written: Mapping[str, Any], typed: Sequence[str]) -> None:
    """Raise ConfigError that lists the keys in which `config.yaml` differs from `written`, unless all are typed."""
    try:
        edited = load_as(run_dir.config_file, dict)
    except ConfigError as error:
        where = ""
        copies = sorted(run_dir.checkpoints.glob("step_*/config.yaml"))
        if copies:
            where = f" {copies[-1]} is one."
        raise ConfigError(f"{error}\nRestore it from a copy.{where}") from error

    before = flatten(written)
    now = flatten(edited)
    typed_keys = {dotted_key(text) for text in typed}
    lines = []
    # Each key once, those of `before` first.
    for key in before | now:
        old = before.get(key, _NOT_THERE)
        new = now.get(key, _NOT_THERE)
        is_typed = any(key == typed_key or key.startswith(f"{typed_key}.") for typed_key in typed_keys)
        # Compared as text, because nan differs from itself, and 1 equals 1.0 and true.
        if not is_typed and repr(new) != repr(old):
            lines.append(f"  {_edit_text(key, old=old, new=new)}")
    if lines:
        file = display_path(run_dir.config_file)
        raise ConfigError(
            f"{file} was edited, or is damaged: it isn't what the run wrote. These keys differ:\n"
            + "\n".join(lines)
            + "\nType each of them on the command line, with the value that you want."
        )


def _edit_text(key: str, *, old: Any, new: Any) -> str:
    """Return the override that makes an edit, and what the value was before."""
    if new is _NOT_THERE:
        return f"~{key} (it was {show(old)})"
    before = "it was not there"
    if old is not _NOT_THERE:
        before = f"it was {show(old)}"
    return f"{key}={show(new)} ({before})"
