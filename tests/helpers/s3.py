"""An S3 server for tests: moto's, in a process of its own, with faults on demand.

s3fs and botocore find it by the environment variables of `S3.env`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

import fsspec

from tests.helpers import processes
from tests.helpers.command import ROOT

_numbers = itertools.count()


@final
class S3:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], *, host: str) -> None:
        self._process = process
        self.endpoint = f"http://{host}:{_line(process.stdout)}"

    @property
    def env(self) -> Mapping[str, str]:
        """The environment in which programs use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            # s3fs repeats requests, too.
            "AWS_MAX_ATTEMPTS": "2",
            # No search for credentials elsewhere.
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def filesystem(self) -> fsspec.AbstractFileSystem:
        """s3fs, for what a test does to the bucket itself. It lists nothing from memory."""
        return fsspec.filesystem(
            "s3",
            key="key-of-the-test",
            secret="secret-of-the-test",
            endpoint_url=self.endpoint,
            use_listings_cache=False,
        )

    def new_bucket(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"bucket{next(_numbers)}"
        self.filesystem().mkdir(name)
        return name

    def upload(self, run_dir: Path, path: str) -> None:
        """Put a run into the bucket as the mirror does: its pointers are objects, and hidden files stay."""
        files = self.filesystem()
        for file in run_dir.rglob("*"):
            name = file.relative_to(run_dir)
            if file.is_symlink():
                files.pipe_file(f"{path}/{name}", str(file.readlink()).encode())
            elif file.is_file() and not any(part.startswith(".") for part in name.parts):
                files.put_file(str(file), f"{path}/{name}")

    def flip_bit(self, path: str) -> None:
        """Damage an object, in its middle; its size stays."""
        content = bytearray(self.filesystem().cat_file(path))
        content[len(content) // 2] ^= 1
        self.filesystem().pipe_file(path, bytes(content))

    @contextmanager
    def fault(self, **fault: Any) -> Iterator[None]:
        """Have requests fail while this is entered; `s3_server.Fault` has the keywords."""
        self.set_fault(**fault)
        try:
            yield
        finally:
            self.set_fault(count=0)

    def set_fault(self, **fault: Any) -> None:
        """Have requests fail from now on; `count=0` ends that."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fault) + "\n")
        self._process.stdin.flush()
        assert _line(self._process.stdout) == "ok"


@contextmanager
def s3_server(*, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> Iterator[S3]:
    """A server, until the block ends.

    Args:
        host: the address at which it listens.
        prefix: what its command begins with, such as that of a network namespace.
    """
    command = [*prefix, sys.executable, "-m", "tests.helpers.s3_server", host]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    processes.LONG_LIVED.add(process.pid)
    # It ends when its input is closed, which this does.
    with process:
        yield S3(process, host=host)
    processes.LONG_LIVED.discard(process.pid)


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline().strip()
    assert line, "the S3 server has ended"
    return line
