"""Checkpoints in another place than the local disk: a storage is one class with four methods."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

import pytest

from framework.checkpoint import CheckpointStorage, load_from
from framework.errors import CheckpointError
from tests.helpers.exact import tree_differences
from tests.helpers.internals import CheckpointManager
from tests.unit.checkpoint.states import checkpoint_settings, small_state


def no_fault(file: str) -> None:
    """The storage works."""


class Memory(CheckpointStorage):
    """A bucket: file by file, without renaming and without symlinks."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        # Raises if the place is out of reach, or a write is killed. Called before each file is written.
        self.before_file: Callable[[str], None] = no_fault

    def write(self, checkpoint: str, files: Mapping[str, Callable[[Any], object]]) -> None:
        self.files[checkpoint] = {}
        for name, write_content in files.items():
            self.before_file(name)
            buffer = io.BytesIO()
            write_content(buffer)
            self.files[checkpoint][name] = buffer.getvalue()

    def read(self, checkpoint: str, file: str) -> BinaryIO:
        try:
            return io.BytesIO(self.files[checkpoint][file])
        except KeyError:
            raise FileNotFoundError(file) from None

    def list(self) -> Collection[str]:
        return [*self.files]

    def delete(self, checkpoint: str) -> None:
        del self.files[checkpoint]


def manager_in(storage: CheckpointStorage, *, warn: Any = pytest.fail, **changes: Any) -> CheckpointManager:
    settings = checkpoint_settings(**changes)
    return CheckpointManager(settings, storage, config_text="a: 1\n", is_writer=True, warn=warn)


def save(manager: CheckpointManager, step: int, loss: float) -> None:
    manager.save(small_state(float(step)), step=step, epoch=0, metrics={"val/loss": loss})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_saves_and_resumes_in_memory(asynchronous: bool) -> None:
    storage = Memory()
    manager = manager_in(storage, asynchronous=asynchronous)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
        save(manager, step, loss)
    assert manager.wait() is None
    manager.close()
    assert [*storage.complete_steps()] == [2, 4], "the best and the newest"
    assert storage.pointers() == {"last": "step_00000004", "best": "step_00000002"}
    assert manager.best is not None
    assert manager.best.metrics == {"val/loss": 0.1}

    resumed = manager_in(storage)
    state = load_from(storage, storage.pointers()["last"], map_location="cpu")
    assert tree_differences(state, small_state(4.0) | {"generators": state["generators"]}) == []
    resumed.resume_from(2)
    assert storage.pointers()["best"] == "step_00000002"
    save(resumed, 3, 0.05)
    assert [*storage.complete_steps()] == [3], "step 4 was abandoned, and step 2 is worse"
    assert storage.pointers() == {"last": "step_00000003", "best": "step_00000003"}
    assert storage.read("step_00000003", "config.yaml").read() == b"a: 1\n"


def test_damage_is_found_in_any_storage() -> None:
    storage = Memory()
    save(manager_in(storage, save_last_k=2), 1, 0.5)
    content = storage.files["step_00000001"]["model.pt"]
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    storage.files["step_00000001"]["model.pt"] = bytes(damaged)
    assert storage.find_damage("step_00000001") == "model.pt has another checksum than when it was written"
    with pytest.raises(CheckpointError, match=r"The checkpoint Memory/step_00000001 is damaged: model.pt has another"):
        load_from(storage, "step_00000001", map_location="cpu")
    storage.files["step_00000001"]["model.pt"] = content[:-1]
    assert [*storage.complete_steps()] == []
    del storage.files["step_00000001"]["manifest.json"]
    assert storage.find_damage("step_00000001") == "it has no manifest.json"


class KilledError(BaseException):
    """Stands for a kill: nothing handles it."""


def test_a_pointer_killed_while_written_is_missing() -> None:
    storage = Memory()
    manager = manager_in(storage, monitor=None)

    def kill(name: str) -> None:
        if name == "checkpoint":
            raise KilledError

    storage.before_file = kill
    with pytest.raises(KilledError):
        save(manager, 1, 0.5)
    assert storage.pointers() == {}
    storage.before_file = no_fault
    resumed = manager_in(storage, monitor=None)
    save(resumed, 2, 0.1)
    assert storage.pointers() == {"last": "step_00000002"}


@pytest.mark.parametrize("file", ["model.pt", "training.pt", "generators.pt", "config.yaml", "manifest.json"])
def test_what_a_killed_save_leaves_is_removed(file: str) -> None:
    storage = Memory()
    manager = manager_in(storage, monitor=None)
    save(manager, 1, 0.5)

    def kill(name: str) -> None:
        if name == file:
            raise KilledError

    storage.before_file = kill
    with pytest.raises(KilledError):
        save(manager, 2, 0.1)
    assert "step_00000002" in storage.list()
    assert [*storage.complete_steps()] == [1]
    assert storage.pointers() == {"last": "step_00000001"}
    manager_in(storage)
    assert {*storage.list()} == {"step_00000001", "last"}


def test_a_refusing_storage_is_reported_and_training_continues() -> None:
    storage = Memory()
    warnings: list[str] = []
    manager = manager_in(storage, monitor=None, warn=warnings.append)
    save(manager, 1, 0.5)

    def refuse(_: str) -> None:
        raise TimeoutError("no answer from the bucket")

    storage.before_file = refuse
    save(manager, 2, 0.1)
    failure = manager.wait()
    assert failure is not None
    assert failure.startswith("The checkpoint of step 2 can't be written to Memory: no answer from the bucket")
    assert failure.endswith("The last good checkpoint is step_00000001.")
    assert len(warnings) == 1
    storage.before_file = no_fault
    save(manager, 3, 0.2)
    assert manager.wait() is None
    assert [*storage.complete_steps()] == [3]


class ManifestFirst(Memory):
    def write(self, checkpoint: str, files: Mapping[str, Callable[[Any], object]]) -> None:
        super().write(checkpoint, dict(list(files.items())[::-1]))


def test_a_manifest_that_is_not_written_last_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"must write the manifest last, and .*model\.pt"):
        save(manager_in(ManifestFirst()), 1, 0.5)


def test_a_sharded_model_needs_a_local_storage() -> None:
    group: Any = object()
    with pytest.raises(CheckpointError, match="Use a LocalStorage"):
        CheckpointManager(
            checkpoint_settings(), Memory(), config_text="", is_writer=True, warn=pytest.fail, shard_group=group
        )


def test_a_storage_without_a_method_is_refused() -> None:
    class Half(CheckpointStorage):
        def list(self) -> Collection[str]:
            return []

    half: Any = Half
    with pytest.raises(TypeError, match=r"delete.*read.*write"):
        half()
