"""Images of a run as PNG files: encoded on a thread beside the training, each once for all loggers."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from framework.loggers.media import DrawnFigure, image_of, picture_from, pixels_of
from framework.media import Drawing, Figure, Image

T = TypeVar("T")

# Images that wait as pixels. If more do, the training waits, too.
_CAPACITY = 16


@final
class Encoder:
    """Makes calls one after another on a thread, which is started by the first one. Made for each run."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._room = threading.BoundedSemaphore(_CAPACITY)

    def prepared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values to log with images, and figures, whose PNG files loggers share."""
        return {name: self._prepared(value) for name, value in values.items()}

    def _prepared(self, value: Any) -> Any:
        if isinstance(value, Image):
            return Picture(value, self)
        if isinstance(value, Figure):
            drawing = Drawing(partial(image_of, value.figure))
            return DrawnFigure(value.figure, Picture(drawing, self))
        if isinstance(value, (list, tuple)) and all(isinstance(item, Image) for item in value):
            return [Picture(image, self) for image in value]
        return value

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call. Waits while too many are queued."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self._room.acquire()
        future = self._executor.submit(call)
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Wait until all calls are made. Later images start another thread."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


@final
class Picture(Image):
    """An image of a run's log, which its loggers share."""

    def __init__(self, image: Image, encoder: Encoder) -> None:
        vars(self).update(caption=image.caption, _image=image, _encoder=encoder)

    @property
    def pixels(self) -> Any:
        return vars(self)["_image"].pixels

    @cached_property
    def png(self) -> Future[bytes]:
        """The PNG file, which the thread makes. The first access copies the pixels, and waits for their device."""
        encoder: Encoder = vars(self)["_encoder"]
        return encoder.submit(partial(_encode, pixels_of(self), self.caption))

    def with_png(self, use: Callable[[bytes], T]) -> Future[T]:
        """Have the thread call `use` with the PNG file."""
        png = self.png
        encoder: Encoder = vars(self)["_encoder"]
        return encoder.submit(lambda: use(png.result()))


def with_png(image: Image, use: Callable[[bytes], T]) -> Future[T]:
    """Call `use` with the image as a PNG file: on the encoder's thread, or at once for an image without one."""
    if isinstance(image, Picture):
        return image.with_png(use)
    done: Future[T] = Future()
    done.set_result(use(_encode(pixels_of(image), image.caption)))
    return done


def _encode(pixels_HWC: npt.NDArray[np.uint8], caption: str) -> bytes:
    """Return a PNG file; the caption is its text field `Description`."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    if caption:
        info.add_itxt("Description", caption)
    file = io.BytesIO()
    picture_from(pixels_HWC).save(file, format="PNG", pnginfo=info)
    return file.getvalue()
