"""What a rank had allocated when it ran out of memory. Here a GPU's memory is made up, as torch describes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.internals import memory_at_failure

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
TORCH = Path(torch.__file__).parent


def trainer(device: str) -> Any:
    """A trainer after a step: weights, gradients and momentum of 400 B each, and a bias that has neither."""
    layer = nn.Linear(10, 10)
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9)
    layer.bias.requires_grad = False
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    context = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(state=SimpleNamespace(bare_model=model, optimizers=[optimizer], context=context))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer whose memory is that of a GPU: 5 kB, of which an activation of mine.py takes 2 kB."""
    trained = trainer("cuda:0")
    weight = trained.state.bare_model[0].weight

    def block(size: int, **changes: Any) -> dict[str, Any]:
        return {"size": size, "address": 1, "state": "active_allocated", "frames": [], **changes}

    frames = [
        {"filename": f"{TORCH}/nn/functional.py", "line": 1, "name": "relu"},
        {"filename": "/home/me/torch/mine.py", "line": 7, "name": "forward"},
    ]
    blocks = [
        block(400, address=weight.untyped_storage().data_ptr()),
        block(2000, frames=frames),
        block(300),
        block(9000, state="inactive"),
    ]
    segments = [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": [block(8000)]}]
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (1000, 6000))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 5000)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": segments})
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"blocks"))
    return trained


def test_a_gpus_memory_is_named(on_gpu: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "memory.pickle"
    memory = memory_at_failure(ERROR, on_gpu, snapshot=snapshot)
    assert memory is not None
    assert (memory["allocated_bytes"], memory["capacity_bytes"]) == (5000, 6000)
    nameless = "activations and temporaries"
    # The bias takes 40 B.
    assert memory["by_category"] == {"weights": 440, "gradients": 400, "optimizer": 400, nameless: 3760}
    largest = [(entry["category"], entry["name"], entry["size_bytes"]) for entry in memory["largest"]]
    assert largest[0] == (nameless, "/home/me/torch/mine.py:7", 2000)
    assert set(largest[1:]) == {
        ("weights", "0", 440),
        ("gradients", "0", 400),
        ("optimizer", "0", 400),
        (nameless, "", 300),
    }
    assert snapshot.read_bytes() == b"blocks"
    assert memory["snapshot"] == str(snapshot)


def full_disk(name: str) -> None:
    Path(name).write_bytes(b"bl")
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_snapshot_alone(
    on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full_disk)
    memory = memory_at_failure(ERROR, on_gpu, snapshot=tmp_path / "memory.pickle")
    assert memory is not None
    assert (memory["snapshot"], memory["allocated_bytes"]) == (None, 5000)
    assert "can't be written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [MemoryError, KeyError("segments"), RuntimeError("CUDA error")])
def test_a_second_error_hides_no_failure(
    on_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def fail(_: Any) -> None:
        raise fault

    monkeypatch.setattr(torch.accelerator, "memory_allocated", fail)
    assert memory_at_failure(ERROR, on_gpu, snapshot=tmp_path / "memory.pickle") is None


def test_sparse_gradients_are_counted(tmp_path: Path) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([2, 3])).sum().backward()
    trained = trainer("cpu")
    trained.state.bare_model = embedding
    memory = memory_at_failure(ERROR, trained, snapshot=tmp_path / "none")
    assert memory is not None
    # Two rows, and their numbers.
    assert memory["by_category"]["gradients"] == 2 * (4 * 4 + 8)


def test_a_cpu_has_what_belongs_to_the_model(tmp_path: Path) -> None:
    wrapped = RuntimeError("mine")
    wrapped.__cause__ = ERROR
    for error in (ERROR, wrapped):
        memory = memory_at_failure(error, trainer("cpu"), snapshot=tmp_path / "none")
        assert memory is not None
        assert memory["by_category"] == {"weights": 440, "gradients": 400, "optimizer": 400}
    assert memory_at_failure(ValueError("out of luck"), trainer("cpu"), snapshot=tmp_path / "none") is None
    assert list(tmp_path.iterdir()) == []
