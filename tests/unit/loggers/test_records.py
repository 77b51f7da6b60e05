"""What is written by hand here is what TensorBoard's own formats say."""

from __future__ import annotations

import math
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_ndarray

from framework.loggers.records import (
    charts_event,
    crc32c,
    record,
    scalars_event,
    start_event,
    text_event,
    version_event,
)


def test_the_checksum_is_that_of_the_rfc() -> None:
    """RFC 3720, B.4."""
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@given(st.binary(max_size=300))
def test_a_record_is_tensorboards(data: bytes) -> None:
    file = BytesIO()
    RecordWriter(file).write(data)
    assert record(data) == file.getvalue()


@given(
    st.floats(0, 2e9),
    st.integers(0, 2**62),
    st.dictionaries(st.text(max_size=200), st.floats(width=32), max_size=4),
)
def test_points_are_what_the_formats_say(wall_time: float, step: int, values: dict[str, float]) -> None:
    points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    event = Event(wall_time=wall_time, step=step, summary=Summary(value=points))
    found = Event.FromString(scalars_event(wall_time, step=step, values=values))
    assert found.SerializeToString() == event.SerializeToString()


@pytest.mark.parametrize(("value", "read"), [(1e300, math.inf), (-1e300, -math.inf), (1e-300, 0.0), (3, 3.0)])
def test_a_number_beyond_32_bits_is_rounded(value: float, read: float) -> None:
    (point,) = Event.FromString(scalars_event(1.5, step=2, values={"a": value})).summary.value
    assert point.simple_value == read


def test_a_file_begins_with_its_version_and_where_it_goes_on() -> None:
    assert Event.FromString(version_event(3.5)) == Event(wall_time=3.5, file_version="brain.Event:2")
    log = SessionLog(status=SessionLog.START)
    assert Event.FromString(start_event(3.5, step=300)) == Event(wall_time=3.5, step=300, session_log=log)


def test_texts_and_charts_are_what_torchs_writer_makes() -> None:
    from torch.utils.tensorboard.summary import custom_scalars, text

    long = "ä" * 300
    assert Event.FromString(text_event(1.0, step=7, tag="config", text=long)) == Event(
        wall_time=1.0, step=7, summary=text("config", long)
    )
    groups = {"ranks": {"own": "skew/.*", "shares": "time/.*"}, "more": {long: "x"}}
    lists = {group: {title: ["Multiline", [it]] for title, it in titles.items()} for group, titles in groups.items()}
    (value,) = Event.FromString(charts_event(1.0, charts=groups)).summary.value
    (theirs,) = custom_scalars(lists).value
    assert (value.tag, value.metadata) == (theirs.tag, theirs.metadata)
    made, expected = (Layout.FromString(make_ndarray(each.tensor).item()) for each in (value, theirs))
    assert made == expected
