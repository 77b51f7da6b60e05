"""The keeper: a process that is never a rank, hosts the store the ranks meet at, and writes the report of a failure.

It is the first child of the fork server for a run, so what ranks said survives any of them. Its port is bound before
it is named, on the loopback interface only: nobody can take it in between.

Messages from the parent: {"op": "report", "exits": [...]} and {"op": "done", "rank"}. Answers: {"event": "ready",
"port"} once, {"event": "report", "report"} and {"event": "done", "rank", "done": bool} for each request. It leaves when
the parent closes the connection.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.launch.report import make_report
from framework.launch.wire import Channel, Message
from framework.run_dir import RunDir, write_atomically

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
_STORE_TIMEOUT = timedelta(seconds=10)


def failure_key(rank: int) -> str:
    """Where in the store a rank leaves the record of its failure."""
    return f"framework/failure/{rank}"


def done_key(rank: int) -> str:
    """Where in the store a rank says that it has done its work: no exit status says so surely."""
    return f"framework/done/{rank}"


def keeper_main(arguments: Mapping[str, Any], fd: int | None) -> int:
    """Serve until the parent closes its end. `arguments`: run_dir, world_size."""
    if fd is None:
        raise ValueError("the keeper needs a connection to the parent")
    channel = Channel(socket.socket(fileno=fd))
    store, port = _host_store()
    channel.send({"event": "ready", "port": port})
    try:
        while True:
            for message in channel.receive_ready():
                channel.send(_answer(message, store, arguments))
    except (EOFError, OSError):
        return 0


def _answer(message: Message, store: TCPStore, arguments: Mapping[str, Any]) -> Message:
    if message["op"] == "done":
        return {"event": "done", "rank": message["rank"], "done": store.check([done_key(message["rank"])])}
    return {"event": "report", "report": _report(store, arguments, exits=message["exits"])}


def _host_store() -> tuple[TCPStore, int]:
    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(_BACKLOG)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns and closes it from here on
    )
    return store, port


def _report(store: TCPStore, arguments: Mapping[str, Any], *, exits: list[dict[str, Any]]) -> dict[str, Any]:
    world_size = arguments["world_size"]
    keys = [failure_key(rank) for rank in range(world_size)]
    records = [json.loads(store.get(key)) for key in keys if store.check([key])]
    report = make_report(records, exits, world_size=world_size)
    file = RunDir(Path(arguments["run_dir"])).failure_file
    try:
        write_atomically(file, json.dumps(report.to_plain(), indent=2) + "\n")
    except OSError as error:  # a full disk, say, which may be the very failure: the parent shows the report anyhow
        report = replace(report, unsaved=f"{file} can't be written: {error.strerror or error}.")
    return report.to_plain()
