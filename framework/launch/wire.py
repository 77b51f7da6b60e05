"""Messages between the parent, the fork server and the keeper: one JSON object a line over a Unix stream socket."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, final

Message = dict[str, Any]
_CHUNK_BYTES = 65_536
_MAX_FDS = 4


@final
class Channel:
    """One end of a connection. Sending blocks; receiving is split so that a caller can wait with `select`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        self._fds: deque[int] = deque()

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Our end, and the socket to hand to the other side."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, *, fds: Sequence[int] = ()) -> None:
        """Send one message and file descriptors with it. Raises OSError when the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], fds) if fds else 0
        self._socket.sendall(data[sent:])

    def receive_ready(self) -> Iterator[Message]:
        """Read what has arrived (waits for at least something) and yield whole messages. Raises EOFError at the end."""
        data, fds, _, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, _MAX_FDS)
        self._fds.extend(fds)
        if not data:
            raise EOFError("the other side closed the connection")
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def take_fd(self) -> int:
        """The oldest file descriptor received and not taken yet."""
        return self._fds.popleft()

    def close(self) -> None:
        self._socket.close()
