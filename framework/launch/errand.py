"""One question to a process that has torch: asked from the parent, which has none, answered by a forked child."""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from framework import errors
from framework.errors import FrameworkError, LaunchError, RunError
from framework.launch.warm import Child, WarmServer, warm_server
from framework.launch.wire import Channel, Message

_KILL_TIMEOUT_S = 10.0  # nothing withstands SIGKILL for long but a process in the kernel's hands


def ask(
    warm: WarmServer | None,
    entry: str,
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
    purpose: str = "look into the model",
) -> Message:
    """What `entry` ("module:function"), called as `entry(arguments)` in a child, gives: plain types, as JSON has them.

    warm: the server to fork from; one is started where it is None or has ended. What the child prints goes to stderr.
    purpose: what the child is to do, for messages.
    Raises the FrameworkError that the child raised; RunError where it raised anything else, after its traceback;
    LaunchError where it takes longer than `timeout_s`. No child is left in any case.
    """
    with warm_server(warm) as server:
        ours, theirs = Channel.pair()
        key = f"errand#{os.getpid()}#{entry}"
        with theirs:
            server.spawn(Child(key, f"{__name__}:answer", {"entry": entry, "arguments": arguments}), fd=theirs.fileno())
        try:
            return _answer_of(server, ours, key=key, timeout_s=timeout_s, purpose=purpose)
        finally:
            ours.close()


def answer(arguments: Mapping[str, Any], fd: int | None) -> int:
    """In the child: call what is asked for and send what it gives, or the FrameworkError it raises, over `fd`."""
    assert fd is not None
    os.dup2(2, 1)  # whatever the user's code prints: the parent's output is the answer alone
    module, _, name = arguments["entry"].partition(":")
    function: Callable[[Mapping[str, Any]], Message] = getattr(importlib.import_module(module), name)
    try:
        message: Message = {"given": function(arguments["arguments"])}
    except FrameworkError as error:
        message = {"raised": type(error).__name__, "text": str(error)}
    Channel(socket.socket(fileno=fd)).send(message)
    return 0


def _answer_of(server: WarmServer, channel: Channel, *, key: str, timeout_s: float, purpose: str) -> Message:
    """The child's answer, once the child has ended."""
    received: list[Message] = []
    watched: list[Any] = [server, channel]
    deadline = time.monotonic() + timeout_s
    ended = False
    try:
        while not ended or channel in watched:
            ready = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise LaunchError(
                    f"The process that was to {purpose} gave no answer within backend.init_timeout={timeout_s:g} s. "
                    "Building the model or the data may be slow here; raise it."
                )
            if channel in ready:
                try:
                    received += channel.receive_ready()
                except (EOFError, OSError):  # the child has closed its end
                    watched.remove(channel)
            if server in ready:
                ended = ended or _has_exited(server, key)
    finally:
        if not ended:
            _end(server, key)
    return _unpacked(received, purpose=purpose)


def _has_exited(server: WarmServer, key: str) -> bool:
    return any(event["event"] == "exited" and event["key"] == key for event in list(server.events()))


def _end(server: WarmServer, key: str) -> None:
    """SIGKILL, and wait until the server has reaped it."""
    with suppress(LaunchError):  # the server is gone, and its children with it
        server.kill(key, signal.SIGKILL)
        while select.select([server], [], [], _KILL_TIMEOUT_S)[0] and not _has_exited(server, key):
            continue


def _unpacked(received: list[Message], *, purpose: str) -> Message:
    if not received:
        raise RunError(f"The process that was to {purpose} ended without an answer; its error is above.")
    message = received[0]
    if "raised" in message:
        kind = getattr(errors, message["raised"], RunError)
        raise kind(message["text"])
    given: Message = message["given"]
    return given
