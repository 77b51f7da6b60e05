"""What was in force from which step of a run: its configuration, topology, versions and code. No torch here.

`run.json` has these facts of the last start at its top. Below `segments` it has an entry for each time training began:

    step         training began after this optimizer step; 0 for a new run
    started      when
    attempt      the number of the restart, for one by launcher=elastic
    rolled_back  the numbers of the steps that callbacks=[spike_guard] had rolled back from by then
    config, overrides, search_path, topology, versions, git, modules
             each only if the next entry has another value; those of the last entry are at the top of run.json

A resume from an earlier step drops the entries of the steps that it repeats. `abandoned` has the checkpoints of such
steps that are still there, with checksums of their manifests.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from framework.checkpoint import find_damage
from framework.checkpoint.layout import CONFIG_NAME, LAST, MANIFEST_NAME, step_of
from framework.checkpoint.lookup import complete_steps
from framework.config.overrides import key_of, search_path_override
from framework.config.renamed import with_present_names, without_removed
from framework.config.saved import with_secrets
from framework.config.written import load_written_config
from framework.config.yaml_files import checked, load_as, load_yaml_text
from framework.errors import ConfigError
from framework.system.files import read_bytes
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir

SEGMENTS = "segments"
_ABANDONED = "abandoned"
_KINDS: Mapping[str, type] = {
    "config": str,
    "overrides": list,
    "search_path": list,
    "topology": dict,
    "versions": dict,
    "git": dict,
    "modules": dict,
}
_IN_FORCE = tuple(_KINDS)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Steps that a run has trained without a new start in between, and what was in force."""

    # Training began after this step.
    after: int
    # The last of the steps; None if the run may still train, or has ended there.
    until: int | None
    # The resolved configuration, by the names of today, with the secrets that the run directory has.
    config: Mapping[str, Any]
    # What was typed, `hydra.searchpath` included, secrets masked.
    overrides: tuple[str, ...]
    # As in run.json; empty if they aren't known.
    topology: Mapping[str, Any]
    versions: Mapping[str, str]
    # `revision` and `diff`; empty outside of a repository, too.
    git: Mapping[str, str]
    # The SHA-256 of each of the user's modules.
    modules: Mapping[str, str]
    # The numbers of the steps that callbacks=[spike_guard] had rolled back from, whose samples are left out.
    rolled_back: tuple[int, ...]
    # Why these may not be the facts of that step, in one sentence; None if they are.
    doubt: str | None


# Writing


def kept_segments(before: Mapping[str, Any], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a run that is started again.

    Args:
        before: the content of run.json so far.
        facts: those of the new start, which replace the ones at its top.
    """
    return _packed(_full_entries(before), {**before, **facts})


def record_segment(run_dir: RunDir, *, step: int, attempt: int, modules: Mapping[str, str]) -> None:
    """Record that training begins after `step`. Only rank 0 calls it.

    Args:
        attempt: restarts so far.
        modules: the hashes of the user's modules that are imported.
    """
    record = run_dir.read_run()
    entries = [entry for entry in _full_entries(record) if entry["step"] < step]
    record["modules"] = dict(modules)

    entry: dict[str, Any] = {"step": step, "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}
    if attempt > 0:
        entry["attempt"] = attempt
    rolled_back = rolled_back_steps(record)
    if rolled_back:
        entry["rolled_back"] = rolled_back
    entries.append({**entry, **_in_force(record)})

    facts: dict[str, Any] = {"modules": record["modules"], SEGMENTS: _packed(entries, record)}
    abandoned = _abandoned_checkpoints(run_dir, record, step=step)
    if abandoned or _ABANDONED in record:
        facts[_ABANDONED] = abandoned
    run_dir.update_run(facts)


def rolled_back_steps(record: Mapping[str, Any]) -> list[int]:
    """Return the steps that callbacks=[spike_guard] has rolled back from, by their numbers; record: of run.json."""
    return [spike["number"] for spike in record.get("spikes", []) if spike["rolls_back"]]


def _in_force(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in _IN_FORCE}


def _full_entries(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a record, each with all that was in force.

    A run of an earlier version has none, and one that hasn't begun to train. If it was started once, it began at step 0
    with what its record has, unless it is a branch of another run.
    """
    if SEGMENTS not in record:
        is_known = "started" in record and not record.get("earlier") and "branch_of" not in record
        if not is_known:
            return []
        return [{"step": 0, "started": record["started"], **_in_force(record)}]

    entries = []
    in_force = _in_force(record)
    for entry in reversed(record[SEGMENTS]):
        in_force = {name: entry.get(name, in_force[name]) for name in _IN_FORCE}
        entries.append({**entry, **in_force})
    return entries[::-1]


def _packed(entries: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return full entries without what the next one has, too. record: what follows the last one."""
    packed = []
    following = _in_force(record)
    for entry in reversed(entries):
        packed.append({name: value for name, value in entry.items() if following.get(name, _NOTHING) != value})
        following = _in_force(entry)
    return packed[::-1]


_NOTHING = object()


def _abandoned_checkpoints(run_dir: RunDir, record: Mapping[str, Any], *, step: int) -> dict[str, str]:
    """Return the checkpoints that aren't of the steps before `step`, and the checksums of their manifests.

    Those of later steps are among them: with `checkpoint.save_top_k=-1` they stay until they are written again.
    """
    abandoned = {}
    for directory in run_dir.checkpoints.glob("step_*"):
        number = step_of(directory.name)
        if number is None or directory.is_symlink():
            continue
        if number > step or _is_abandoned(directory, record):
            abandoned[directory.name] = _manifest_checksum(directory)
    return dict(sorted(abandoned.items()))


def _is_abandoned(directory: Path, record: Mapping[str, Any]) -> bool:
    recorded = (record.get(_ABANDONED) or {}).get(directory.name)
    return recorded is not None and recorded == _manifest_checksum(directory)


def _manifest_checksum(directory: Path) -> str:
    """Return the checksum of a manifest, which has those of all files; an empty text if there is none."""
    try:
        return f"{zlib.crc32(read_bytes(directory / MANIFEST_NAME)):08x}"
    except OSError:
        return ""


# Reading


def segment_at(run_dir: RunDir, step: int) -> Segment:
    """Return what was in force when a run computed its optimizer step `step`, counted from 1.

    It doesn't check that the run has come so far. For a run of an earlier version that was resumed, the configuration
    is that of the first checkpoint at or after the step, and `doubt` says so.

    Raises ConfigError if its records can't be read, or another run has computed the step, from which this one branches
    off later.
    """
    record = _record(run_dir)
    entries = _full_entries(record)
    begun_before = [entry for entry in entries if entry["step"] < step]
    if not begun_before:
        return _unrecorded(run_dir, record, entries, step=step)

    until = None
    if len(begun_before) < len(entries):
        until = entries[len(begun_before)]["step"]
    entry = begun_before[-1]
    return _segment(run_dir, entry, config=_config(run_dir, entry), after=entry["step"], until=until, doubt=None)


def checkpoint_before(run_dir: RunDir, step: int) -> Path | None:
    """Return the newest undamaged checkpoint of a run at or before `step`; None if there is none.

    To compute step N again, begin at `checkpoint_before(run_dir, N - 1)`. All files of a checkpoint are read. Those of
    steps that a resume from an earlier step has abandoned are left out. Raises ConfigError if run.json can't be read.
    """
    record = _record(run_dir)
    newest = None
    last = run_dir.checkpoints / LAST
    if last.is_symlink():
        newest = step_of(last.resolve().name)
    steps = complete_steps(run_dir.checkpoints)
    for number in sorted(steps, reverse=True):
        directory, _ = steps[number]
        is_later = number > step or (newest is not None and number > newest)
        if not is_later and not _is_abandoned(directory, record) and find_damage(directory) is None:
            return directory.resolve()
    return None


def _unrecorded(
    run_dir: RunDir, record: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], *, step: int
) -> Segment:
    """Return what is known of a step for which nothing was recorded."""
    branch = record.get("branch_of")
    if branch is not None:
        raise ConfigError(
            f"{display_path(run_dir.path)} begins after step {branch['step']:,} of {branch['run']}, which has computed "
            f"step {step:,}. Name that run."
        )

    # The first start that was recorded, or all that is known.
    following = {"step": None, **_in_force(record)}
    if entries:
        following = dict(entries[0])
    limit = following["step"]
    for number, (directory, _) in complete_steps(run_dir.checkpoints).items():
        if number >= step and (limit is None or number <= limit):
            config = load_as(directory / CONFIG_NAME, dict)
            source = f"the configuration is that of {directory.name}"
            break
    else:
        config = _config(run_dir, following)
        source = "the configuration is that of its next start"
        if not entries:
            source = "the configuration is that of its last start"
    doubt = (
        f"It isn't recorded what was in force at step {step:,}: {source}, code and versions are those of a later start."
    )
    return _segment(run_dir, following, config=config, after=0, until=limit, doubt=doubt)


def _segment(
    run_dir: RunDir,
    facts: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    after: int,
    until: int | None,
    doubt: str | None,
) -> Segment:
    overrides = list(facts.get("overrides") or ())
    if facts.get("search_path"):
        # As they were typed, they may be relative.
        overrides = [text for text in overrides if key_of(text) != "hydra.searchpath"]
        overrides.append(search_path_override(facts["search_path"]))
    return Segment(
        after=after,
        until=until,
        config=with_secrets(without_removed(with_present_names(config)), run_dir),
        overrides=tuple(overrides),
        topology=facts.get("topology") or {},
        versions=facts.get("versions") or {},
        git=facts.get("git") or {},
        modules=facts.get("modules") or {},
        rolled_back=tuple(facts.get("rolled_back") or ()),
        doubt=doubt,
    )


def _config(run_dir: RunDir, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration whose text is in run.json; that of config.yaml for a run that didn't record it."""
    text = facts.get("config")
    if text is None:
        return load_written_config(run_dir)
    config: dict[str, Any] = checked(run_dir.run_file, dict, lambda: load_yaml_text(text))
    return config


def _record(run_dir: RunDir) -> dict[str, Any]:
    """Return run.json; nothing if there is none. Raises ConfigError if its segments aren't what a run writes."""
    try:
        record = run_dir.read_run()
    except FileNotFoundError:
        return {}
    try:
        check_segments(record)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{run_dir.run_file} is damaged: it has {error}. Restore it from a copy.") from error
    return record


def check_segments(record: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for entries of run.json that aren't what a run writes."""
    entries = record.get(SEGMENTS, [])
    for entry in entries:
        if not isinstance(entry, dict) or type(entry.get("step")) is not int:
            raise TypeError(f"{entry!r} among its segments")
        for name, kind in {**_KINDS, "rolled_back": list}.items():
            if entry.get(name) is not None and not isinstance(entry[name], kind):
                raise TypeError(f"a {type(entry[name]).__name__} as {name} of a segment")
    steps = [entry["step"] for entry in entries]
    if steps != sorted(set(steps)):
        raise ValueError(f"segments that begin after steps {steps}")
