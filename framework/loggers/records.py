"""TensorBoard's event files as bytes: records, and the events they hold.

Its own writers make each through protocol buffers and a checksum byte by byte: that takes longer than many a step of a
small network, and a tenth of a second to import.

A record (TFRecord) is: the length of the data (8 bytes, little-endian), its masked checksum (4), the data, their masked
checksum (4). The checksum is CRC-32C (Castagnoli; RFC 3720, B.4), which Python's libraries lack.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details

Messages are as in event.proto, summary.proto and tensor.proto of tensorboard/compat/proto, and layout.proto of
tensorboard/plugins/custom_scalar; encoded as said at https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import cache

_POLYNOMIAL = 0x82F63B78  # reversed: the lowest bit is the highest power
_ALL = 0xFFFFFFFF


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return b"".join((length, struct.pack("<I", _masked(length)), event, struct.pack("<I", _masked(event))))


def version_event(wall_time: float) -> bytes:
    """The first of a file. wall_time, here as below: Unix seconds."""
    return _event(wall_time) + _field(3, b"brain.Event:2")


def start_event(wall_time: float, *, step: int) -> bytes:
    """From here on TensorBoard hides what older files have of `step` and later ones."""
    return _event(wall_time, step) + _field(7, _number(1, 1))  # SessionLog.START


def scalars_event(wall_time: float, *, step: int, values: Mapping[str, float]) -> bytes:
    """A point of each curve named, in 32 bits; what is beyond them becomes infinite."""
    points = []
    for name, value in values.items():
        try:
            points.append(_tag(name) + struct.pack("<f", value))
        except OverflowError:
            points.append(_tag(name) + struct.pack("<f", math.copysign(math.inf, value)))
    return _event(wall_time, step) + _field(5, b"".join(points))


def text_event(wall_time: float, *, step: int, tag: str, text: str) -> bytes:
    """text: in Markdown."""
    return _plugin_event(wall_time, step, tag=f"{tag}/text_summary", plugin="text", content=text.encode())


def charts_event(wall_time: float, *, charts: Mapping[str, Mapping[str, str]]) -> bytes:
    """Several curves in one chart: group → title → which, as a regular expression of their names."""
    layout = []
    for group, titles in charts.items():
        drawn = (_field(1, title.encode()) + _field(2, _field(1, names.encode())) for title, names in titles.items())
        layout.append(_field(2, _field(1, group.encode()) + b"".join(_field(2, chart) for chart in drawn)))
    return _plugin_event(
        wall_time, 0, tag="custom_scalars__config__", plugin="custom_scalars", content=b"".join(layout)
    )


def crc32c(data: bytes) -> int:
    low_table, high_table = _tables()
    low = high = 0xFFFF  # of the register: whole, it would be beyond what Python computes with fastest
    for pair in struct.unpack_from(f"<{len(data) // 2}H", data):
        index = low ^ pair
        low, high = low_table[index] ^ high, high_table[index]
    state = high << 16 | low
    if len(data) % 2:
        # Eight bits in the upper half of an index come through as eight do: the zeros below them change nothing.
        index = ((state ^ data[-1]) & 0xFF) << 8
        state = (high_table[index] << 16 | low_table[index]) ^ state >> 8
    return state ^ _ALL


def _masked(data: bytes) -> int:
    """A checksum that differs from the data's own: data may hold checksums."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & _ALL


@cache
def _tables() -> tuple[list[int], list[int]]:
    """Both halves of what 16 bits become when they have gone through the register, with nothing else in it."""
    import numpy as np

    one, polynomial = np.uint32(1), np.uint32(_POLYNOMIAL)
    states = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        states = (states >> one) ^ ((states & one) * polynomial)
    return (states & 0xFFFF).tolist(), (states >> 16).tolist()


def _event(wall_time: float, step: int = 0) -> bytes:
    """Event.wall_time and Event.step, which is left out where it is 0."""
    return struct.pack("<Bd", 0x09, wall_time) + (_number(2, step) if step else b"")


def _plugin_event(wall_time: float, step: int, *, tag: str, plugin: str, content: bytes) -> bytes:
    """A summary of one value: a tensor of one string, `content`, for a plugin of TensorBoard's."""
    tensor = _number(1, 7) + _field(2, _field(2, _number(1, 1))) + _field(8, content)  # DT_STRING, of shape (1,)
    metadata = _field(1, _field(1, plugin.encode()))
    value = _field(1, tag.encode()) + _field(8, tensor) + _field(9, metadata)
    return _event(wall_time, step) + _field(5, _field(1, value))


@cache
def _tag(name: str) -> bytes:
    """Summary.value but for its last four bytes, which are those of the number."""
    point = _field(1, name.encode()) + b"\x15"
    return b"\x0a" + _varint(len(point) + 4) + point


def _field(number: int, content: bytes) -> bytes:
    """A text, or a message encoded before."""
    return b"".join((_varint(number << 3 | 2), _varint(len(content)), content))


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(number: int) -> bytes:
    """Seven bits in a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
