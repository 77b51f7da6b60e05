"""Files of a data set: used where they are, downloaded and verified once, decoded once; faults are named."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from framework import DataError, Resource, cached_tensors, local_files

UNPACKED = bytes(range(256)) * 40
PACKED, OTHER = gzip.compress(UNPACKED, mtime=0), b"other" * 1000


def resource(name: str, content: bytes, unpacked: Resource | None = None) -> Resource:
    return Resource(name, hashlib.md5(content).hexdigest(), len(content), unpacked=unpacked)


A, B = resource("a.gz", PACKED, unpacked=resource("a", UNPACKED)), resource("b.bin", OTHER)


def refused(*resources: Resource, folder: Path, mirrors: list[str], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        local_files(resources, folder=folder, mirrors=lambda: mirrors, **options)
    return str(caught.value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


# Files that are there


def test_good_files_are_used_where_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Packed or not, in any of the folders; a damaged one beside a good one is reported."""
    (tmp_path / "a").write_bytes(UNPACKED)
    (tmp_path / "b.bin").write_bytes(OTHER)
    deep = tmp_path / "deep" / "raw"
    found = local_files([B, A], folder=deep, also_in=[tmp_path], mirrors=pytest.fail)
    assert found == [tmp_path / "b.bin", tmp_path / "a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b.bin"]
    (tmp_path / "a.gz").write_bytes(PACKED[:-1])
    assert local_files([A], folder=tmp_path, mirrors=pytest.fail) == [tmp_path / "a"]
    assert f"{tmp_path / 'a.gz'} is truncated" in caplog.text
    assert f"{tmp_path / 'a'} is used instead" in caplog.text
    (tmp_path / "a.gz").write_bytes(PACKED)
    assert local_files([A], folder=tmp_path, mirrors=pytest.fail) == [tmp_path / "a.gz"]


@pytest.mark.parametrize(
    ("content", "size", "fault"),
    [
        (OTHER[:-1], 5000, "is truncated: it has 4,999 bytes instead of 5,000"),
        (OTHER + b"!", 5000, "is another file: it has 5,001 bytes instead of 5,000"),
        (OTHER[:-1] + b"!", 5000, "is damaged: its MD5 is"),
        (b"x", None, "is damaged: its MD5 is"),
        (None, 5000, "can't be read: Is a directory"),
    ],
)
def test_a_bad_file_is_named_and_kept(tmp_path: Path, content: bytes | None, size: int, fault: str) -> None:
    path = tmp_path / "b.bin"
    path.mkdir() if content is None else path.write_bytes(content)
    text = refused(Resource("b.bin", B.md5, size), folder=tmp_path, mirrors=[])
    assert f"{path} {fault}" in text
    assert "Put a good file there, or delete this one" in text
    assert names(tmp_path) == {"b.bin"}
    assert content is None or path.read_bytes() == content


# Downloads

Serve = Callable[[BaseHTTPRequestHandler], None]


def send(content: bytes, *, length: int | None = None) -> Serve:
    def serve(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return serve


class Server:
    """Serves `pages`; 404 for others. `asked` are the paths, in order."""

    def __init__(self) -> None:
        pages = self.pages = {"/a.gz": send(PACKED), "/b.bin": send(OTHER)}
        asked: list[str] = []
        self.asked = asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                page = pages.get(self.path)
                self.send_error(404) if page is None else page(self)

            def log_message(self, *arguments: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # so that closing it waits for them
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    yield server
    server.http.shutdown()
    server.thread.join()
    server.http.server_close()


def test_only_what_is_missing_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    """By one of those that ask; what a killed download left goes."""
    folder = tmp_path / "deep" / "raw"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(UNPACKED)
    (folder / "b.bin.part").write_bytes(b"half")
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(local_files, [A, B], folder=folder, mirrors=lambda: [f"{server.url}/"]) for _ in range(8)]
        assert [call.result() for call in calls] == [[folder / "a", folder / "b.bin"]] * 8
    assert server.asked == ["/b.bin"]
    assert (folder / "b.bin").read_bytes() == OTHER
    assert names(folder) == {"a", "b.bin"}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (None, "HTTP 404 Not Found"),
        (send(OTHER[:-1] + b"!"), "what came is damaged: its MD5 is"),
        (send(OTHER[:100], length=len(OTHER)), "what came is truncated: it has 100 bytes instead of 5,000"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "nonsense"),
    ],
    ids=["404", "damaged", "cut", "no HTTP"],
)
def test_the_next_mirror_is_tried(server: Server, tmp_path: Path, page: Serve | None, said: str) -> None:
    if page is not None:
        server.pages["/bad/b.bin"] = page
    text = refused(B, A, folder=tmp_path, mirrors=[f"{server.url}/bad"], otherwise="Something else needs no files.")
    assert f"b.bin and 1 more can't be downloaded: tried {server.url}/bad/b.bin ({said}" in text
    assert all(word in text for word in (str(tmp_path), "data.root", "data.mirrors=[URL]", "Something else"))
    assert names(tmp_path) == set()
    good = lambda: [f"{server.url}/bad", server.url]  # noqa: E731
    assert local_files([B], folder=tmp_path, mirrors=good) == [tmp_path / "b.bin"]
    assert server.asked == ["/bad/b.bin", "/bad/b.bin", "/b.bin"]


def test_a_folder_that_cannot_be_written_to_is_named(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    text = refused(B, folder=tmp_path / "file" / "raw", mirrors=[])
    assert f"Files are missing in {tmp_path / 'file' / 'raw'} and can't be written there: Not a directory" in text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    text = refused(B, folder=tmp_path, mirrors=[server.url, server.url])
    assert "can't be written there: No space left on device" in text
    assert server.asked == ["/b.bin"]  # another mirror wouldn't help
    assert names(tmp_path) == {"file"}


# Decoded once


def made() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (100, 1, 7, 5), generator=generator, dtype=torch.uint8)
    return [
        images,
        torch.randn(3, 2, generator=generator).T,
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.tensor(2.5),
    ]


def assert_made(given: list[Tensor]) -> None:
    assert [(one.dtype, one.shape) for one in given] == [(other.dtype, other.shape) for other in made()]
    assert all(torch.equal(one, other) for one, other in zip(given, made(), strict=True))


def test_what_was_decoded_is_shared_and_writes_stay_in_the_process(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> list[Tensor]:
        calls.append(1)
        return made()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(cached_tensors, tmp_path / "new", "some", key="1", make=make) for _ in range(4)]:
            assert_made(done.result())
    assert len(calls) == 1
    cached_tensors(tmp_path / "new", "some", key="1", make=make)[0].zero_()
    (tmp_path / "file").write_text("in the way")  # no cache where nothing can be written
    assert_made(cached_tensors(tmp_path / "file" / "below", "some", key="1", make=made))
    again = cached_tensors(tmp_path / "new", "some", key="1", make=make)
    assert_made(again)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in again if tensor.numel())
    assert (len(calls), names(tmp_path / "new")) == (1, {"some.tensors"})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "is damaged"),
        (lambda data: data[:-200], "is truncated"),
        (lambda data: b"\x00" + data[1:], "is damaged"),
        (lambda data: data.replace(b'"shape"', b'"shapf"'), "is damaged"),
        (lambda data: data.replace(b'"key": "1"', b'"key": "2"'), "was made from something else"),
    ],
)
def test_a_bad_file_of_tensors_is_made_again(tmp_path: Path, caplog, harm, words: str) -> None:
    cached_tensors(tmp_path, "some", key="1", make=made)
    file = tmp_path / "some.tensors"
    good = file.read_bytes()
    file.write_bytes(harm(good))
    with caplog.at_level(logging.WARNING, logger="framework"):
        assert_made(cached_tensors(tmp_path, "some", key="1", make=made))
    assert f"{file} {words}" in caplog.text
    assert file.read_bytes() == good
