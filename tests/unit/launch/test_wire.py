from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.launch.wire import Channel, Message


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """Our end of a connection, and the other one raw."""
    channel, other = Channel.pair()
    yield channel, other
    channel.close()
    other.close()


def read_all(channel: Channel, *, wanted: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < wanted:
        assert select.select([channel], [], [], 5.0)[0], "nothing came"
        messages += channel.receive_ready()
    return messages


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, socket.socket]) -> None:
    ours, raw = ends
    theirs = Channel(raw)
    sent = [{"op": "spawn", "number": number, "text": "line\nbreak é"} for number in range(3)]
    for message in sent:
        theirs.send(message)
    assert read_all(ours, wanted=3) == sent


def test_many_messages_in_one_read(ends: tuple[Channel, socket.socket]) -> None:
    ours, other = ends
    other.sendall(b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a"')
    assert list(ours.receive_ready()) == [{"a": 1}, {"a": 2}, {"a": 3}]
    other.sendall(b": 4}\n")
    assert list(ours.receive_ready()) == [{"a": 4}]


def test_a_message_in_many_reads(ends: tuple[Channel, socket.socket]) -> None:
    ours, other = ends
    data = '{"text": "é"}\n'.encode()
    for position in range(len(data) - 1):
        other.sendall(data[position : position + 1])
        assert list(ours.receive_ready()) == []
    other.sendall(data[-1:])
    assert list(ours.receive_ready()) == [{"text": "é"}]


def test_a_message_larger_than_a_read_and_than_the_socket_s_buffer(ends: tuple[Channel, socket.socket]) -> None:
    ours, raw = ends
    message = {"environment": {f"NAME_{number}": "x" * 1000 for number in range(2000)}}
    sender = threading.Thread(target=Channel(raw).send, args=(message,))
    sender.start()
    assert read_all(ours, wanted=1) == [message]
    sender.join()


def test_the_end_of_the_connection_is_told_after_what_was_sent(ends: tuple[Channel, socket.socket]) -> None:
    ours, other = ends
    other.sendall(b'{"last": true}\n{"cut o')
    other.close()
    assert list(ours.receive_ready()) == [{"last": True}]
    for _ in range(2):
        with pytest.raises(EOFError, match="closed the connection"):
            list(ours.receive_ready())


def test_sending_to_nobody_raises(ends: tuple[Channel, socket.socket]) -> None:
    ours, other = ends
    other.close()
    with pytest.raises(OSError, match="pipe"):
        ours.send({"op": "kill"})


def test_file_descriptors_come_with_their_message_in_order(ends: tuple[Channel, socket.socket], tmp_path: Path) -> None:
    ours, raw = ends
    theirs = Channel(raw)
    for name in ("first", "second"):
        with (tmp_path / name).open("w") as file:
            theirs.send({"takes_fd": name}, fds=[file.fileno()])
    theirs.send({"takes_fd": None})
    for message in read_all(ours, wanted=3):
        if message["takes_fd"] is not None:
            with os.fdopen(ours.take_fd(), "w") as file:
                file.write(message["takes_fd"])
    assert (tmp_path / "first").read_text() == "first"
    assert (tmp_path / "second").read_text() == "second"
