"""URLs, and the local folders below `path.cache` that stand for them: s3://bucket/team is CACHE/s3/bucket/team.

The folder holds run directories as any `path.outputs` does, so that all other code works on local paths. The whole
configuration keeps the URL as it was typed; `outputs_folder` translates it where a folder is needed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.config.schema import PathConfig
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, RequestError
from framework.system.formatting import display_path
from framework.system.private_folder import user_cache
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# In path.cache: says that the folders beside it are protocols, and the path below each is that of a URL.
_MARKER = ".remote_runs"
# In a run directory that was fetched: which object each of its files is of.
FETCHED = ".fetched.json"
_SEPARATOR = "://"
# fsspec's names for folders of this machine.
_LOCAL_PROTOCOLS = ("file", "local")
# What to install for a protocol, where fsspec's own advice doesn't name the package.
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}


@dataclass(frozen=True)
class RemotePlace:
    """A URL, and the local folder that stands for it."""

    url: str
    # The folder of all local sides.
    cache: Path

    @staticmethod
    def of_url(url: str, *, cache: str | None) -> RemotePlace:
        """Return the place of a URL. Raises ConfigError if it can't be one.

        cache: `path.cache`.
        """
        url = url.rstrip("/")
        _check_url(url)
        return RemotePlace(url, cache_folder(cache))

    @staticmethod
    def of_local(folder: Path) -> RemotePlace | None:
        """Return the place that a local folder stands for; None if it lies in no cache."""
        folder = folder.expanduser().absolute()
        for cache in folder.parents:
            if os.path.isfile(cache / _MARKER):  # noqa: PTH113  # it raises nothing
                protocol, *parts = folder.relative_to(cache).parts
                return RemotePlace(f"{protocol}{_SEPARATOR}{'/'.join(parts)}", cache)
        return None

    @staticmethod
    def of_run(run_dir: Path, *, outputs: str) -> RemotePlace | None:
        """Return the place of a run that node 0 has made, on a node with a disk of its own; None if it has no URL.

        outputs: `path.outputs`.
        """
        if not is_url(outputs):
            return None
        outputs = outputs.rstrip("/")
        cache, folder, name = str(run_dir).partition(f"/{outputs.replace(_SEPARATOR, '/', 1)}/")
        return RemotePlace(f"{outputs}/{name}", Path(cache)) if folder else None

    @property
    def local(self) -> Path:
        """Return the folder that stands for the URL; it need not exist."""
        return self.cache / self.url.replace(_SEPARATOR, "/", 1)

    def make_local(self) -> None:
        """Make the local folder if it isn't there. Raises RequestError if it can't be made."""
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            (self.cache / _MARKER).touch()
        except OSError as error:
            raise RequestError(
                f"The local folder {self.local} for {self.url} can't be made: {error.strerror or error}.\n"
                "Choose a writable folder with path.cache=FOLDER."
            ) from error

    def below(self, *names: str) -> RemotePlace:
        """Return the place of a folder or file below this one."""
        return RemotePlace("/".join([self.url, *names]), self.cache)

    def filesystem(self) -> AbstractFileSystem:
        """Return fsspec's file system of the URL. Raises ConfigError if its package isn't installed."""
        import fsspec

        check_protocol(self.url)
        filesystem, _ = fsspec.core.url_to_fs(self.url)
        return filesystem

    @property
    def path(self) -> str:
        """Return the path in the file system, such as bucket/team of s3://bucket/team."""
        import fsspec

        path: str = fsspec.get_filesystem_class(self.url.partition(_SEPARATOR)[0])._strip_protocol(self.url)
        return path


def is_url(text: object) -> bool:
    """Return True for a URL, such as s3://bucket/team, in place of a path."""
    return isinstance(text, str) and _SEPARATOR in text


def outputs_folder(path: PathConfig) -> Path:
    """Return the local folder of all run directories: `path.outputs`, or the folder that stands for its URL.

    Raises ConfigError for a URL that can't be used.
    """
    if is_url(path.outputs):
        return RemotePlace.of_url(path.outputs, cache=path.cache).local
    return Path(path.outputs).expanduser().absolute()


def display_place(path: Path) -> str:
    """Return the URL that a local path stands for, which can be typed on any machine; of other paths `display_path`."""
    place = RemotePlace.of_local(path)
    return display_path(path) if place is None else place.url


def is_copy(run_dir: Path) -> bool:
    """Return True if a run directory was fetched, and not trained here since."""
    return (run_dir / FETCHED).exists()


def note_trained_here(run_dir: RunDir) -> None:
    """Note that a run is trained here from now on: if it was fetched, it is no copy any more."""
    (run_dir.path / FETCHED).unlink(missing_ok=True)


def cache_folder(cache: str | None) -> Path:
    """Return the folder of the local sides of all URLs. cache: `path.cache`; null: in the user's folder of caches."""
    if cache is not None:
        return Path(cache).expanduser().absolute()
    return user_cache() / "outputs"


def check_protocol(url: str) -> None:
    """Raise ConfigError if fsspec doesn't know the protocol of a URL, or the package for it isn't installed."""
    from fsspec.registry import get_filesystem_class, known_implementations

    protocol = url.partition(_SEPARATOR)[0]
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        hint = did_you_mean(nearest(protocol, known_implementations))
        raise ConfigError(
            f"{url}: fsspec knows no protocol {protocol}.{hint} Use a folder, or a URL such as s3://BUCKET/FOLDER, "
            "gs://BUCKET/FOLDER, az://CONTAINER/FOLDER or sftp://HOST/FOLDER."
        ) from error
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        advice = f"pip install {package}" if package is not None else str(error)
        raise ConfigError(f"{url} needs a package that isn't installed: {advice}") from error


def reason_of(error: Exception) -> str:
    """Return why a file system refused, in one line. Its own errors are of many classes."""
    text: Any = None
    if isinstance(error, OSError):
        text = error.strerror
    text = str(text or error).strip() or type(error).__name__
    return " ".join(text.split())


def _check_url(url: str) -> None:
    """Raise ConfigError for a URL that no folder can stand for."""
    protocol, _, path = url.partition(_SEPARATOR)
    if protocol in _LOCAL_PROTOCOLS:
        raise ConfigError(f"{url} is a folder of this machine. Type its path: /{path.lstrip('/')}")
    if "::" in url:
        raise ConfigError(f"{url}: a chain of file systems can't be used. Type one URL, such as s3://BUCKET/FOLDER.")
    user, at, _ = path.partition("/")[0].rpartition("@")
    if at and ":" in user:
        # It would be written to config.yaml, to logs and into the name of the folder.
        name = user.partition(":")[0]
        raise ConfigError(
            f"{protocol}{_SEPARATOR}{name}:…@…: a URL must not hold a password. Leave it out; fsspec reads it from "
            f"FSSPEC_{protocol.upper()}_PASSWORD or ~/.config/fsspec."
        )
    parts = path.split("/")
    if not protocol or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"{url}: can't be used. A URL is PROTOCOL://NAME/FOLDER, such as s3://BUCKET/FOLDER, without empty parts, "
            ". or .."
        )
