"""Files that are used where they are, and downloads: verified, once, and gone when they fail. Servers are local."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import framework
from framework import DataError, Resource, local_files
from framework.data import files
from tests.helpers.command import started_python

UNPACKED = bytes(range(256)) * 40
PACKED = gzip.compress(UNPACKED, mtime=0)
OTHER = b"other" * 1000


def resource(name: str, content: bytes, unpacked: Resource | None = None) -> Resource:
    return Resource(name, hashlib.md5(content).hexdigest(), len(content), unpacked=unpacked)


A = resource("a.gz", PACKED, unpacked=resource("a", UNPACKED))
B = resource("b.bin", OTHER)
CONTENTS = {"/a.gz": PACKED, "/b.bin": OTHER}
Serve = Callable[[BaseHTTPRequestHandler], None]


def send(content: bytes, *, length: int | None = None) -> Serve:
    def serve(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return serve


class Server:
    """Serves `pages`, path → what is done with the request; 404 for others. `asked` are the paths, in order."""

    def __init__(self) -> None:
        self.pages: dict[str, Serve] = {path: send(content) for path, content in CONTENTS.items()}
        self.asked: list[str] = []
        self.release = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                page = outer.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                else:
                    page(self)

            def log_message(self, *arguments: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # so that closing it waits for them
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def hold(self, begin: bytes, *, length: int) -> Serve:
        """Sends the beginning, then nothing until the test releases it or ends."""

        def serve(handler: BaseHTTPRequestHandler) -> None:
            send(begin, length=length)(handler)
            handler.wfile.flush()
            self.release.wait(20)

        return serve

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and nothing else can begin to."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


def never() -> list[str]:
    raise AssertionError("nothing is missing, so nothing is to be downloaded")


def refused(*resources: Resource, folder: Path, mirrors: list[str], **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        local_files(resources, folder=folder, mirrors=lambda: mirrors, **options)
    return str(caught.value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Files that are there


def test_good_files_are_used_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(PACKED)
    (tmp_path / "b.bin").write_bytes(OTHER)
    assert local_files([B, A], folder=tmp_path, mirrors=never) == [tmp_path / "b.bin", tmp_path / "a.gz"]
    assert names(tmp_path) == {"a.gz", "b.bin"}


def test_an_unpacked_file_does_as_well(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(UNPACKED)
    assert local_files([A], folder=tmp_path, mirrors=never) == [tmp_path / "a"]


def test_further_folders_are_looked_in_and_the_first_need_not_exist(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(OTHER)
    folder = tmp_path / "deep" / "raw"
    assert local_files([B], folder=folder, also_in=[tmp_path], mirrors=never) == [tmp_path / "b.bin"]
    assert not folder.parent.exists()


def test_a_damaged_file_beside_a_good_one_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.gz").write_bytes(PACKED[:-1])
    (tmp_path / "a").write_bytes(UNPACKED)
    assert local_files([A], folder=tmp_path, mirrors=never) == [tmp_path / "a"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path / 'a.gz'} is truncated" in record.getMessage()
    assert f"{tmp_path / 'a'} is used instead" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (OTHER[:-1], "is truncated: it has 4,999 bytes instead of 5,000."),
        (b"", "is truncated: it has 0 bytes instead of 5,000."),
        (OTHER + b"!", "is another file: it has 5,001 bytes instead of 5,000."),
        (OTHER[:-1] + b"!", f"is damaged: its MD5 is {hashlib.md5(OTHER[:-1] + b'!').hexdigest()} instead of {B.md5}."),
        (None, "can't be read: Is a directory."),
    ],
)
def test_a_bad_file_is_named_and_kept(tmp_path: Path, content: bytes | None, fault: str) -> None:
    path = tmp_path / "b.bin"
    path.mkdir() if content is None else path.write_bytes(content)
    text = refused(B, folder=tmp_path, mirrors=[])
    assert text.splitlines() == [
        f"{path} {fault}",
        "Put a good file there, or delete this one: then it is downloaded again.",
    ]
    assert names(tmp_path) == {"b.bin"}
    assert content is None or path.read_bytes() == content


def test_every_bad_form_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"y")
    lines = refused(A, folder=tmp_path, mirrors=[]).splitlines()
    assert [line.partition(" ")[0] for line in lines[:2]] == [str(tmp_path / "a.gz"), str(tmp_path / "a")]


def test_a_file_of_unknown_size_is_held_to_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(b"x")
    assert "its MD5 is" in refused(Resource("b.bin", B.md5), folder=tmp_path, mirrors=[])
    (tmp_path / "b.bin").write_bytes(OTHER)
    assert local_files([Resource("b.bin", B.md5)], folder=tmp_path, mirrors=never) == [tmp_path / "b.bin"]


# Downloads


def test_only_what_is_missing_is_downloaded(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "raw"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(UNPACKED)
    assert local_files([A, B], folder=folder, mirrors=lambda: [f"{server.url}/"]) == [folder / "a", folder / "b.bin"]
    assert server.asked == ["/b.bin"]
    assert (folder / "b.bin").read_bytes() == OTHER
    assert names(folder) == {"a", "b.bin", files.LOCK_NAME}
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"Downloading {server.url}/b.bin: 0 %, 0.0 of 0.0 MB",
        f"Downloading {server.url}/b.bin: 100 %, 0.0 of 0.0 MB",
    ]
    assert local_files([A, B], folder=folder, mirrors=never) == [folder / "a", folder / "b.bin"]


def test_progress_is_shown_while_it_lasts(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LINE_S", 0.0)
    content = bytes(3_000_000)
    server.pages["/big"] = send(content)
    local_files([resource("big", content)], folder=tmp_path, mirrors=lambda: [server.url])
    shares = [int(share) for share in re.findall(r"(\d+) %, [\d.]+ of 3\.0 MB", capsys.readouterr().out)]
    assert (shares[0], shares[-1]) == (0, 100)
    assert shares == sorted(shares)
    assert len(set(shares)) > 3


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (None, "HTTP 404 Not Found"),
        (send(OTHER[:-1] + b"!"), "what came is damaged: its MD5 is"),
        (send(OTHER[:100], length=len(OTHER)), "what came is truncated: it has 100 bytes instead of 5,000"),
        (send(b"<html>Please log in</html>"), "what came is truncated"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "nonsense"),
    ],
    ids=["404", "damaged", "cut", "a login page", "no HTTP"],
)
def test_the_next_mirror_is_tried(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], page: Serve | None, said: str
) -> None:
    if page is not None:
        server.pages["/bad/b.bin"] = page
    mirrors = [f"{server.url}/bad", server.url]
    assert local_files([B], folder=tmp_path, mirrors=lambda: mirrors) == [tmp_path / "b.bin"]
    assert server.asked == ["/bad/b.bin", "/b.bin"]
    assert said in capsys.readouterr().out
    assert names(tmp_path) == {"b.bin", files.LOCK_NAME}


def test_without_a_network_the_answer_has_four_lines(tmp_path: Path, nobody: str) -> None:
    text = refused(A, B, folder=tmp_path, mirrors=[nobody, "nonsense"], otherwise="Something else needs no files.")
    assert text.splitlines() == [
        f"a.gz and 1 more can't be downloaded: tried {nobody}/a.gz (Connection refused); "
        "nonsense/a.gz (unknown url type: 'nonsense/a.gz').",
        f"Put the files, packed or unpacked, into {tmp_path}, or set data.root to the folder that has them.",
        "Or set data.mirrors=[URL] to another place to download from; the file's name is added to it.",
        "Something else needs no files.",
    ]
    assert names(tmp_path) == {files.LOCK_NAME}


def test_no_mirrors_means_no_downloads(tmp_path: Path) -> None:
    text = refused(B, folder=tmp_path, mirrors=[])
    assert text.startswith("b.bin can't be downloaded: data.mirrors is empty.\n")


def test_files_already_downloaded_are_kept_when_a_later_one_fails(server: Server, tmp_path: Path) -> None:
    del server.pages["/b.bin"]
    assert refused(A, B, folder=tmp_path, mirrors=[server.url]).startswith("b.bin can't be downloaded: tried ")
    assert names(tmp_path) == {"a.gz", files.LOCK_NAME}


def test_a_server_that_falls_silent_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SILENCE_S", 0.2)
    server.pages["/b.bin"] = server.hold(OTHER[:100], length=len(OTHER))
    assert "(timed out)" in refused(B, folder=tmp_path, mirrors=[server.url])
    assert names(tmp_path) == {files.LOCK_NAME}


def test_a_server_that_drips_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        send(b"", length=len(OTHER))(handler)
        try:
            while not server.release.wait(0.05):
                handler.wfile.write(b"x")
        except OSError:  # the other side has given up
            handler.close_connection = True

    monkeypatch.setattr(files, "_SILENCE_S", 0.3)
    server.pages["/b.bin"] = drip
    assert re.search(r"\(too slow: \d+ bytes so far\)", refused(B, folder=tmp_path, mirrors=[server.url]))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "raw"
    lines = refused(B, folder=folder, mirrors=[], otherwise="Something else.").splitlines()
    assert lines[0] == f"Files are missing in {folder} and can't be written there: Not a directory."
    assert "data.root" in lines[1]
    assert lines[2] == "Something else."


def test_a_full_disk_is_no_reason_to_try_another_mirror(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    text = refused(B, folder=tmp_path, mirrors=[server.url, server.url])
    assert text.startswith(f"Files are missing in {tmp_path} and can't be written there: No space left on device.")
    assert server.asked == ["/b.bin"]
    assert names(tmp_path) == {files.LOCK_NAME}


# Several at once, and one that is killed


def test_one_of_many_downloads_and_the_others_find_the_files(server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(local_files, [A, B], folder=tmp_path, mirrors=lambda: [server.url]) for _ in range(8)]
        assert [call.result() for call in calls] == [[tmp_path / "a.gz", tmp_path / "b.bin"]] * 8
    assert server.asked == ["/a.gz", "/b.bin"]


DOWNLOAD = """
import sys
from pathlib import Path
from framework import Resource, local_files
local_files([Resource("b.bin", {md5!r})], folder=Path(sys.argv[1]), mirrors=lambda: [sys.argv[2]])
"""


def test_who_waits_sees_the_other_download_and_goes_on_when_it_is_killed(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LINE_S", 0.1)
    server.pages["/held/b.bin"] = server.hold(OTHER[:3000], length=len(OTHER))
    code = DOWNLOAD.format(md5=B.md5)
    with (
        started_python("-c", code, str(tmp_path), f"{server.url}/held") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.wait_for_output("Downloading", timeout=20)
        part = tmp_path / f"b.bin{files.PART_SUFFIX}"
        waiting = pool.submit(local_files, [B], folder=tmp_path, mirrors=lambda: [server.url])
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        assert part.exists()
        assert not (tmp_path / "b.bin").exists()
        other.process.send_signal(signal.SIGKILL)
        assert waiting.result(timeout=20) == [tmp_path / "b.bin"]
    assert names(tmp_path) == {"b.bin", files.LOCK_NAME}
    assert f"Another process downloads to {tmp_path}: 0.0 MB" in capfd.readouterr().out


def test_an_interrupted_download_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.pages["/b.bin"] = server.hold(OTHER[:3000], length=len(OTHER))
    with started_python("-c", DOWNLOAD.format(md5=B.md5), str(tmp_path), server.url) as other:
        other.wait_for_output("Downloading", timeout=20)
        other.process.send_signal(signal.SIGINT)
        other.wait(timeout=20)
        assert "KeyboardInterrupt" in other.stderr()
    assert names(tmp_path) == {files.LOCK_NAME}


def test_what_a_killed_process_left_is_cleared_also_when_no_mirror_answers(tmp_path: Path, nobody: str) -> None:
    (tmp_path / f"b.bin{files.PART_SUFFIX}").write_bytes(b"half")
    refused(A, B, folder=tmp_path, mirrors=[nobody])
    assert names(tmp_path) == {files.LOCK_NAME}


def test_who_waits_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WAIT_S", 0.2)
    with (tmp_path / files.LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = refused(B, folder=tmp_path, mirrors=[])
    assert str(tmp_path / files.LOCK_NAME) in text
    assert "data.root" in text


def test_the_public_names_are_these() -> None:
    assert framework.Resource is files.Resource
    assert framework.local_files is files.local_files
    with pytest.raises(AttributeError, match="has no attribute 'nonesuch'"):
        framework.nonesuch  # noqa: B018
