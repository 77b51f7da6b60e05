"""A run directory and a place in memory that can refuse, for tests of uploading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from fsspec.implementations.memory import MemoryFileSystem

from framework.checkpoint import LocalStorage
from tests.helpers.internals import FileFacts, Manifest, RemotePlace, decode_manifest, encode_manifest

URL = "memory://bucket/toy/run"
_OPERATIONS = ("pipe_file", "put_file", "cat_file", "ls", "find", "rm_file", "rm", "makedirs")


def nothing(operation: str, path: str) -> None:
    """The hook of a bucket without faults."""


class Killed(BaseException):
    """The process is gone at this operation."""


@final
class Bucket:
    """What is at the URL. Each operation on it calls `hook` with its name and path first."""

    def __init__(self) -> None:
        self.hook: Callable[[str, str], None] = nothing

    @property
    def objects(self) -> dict[str, bytes]:
        """Return the content of each object by its path in the run; without claims."""
        found = {}
        for path, file in MemoryFileSystem.store.items():
            name = path.removeprefix("/bucket/toy/run/")
            if not name.startswith(".claims/"):
                found[name] = file.getvalue()
        return found

    @property
    def claims(self) -> list[str]:
        return sorted(Path(path).name for path in MemoryFileSystem.store if "/.claims/" in path)

    @property
    def steps(self) -> list[int]:
        """Return the steps that are complete. Fails the test if what has a manifest isn't."""
        steps = []
        objects = self.objects
        for name, content in objects.items():
            folder, _, file = name.rpartition("/")
            if file != "manifest.json":
                continue
            manifest = decode_manifest(content, source=name)
            for part, facts in manifest.files.items():
                assert FileFacts.of(objects[f"{folder}/{part}"]) == facts, f"{name} is of other files"
            steps.append(manifest.step)
        return sorted(steps)

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            MemoryFileSystem().pipe_file(f"/bucket/toy/run/{name}", content)

    def clear(self) -> None:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


def hooked(bucket: Bucket, operation: str) -> Callable[..., Any]:
    """Return a method of the file system that calls the bucket's hook first."""
    original = getattr(MemoryFileSystem, operation)

    def method(self: MemoryFileSystem, path: str, *args: Any, **keywords: Any) -> Any:
        target = args[0] if operation == "put_file" else path
        bucket.hook(operation, str(target))
        return original(self, path, *args, **keywords)

    return method


def operations() -> tuple[str, ...]:
    return _OPERATIONS


@final
class Run:
    """A run directory below a cache."""

    def __init__(self, cache: Path, records: Path, *, url: str = URL) -> None:
        """records: of a run whose config.yaml and run.json it gets."""
        self.place = RemotePlace.of_url(url, cache=str(cache))
        self.place.make_local()
        self.path = self.place.local
        for name in ("config.yaml", "run.json"):
            (self.path / name).write_bytes((records / name).read_bytes())

    def save(self, step: int, *, score: float | None = None, content: bytes = b"weights") -> None:
        """Save a checkpoint, and make it the last one."""
        files = {"model.pt": content + str(step).encode(), "training.pt": b"optimizer"}
        manifest = Manifest(
            step=step,
            epoch=0,
            metrics={} if score is None else {"val/loss": score},
            files={name: FileFacts.of(part) for name, part in files.items()},
            framework_version="1",
            torch_version="2",
        )
        files["manifest.json"] = encode_manifest(manifest).encode()
        writers = {name: lambda file, part=part: file.write(part) for name, part in files.items()}
        storage = LocalStorage(self.path / "checkpoints")
        storage.write(f"step_{step:08d}", writers)
        storage.point("last", f"step_{step:08d}")

    def delete(self, step: int) -> None:
        LocalStorage(self.path / "checkpoints").delete(f"step_{step:08d}")
