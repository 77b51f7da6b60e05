"""What trackers have of a run, read from their own files."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

_BLOCK = 32768
# The checksum, length and kind of a part.
_HEAD = struct.Struct("<IHB")
# The kinds of a part that ends a record: a whole record, or its last part.
_ENDS = (1, 4)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a file that W&B writes offline: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    make_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    content = file.read_bytes()
    assert content[:4] == b":W&B"
    at = 7
    whole = b""
    while at + _HEAD.size <= len(content):
        if _BLOCK - at % _BLOCK < _HEAD.size:
            # The rest of a block is padding.
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        whole += content[at : at + length]
        at += length
        if kind in _ENDS:
            record = make_record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_run(run_dir: Path) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The run's description, history and summary, of its one offline folder."""
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    run: Any = None
    history: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            history.append({name: json.loads(value) for name, value in items.items()})
        elif kind == "summary":
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.summary.update}
            summary |= {name: json.loads(value) for name, value in items.items()}
    return run, history, summary


def wandb_curve(run_dir: Path, name: str) -> dict[int, float]:
    """Step → value. Fails the test where a step comes twice."""
    return _curve([(row["_step"], row[name]) for row in wandb_run(run_dir)[1] if name in row])


def mlflow_curve(database: Path, run_id: str, name: str) -> dict[int, float]:
    query = "SELECT step, value FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY step"
    return _curve(mlflow_rows(database, query, run_id, name))


def mlflow_rows(database: Path, query: str, *arguments: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query, arguments).fetchall()


def _curve(points: list[tuple[Any, ...]]) -> dict[int, float]:
    assert len({step for step, _ in points}) == len(points), f"steps more than once: {points}"
    return dict(points)
