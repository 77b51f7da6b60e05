"""A program: moto's S3 server on this machine, with faults on demand.

    python -m tests.helpers.s3_server HOST

It prints its port. Each line that it reads is a fault as JSON, see `Fault`, which holds until the next line; it answers
each with `ok`. It ends when its input does. Everything is kept in memory.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_CODES = {403: "AccessDenied", 404: "NoSuchBucket", 500: "InternalError", 503: "SlowDown", 507: "InsufficientStorage"}


@dataclass
class Fault:
    """What goes wrong with the requests that match."""

    # A regular expression for `METHOD /bucket/key`.
    requests: str = ""
    # Answer with this status instead.
    status: int | None = None
    # Answer this much later.
    delay_s: float = 0.0
    # Send only so many bytes of the answer, and close the connection.
    cut_after: int | None = None
    # Take no connections at all.
    refuse: bool = False
    # How many requests; null: all.
    count: int | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def hits(self, request: str) -> bool:
        """Return True if it is about this request, and count it."""
        if re.search(self.requests, request) is None:
            return False
        with self._lock:
            if self.count is not None:
                self.count -= 1
                return self.count >= 0
        return True


class FaultyServer:
    """The server, which stops listening while connections are refused."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._port = 0
        self._application: Application = DomainDispatcherApplication(create_backend_app)
        self._fault = Fault(count=0)
        self._server: BaseWSGIServer | None = None
        self._listen()

    @property
    def port(self) -> int:
        return self._port

    def set(self, fault: Fault) -> None:
        self._fault = fault
        if fault.refuse and self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        elif not fault.refuse and self._server is None:
            self._listen()

    def _listen(self) -> None:
        server = make_server(self._host, self._port, self._answer, threaded=True)
        self._port = server.server_port
        self._server = server
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        fault = self._fault
        if not fault.hits(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"):
            return self._application(environ, start_response)
        time.sleep(fault.delay_s)
        if fault.status is not None:
            code = _CODES[fault.status]
            content = f"<Error><Code>{code}</Code><Message>{code}, as the test wants it</Message></Error>".encode()
            start_response(f"{fault.status} {code}", [("Content-Type", "application/xml")])
            return [b"" if environ["REQUEST_METHOD"] == "HEAD" else content]
        answer = self._application(environ, start_response)
        if fault.cut_after is None:
            return answer
        return _cut(b"".join(answer), fault.cut_after)


def _cut(content: bytes, size: int) -> Iterator[bytes]:
    """Yield the beginning; the connection is closed before the length that was announced."""
    yield content[:size]
    raise ConnectionAbortedError("as the test wants it")


def main() -> None:
    server = FaultyServer(sys.argv[1])
    print(server.port, flush=True)
    for line in sys.stdin:
        server.set(Fault(**json.loads(line)))
        print("ok", flush=True)


if __name__ == "__main__":
    main()
