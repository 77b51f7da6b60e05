"""Batches of every form on their way to a device: meta stands in for copies, fake tensors for a GPU."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision import tv_tensors
from transformers import BatchEncoding

from tests.helpers.internals import PrecisionPlugin, _FromWorker, held_tensors, pinned, record_stream, to_device

pytestmark = pytest.mark.usefixtures("own_state")

CPU = torch.device("cpu")
META = torch.device("meta")
GPU = torch.device("cuda:0")
X = torch.zeros(3)


class Pair(NamedTuple):
    x: Any
    name: str = "a"


@dataclass
class Plain:
    x: Any
    name: str = "a"
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.x)
        # This attribute is not a field.
        self.mask = self.x > 0


@dataclass(frozen=True)
class Frozen:
    x: Any
    unset: Tensor = field(init=False)


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    y: int = 1


@dataclass(frozen=True)
class OwnSlots:
    __slots__ = ("x",)
    x: Any


@attrs.frozen
class Attrs:
    x: Any
    y: str = "y"


@attrs.define(slots=False)
class MutableAttrs:
    x: Any


class Moves:
    """Has a method `to`, like the graphs of PyG and the images of detectors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.options = list[Any]()

    def to(self, device: torch.device, **options: Any) -> Moves:
        moved = type(self)(self.x.to(device))
        moved.options = [options]
        return moved


class MovesWithoutOptions(Moves):
    def to(self, device: torch.device) -> Moves:  # type: ignore[override]
        return super().to(device)


class MovesInPlace:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        self.x = self.x.to(device)


class Other:
    """Holds a tensor, but doesn't know how to move it."""

    def __init__(self) -> None:
        self.x = X


class Length:
    """A quantity, whose `to` is of another kind."""

    def to(self, unit: str) -> Length:
        raise ValueError(f"no unit {unit}")


class FrozenDict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("can't be changed")


BATCHES = [
    X,
    {"x": X},
    OrderedDict(x=X),
    defaultdict(list, x=[X]),
    UserDict(x=X),
    BatchEncoding({"x": X}),
    [X, "text", None],
    (X, 3),
    deque([X], maxlen=2),
    Pair(X),
    Plain(X),
    Frozen(X),
    Slots(X),
    OwnSlots(X),
    Slots([Frozen({"x": Pair(Moves(X))})]),
    Attrs(X),
    MutableAttrs([X]),
    Moves(X),
    MovesWithoutOptions(X),
    MovesInPlace(X),
    tv_tensors.Image(torch.zeros(3, 4, 4)),
    torch.eye(3).to_sparse(),
]
JAGGED = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_moved_batch_keeps_its_type(batch: Any) -> None:
    batch = copy.deepcopy(batch) if isinstance(batch, (MovesInPlace, BatchEncoding)) else batch
    number = len(list(held_tensors(batch)))
    moved = to_device(batch, META)
    assert type(moved) is type(batch)
    assert [tensor.device for tensor in held_tensors(moved)] == [META] * number


def test_records_keep_extra_and_unset_fields() -> None:
    given = Plain(X, "b")
    moved = to_device(given, META)
    assert moved.name == "b"
    assert moved.size == 3
    assert moved.mask.device == META
    assert given.x.device == CPU
    assert not hasattr(to_device(Frozen(X), META), "unset")
    assert to_device(deque([X], maxlen=2), META).maxlen == 2
    assert to_device(BatchEncoding({"x": X}), META).x.device == META


def test_packed_sequence_sizes_stay_on_the_cpu() -> None:
    moved = to_device([pack_sequence([torch.zeros(2), torch.zeros(3)], enforce_sorted=False)], META)[0]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device, moved.batch_sizes.device) == (META, CPU)
    assert moved.sorted_indices is not None
    assert moved.sorted_indices.device == META


def test_objects_are_asked_not_to_wait() -> None:
    assert to_device(Moves(X), META).options == [{"non_blocking": True}]
    assert to_device(MovesWithoutOptions(X), META).options == [{}]


def test_what_cannot_be_moved_stays_as_it_is() -> None:
    now = datetime.datetime.now(tz=datetime.timezone.utc)
    other = Other()
    batch = ["text", b"bytes", 1, None, now, other, Length(), Moves, Plain, torch.float32]
    assert to_device(batch, META) == batch
    assert other.x.device == CPU
    assert to_device(MappingProxyType({"x": X}), META)["x"].device == META
    assert to_device(FrozenDict(x=X), META)["x"].device == META


def test_nothing_is_copied_if_nothing_moves() -> None:
    record = Attrs(1)
    assert to_device(X, CPU) is X
    assert to_device(record, META) is record


def test_an_object_that_cannot_move_is_an_error() -> None:
    class Fails(Moves):
        def to(self, device: torch.device, **options: Any) -> Moves:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        to_device([Fails(X)], META)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_all_memory_of_a_batch_outlives_the_stream(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next copy could overwrite what the model still reads."""
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _stream: recorded.append(tensor))
    record_stream(batch, None, CPU)  # type: ignore[arg-type]
    memory = [tensor.data_ptr() for tensor in held_tensors(batch)]
    assert [tensor.data_ptr() for tensor in recorded] == memory != []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_each_part_of_a_composed_tensor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _stream: recorded.append(tensor))
    matrix = torch.eye(4)
    for sparse in (matrix.to_sparse_csr(), matrix.to_sparse_csc(), matrix.to_sparse_bsr(2), matrix.to_sparse_bsc(2)):
        record_stream([sparse], None, CPU)  # type: ignore[arg-type]
    assert len(recorded) == 4 * 3
    record_stream(to_device(JAGGED, CPU), None, CPU)  # type: ignore[arg-type]
    assert any(tensor.data_ptr() == JAGGED.values().data_ptr() for tensor in recorded)
    assert all(tensor.layout is torch.strided for tensor in recorded)


def test_only_tensors_on_the_device_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects with a method `record_stream`, such as DGL's graphs, get a stream of CUDA."""

    class Graph(Moves):
        def record_stream(self, stream: object) -> None:
            recorded.append(stream)

    recorded: list[Any] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _stream: recorded.append(tensor))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"stream of {device}")
    with FakeTensorMode():
        there = torch.empty(3, device=GPU)
        record_stream([there, torch.empty(3), Graph(torch.empty(3))], None, GPU)  # type: ignore[arg-type]
    assert recorded == [there, "stream of cuda:0"]


def test_what_refers_to_itself_is_walked_once() -> None:
    graph: Any = Moves(X)
    graph.options.append(graph)
    assert list(held_tensors([graph, graph])) == [X]


# Pinned memory


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is pinned, without a device that needs it."""
    seen: list[Any] = []

    def pin_memory(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return seen


def test_all_plain_tensors_are_pinned(pins: list[Any]) -> None:
    batch = [X, {"x": X}, Slots(X), Attrs(X), BatchEncoding({"x": X}), pack_sequence([X]), "text"]
    copied = pinned(batch)
    assert [type(part) for part in copied] == [type(part) for part in batch]
    assert len(pins) == 6


def test_what_would_lose_its_type_is_not_pinned(pins: list[Any]) -> None:
    boxes = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(4, 4))
    sparse = torch.eye(3).to_sparse()
    there = Moves(torch.empty(3, device=META))
    there.pin_memory = lambda: pytest.fail("it is on the device already")  # type: ignore[attr-defined]
    batch = [boxes, sparse, there, Moves(X)]
    assert pinned(batch) == batch
    assert pins == []


def test_worker_batches_are_pinned_in_every_form(pins: list[Any]) -> None:
    """The DataLoader's thread calls `pin_memory` of the batch; without it, it would skip a dataclass."""
    item = _FromWorker(pickle.dumps(Slots(X))).pin_memory()
    assert isinstance(item, Slots)
    assert len(pins) == 1


# Precision


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (Slots({"x": X}), lambda batch: batch.x["x"]),
        (Attrs(X), lambda batch: batch.x),
        (BatchEncoding({"x": X}), lambda batch: batch["x"]),
        (pack_sequence([X]), lambda batch: batch.data),
        (Pair([X]), lambda batch: batch.x[0]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_true_precisions_convert_every_form(batch: Any, read: Callable[[Any], Tensor]) -> None:
    converted = PrecisionPlugin("bf16-true", device=CPU).convert_batch(batch)
    assert type(converted) is type(batch)
    assert read(converted).dtype == torch.bfloat16
