"""A sharded checkpoint of one process: what is written is read back, and nothing in it is run."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zlib
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
)

from framework.checkpoint import LocalStorage, load, read_manifest
from framework.errors import CheckpointError
from framework.strategies import FSDP
from tests.helpers.contexts import cpu_context
from tests.helpers.exact import tree_differences
from tests.helpers.internals import (
    MANIFEST_NAME,
    NOTE,
    FileFacts,
    encode_part,
    full_tensor,
    load_sharded,
    split_state,
    write_checkpoint,
)

pytestmark = pytest.mark.usefixtures("group", "own_state")
INDEX = "sharded/.metadata"
SHARD = "sharded/__0_0.distcp"


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class RowMeans(torch.optim.Optimizer):
    """Keeps a mean for each row of a parameter, and a plain number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["calls"] = state.get("calls", 0) + 1
            if parameter.ndim == 2:
                state["rows"] = state.get("rows", 0.0) + parameter.grad.mean(dim=1)


class Remembers(nn.Module):
    """A part with a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x * self.scale.float()

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def network() -> nn.Module:
    return nn.Sequential(Remembers(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def spread(optimizer: Any = torch.optim.Adam, *, steps: int = 2) -> tuple[nn.Module, Any]:
    model = FSDP(context=cpu_context(), min_num_params=3).wrap(network())
    made = optimizer(model.parameters())
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        made.step()
        made.zero_grad()
    return model, made


def save(folder: Path, model: nn.Module, optimizer: Any, *, step: int = 5) -> Path:
    shards, training = split_state(model, optimizer)
    return folder / write_checkpoint(
        LocalStorage(folder),
        {"training": training, "generators": []},
        step=step,
        epoch=0,
        metrics={},
        config_text="recipe: small\n",
        shards=shards,
    )


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return all entries of both; sharded tensors become whole ones."""
    state = dict(model.state_dict())
    for number, entry in optimizer.state_dict()["state"].items():
        state |= {f"{number} {name}": value for name, value in entry.items()}
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = full_tensor(value)
    return state


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, RowMeans])
def test_sharded_and_plain_models_read_it(tmp_path: Path, optimizer: Any) -> None:
    model, made = spread(optimizer)
    directory = save(tmp_path, model, made)
    other, other_made = spread(optimizer, steps=1)
    state = load_sharded(directory, other, other_made)
    other_made.load_state_dict(state["training"]["optimizer"])
    wanted = state_of(model, made)
    assert tree_differences(state_of(other, other_made), wanted) == []

    # Reading everything needs no group.
    dist.destroy_process_group()
    plain = network()
    plain_made = optimizer(plain.parameters())
    state = load(directory, map_location="cpu")
    assert NOTE not in state["training"]
    plain.load_state_dict(state["model"])
    plain_made.load_state_dict(state["training"]["optimizer"])
    assert tree_differences(state_of(plain, plain_made), wanted) == []


def test_a_sharded_model_reads_whole_checkpoints_or_means(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_ranks: list[dict[str, Any]] = []
    for _ in range(2):
        plain = network()
        made = torch.optim.Adam(plain.parameters())
        plain(torch.randn(5, 3)).square().sum().backward()
        made.step()
        of_ranks.append({"model": plain.state_dict(), "optimizer": made.state_dict(), "callbacks": {}})
    rest: dict[str, Any] = {"generators": []}
    one = {"model": of_ranks[1]["model"], "training": {"optimizer": of_ranks[1]["optimizer"]}, **rest}
    both = {"model": of_ranks[0]["model"], "training": {**of_ranks[0], "replicas": of_ranks[1:]}, **rest}
    how: dict[str, Any] = {"epoch": 0, "metrics": {}, "config_text": ""}

    directory = tmp_path / write_checkpoint(LocalStorage(tmp_path), one, step=5, **how)
    model, other_made = spread(steps=1)
    other_made.load_state_dict(load_sharded(directory, model, other_made)["training"]["optimizer"])
    assert tree_differences(state_of(model, other_made), state_of(plain, made)) == []
    assert caplog.records == []

    load_sharded(tmp_path / write_checkpoint(LocalStorage(tmp_path), both, step=6, **how), model, other_made)
    weights = torch.stack([each["model"]["1.weight"] for each in of_ranks])
    torch.testing.assert_close(full_tensor(model.state_dict()["1.weight"]), weights.mean(dim=0))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 ranks" in warning
    assert "mean" in warning


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, *spread())
    other = FSDP(context=cpu_context(), min_num_params=3).wrap(nn.Sequential(Remembers(), nn.Linear(3, 5)))
    with pytest.raises(CheckpointError, match=r"size mismatch for 1\.weight") as caught:
        load_sharded(directory, other)
    assert "Unexpected key(s)" in str(caught.value)


def test_torchs_own_tools_read_it(tmp_path: Path) -> None:
    model, made = spread()
    directory = save(tmp_path, model, made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(directory / "sharded", tmp_path / "plain.pt")
    read = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(read["model.1.weight"], full_tensor(model.state_dict()["1.weight"]))
    assert torch.equal(read["optimizer.1.weight.exp_avg"], full_tensor(list(made.state.values())[1]["exp_avg"]))


@pytest.mark.parametrize("name", [SHARD, INDEX])
def test_a_damaged_shard_or_index_is_named(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, *spread()) / name
    content = file.read_bytes()
    damaged = {"bytes instead of": content[:-1], "another checksum": content[:50] + b"?" + content[51:]}
    for fault, written in damaged.items():
        file.write_bytes(written)
        with pytest.raises(CheckpointError, match=rf"{name} .*{fault}"):
            load(file.parent.parent, map_location="cpu", parts=["model"])
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing"):
        load(file.parent.parent, map_location="cpu", parts=["model"])


class Evil:
    """Calls something where it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def forge(directory: Path, **contents: bytes) -> None:
    """Put other files (index, shard) in the place of those that were written, with a manifest that fits them."""
    manifest = read_manifest(directory)
    files = dict(manifest.files)
    for kind, content in contents.items():
        name = {"index": INDEX, "shard": SHARD}[kind]
        (directory / name).write_bytes(content)
        files[name] = FileFacts(len(content), f"{zlib.crc32(content):08x}")
    (directory / MANIFEST_NAME).write_text(encode_part(replace(manifest, files=files)))


def elsewhere(index: Any) -> Any:
    for place in index.storage_data.values():
        place.relative_path = "../../elsewhere"
    return index


def no_tensor(index: Any) -> Any:
    index.state_dict_metadata["model.0.scale"] = BytesStorageMetadata()
    return index


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: Evil(os.mkdir, "ran"), r"isn't an index of plain tensors \(.* isn't allowed in it\)"),
        (lambda _: Metadata({}, planner_data=Evil(os.mkdir, "ran")), "isn't an index of plain tensors"),
        (lambda _: Evil(getattr, "text", "upper"), "isn't an index of plain tensors"),
        (lambda _: Evil(getattr, MetadataIndex, "__init__"), "builtins.getattr isn't allowed in it"),
        (lambda _: Evil(getattr, _MEM_FORMAT_ENCODING, "__class__"), "isn't an index of plain tensors"),
        # `GLOBAL Metadata; (None, {"version": "changed"}); BUILD` writes into the class if it gets hold of it.
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dVversion\nVchanged\nstb.", "isn't an index of plain"),
        (b"no pickle", "isn't an index of plain tensors"),
        (elsewhere, r"it names the file \.\./\.\./elsewhere"),
        (no_tensor, r"BytesStorageMetadata isn't allowed in it"),
    ],
    ids=[
        "command",
        "command inside",
        "attribute",
        "method",
        "class",
        "class of torch",
        "no pickle",
        "other files",
        "no tensor",
    ],
)
def test_a_malicious_index_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = save(tmp_path, *spread())
    index = pickle.loads((directory / INDEX).read_bytes())
    forge(directory, index=change if isinstance(change, bytes) else pickle.dumps(change(index)))
    model, made = spread(steps=0)
    for read in (lambda: load(directory, map_location="cpu"), lambda: load_sharded(directory, model, made)):
        with pytest.raises(CheckpointError, match=said):
            read()
    assert not Path("ran").exists()
    assert Metadata({}).version is None


class PicklesEnumsByName(pickle.Pickler):
    """Pickles enums by name, as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_an_index_of_another_python_is_read(tmp_path: Path) -> None:
    directory = save(tmp_path, *spread())
    before = load(directory, map_location="cpu")
    content = io.BytesIO()
    PicklesEnumsByName(content).dump(pickle.loads((directory / INDEX).read_bytes()))
    assert b"getattr" in content.getvalue()
    forge(directory, index=content.getvalue())
    assert list(tree_differences(load(directory, map_location="cpu"), before)) == []


def test_python_objects_in_a_shard_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = save(tmp_path, *spread())
    index = pickle.loads((directory / INDEX).read_bytes())
    evil = io.BytesIO()
    torch.save(Evil(os.mkdir, "ran"), evil)
    for place in index.storage_data.values():
        place.offset = 0
        place.length = len(evil.getvalue())
    forge(directory, index=pickle.dumps(index), shard=evil.getvalue())
    with pytest.raises(CheckpointError, match=r"A shard of .* holds Python objects"):
        load(directory, map_location="cpu", parts=["model"])
    assert not Path("ran").exists()
