"""Mirror a run to its URL while it is trained: a thread of the command's process uploads what has changed. No torch.

The URL may be out of reach, the credentials expired or the bucket full: that neither ends nor slows training. It is
reported once, and again when uploading works; at its end the command goes on uploading as long as that makes progress.
Read `mirrored`, then `Mirror._run`; what is uploaded, and in which order, is in upload.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import final

from framework.config.overrides import path_argument
from framework.errors import FrameworkError, RequestError
from framework.remote.place import RemotePlace, reason_of
from framework.remote.upload import Left, Uploader
from framework.system.formatting import display_path, format_bytes, format_count

_NAMES_SHOWN = 4
_POLL_S = 0.1


@final
@dataclass(frozen=True)
class Pace:
    """How often the mirror does what, in seconds."""

    # Between two looks at the run directory.
    look_s: float = 5.0
    # Before an upload that failed is tried again; doubled each time, up to the second value.
    retry_s: float = 1.0
    max_retry_s: float = 30.0
    # At the start of a command, how long to wait for the claim of a run.
    claim_s: float = 20.0
    # At the end of a command, how long to go on without any progress.
    give_up_s: float = 60.0
    # After this time, it is printed that the command is still uploading.
    quiet_s: float = 3.0


@contextmanager
def mirrored(
    place: RemotePlace, *, say: Callable[[str], None], only: Collection[str] = (), pace: Pace = Pace()
) -> Iterator[Mirror]:
    """While this is entered, mirror the directory of a run or sweep to its URL; at the end upload what is left.

    Raises ClaimedError, a RequestError, before anything else if another machine has resumed the run. If the block
    raises RequestError, a run that this command has begun is removed from the URL, too.

    Args:
        say: called with each message, maybe from the thread.
        only: patterns of paths, for a node that uploads its own logs; empty: all.
    """
    mirror = Mirror(place, only=only, pace=pace, say=say)
    mirror.start()
    try:
        yield mirror
    except RequestError:
        mirror.refuse()
        raise
    except KeyboardInterrupt:
        mirror.finish(waits=False)
        raise
    except BaseException:
        mirror.finish(waits=True)
        raise
    mirror.finish(waits=True)


@final
class Mirror:
    """Uploads a directory in a thread from `start` to `finish`."""

    def __init__(self, place: RemotePlace, *, only: Collection[str], pace: Pace, say: Callable[[str], None]) -> None:
        self._place = place
        self._pace = pace
        self._say = say
        self._uploader = Uploader(place, only=only, on_progress=self._note_progress)
        self._claims = not only
        # Nothing is left behind if the process ends while a call hangs: the thread is a daemon.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._is_claimed = threading.Event()
        # Set when what is left is to be uploaded, and when nothing is.
        self._ending = threading.Event()
        self._stopped = threading.Event()
        self._progress_s = time.monotonic()
        # Why uploading fails at present; None if it doesn't.
        self._trouble: str | None = None
        # Why nothing is uploaded any more.
        self._final: FrameworkError | None = None
        # True once it has ended and all of the directory is at the URL.
        self.is_complete = False

    @property
    def url(self) -> str:
        return self._place.url

    def start(self) -> None:
        """Begin to mirror. Raises RequestError if the run can't be claimed; if the URL is out of reach, it is later."""
        self._thread.start()
        try:
            self._is_claimed.wait(self._pace.claim_s)
        except KeyboardInterrupt:
            self._stopped.set()
            raise
        if self._final is not None:
            raise self._final

    def finish(self, *, waits: bool) -> None:
        """End the mirror, and print what isn't uploaded.

        Args:
            waits: go on uploading until all is, or there is no progress for some time. Ctrl-C ends that.
        """
        self._note_progress()
        self._ending.set()
        # The run itself has ended as it should.
        with suppress(KeyboardInterrupt):
            self._wait_for_thread(give_up_s=self._pace.give_up_s if waits else 0.0)
        self._stopped.set()
        left = self._uploader.left()
        self.is_complete = not left.names
        if left.names and self._final is None:
            self._say(_left_message(self._place, left, trouble=self._trouble))

    def refuse(self) -> None:
        """End the mirror of a run that is refused. One that this command has begun is removed from the URL."""
        if self._uploader.has_claim and not self._uploader.is_new:
            self.finish(waits=True)
            return
        self._stopped.set()
        self._ending.set()
        self._thread.join(self._pace.claim_s)
        if not self._uploader.has_claim:
            return
        try:
            self._uploader.remove()
        except Exception as error:  # each file system has its own
            self._say(f"{self._place.url} can't be removed: {reason_of(error)}")

    def _wait_for_thread(self, *, give_up_s: float) -> None:
        begun_s = time.monotonic()
        is_told = False
        while self._thread.is_alive():
            now_s = time.monotonic()
            if now_s - self._progress_s >= give_up_s:
                return
            if not is_told and now_s - begun_s >= self._pace.quiet_s:
                left = self._uploader.left()
                self._say(f"Uploading what is left to {self._place.url}: {_amount(left)}. Ctrl-C ends this.")
                is_told = True
            self._thread.join(_POLL_S)

    def _note_progress(self) -> None:
        self._progress_s = time.monotonic()

    # In the thread

    def _run(self) -> None:
        retry_s = self._pace.retry_s
        while not self._stopped.is_set():
            # What is written from here on needs another pass.
            is_last = self._ending.is_set()
            try:
                if self._trouble is not None:
                    self._uploader.connect()
                if self._claims and not self._is_claimed.is_set():
                    self._uploader.hold_claim()
                    self._is_claimed.set()
                may_be_more = self._uploader.upload(at_once=is_last)
            except FrameworkError as error:
                self._give_up(error)
                return
            except Exception as error:  # each file system has its own
                if isinstance(error, FileNotFoundError) and not self._is_claimed.is_set():
                    advice = "Create the bucket, or correct path.outputs."
                    self._give_up(RequestError(f"{self._place.url}: {reason_of(error)}. {advice}"))
                    return
                self._note_trouble(reason_of(error))
                waiting = self._stopped if is_last else self._ending
                waiting.wait(retry_s)
                retry_s = min(2 * retry_s, self._pace.max_retry_s)
                continue
            retry_s = self._pace.retry_s
            self._note_works()
            if may_be_more:
                continue
            if is_last:
                return
            self._ending.wait(self._pace.look_s)

    def _give_up(self, error: FrameworkError) -> None:
        self._final = error
        if self._is_claimed.is_set():
            self._say(f"Nothing more is uploaded to {self._place.url}: {error}. Training continues here.")
        self._is_claimed.set()

    def _note_trouble(self, reason: str) -> None:
        self._is_claimed.set()
        if self._trouble is None:
            self._say(f"{self._place.url} can't be written: {reason}. It is tried again.")
        self._trouble = reason

    def _note_works(self) -> None:
        if self._trouble is not None:
            self._say(f"{self._place.url} is writable again.")
        self._trouble = None


def _left_message(place: RemotePlace, left: Left, *, trouble: str | None) -> str:
    names = ", ".join(left.names[:_NAMES_SHOWN])
    if len(left.names) > _NAMES_SHOWN:
        names += ", …"
    reason = f": {trouble}" if trouble is not None else ""
    run = path_argument("runs", place.local)
    return (
        f"Not everything is at {place.url}{reason}\n"
        f"{_amount(left)} are only in {display_path(place.local)}: {names}\n"
        f"Resume it on this machine, or upload the rest: python -m framework job=upload {run}"
    )


def _amount(left: Left) -> str:
    return f"{format_count(len(left.names), 'file')} ({format_bytes(left.size_bytes)})"
