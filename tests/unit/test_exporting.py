"""What is exported is the model with its weights; what can't be exported is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from framework import StepOutput, exporting
from framework.checkpoint import write
from framework.errors import CheckpointError, ConfigError, RunError, TargetError
from framework.onnx_file import runtime
from recipes.toy import ToyModel
from recipes.toy_model_parallel import ToyModelParallel
from tests.unit.config.raw import composed

HERE = "tests.unit.test_exporting"
GRAPHS = (pytest.param("onnx", marks=pytest.mark.exhaustive), "torch_export")
"""Default: that which is fast; ONNX is proved by default where it differs."""
SUFFIX = {"state_dict": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}

pytestmark = pytest.mark.usefixtures("own_state")


class Tied(nn.Module):
    """Two layers with the same weight, and a buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 5)
        self.second.weight = self.first.weight
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[2:4])  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x)))
        return out


class Fixed(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(8, 10))


class Counted(ToyModel):
    """Works with any batch; torch takes its length as fixed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.ones(len(x), 1))


class Branching(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Noisy(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + torch.rand_like(out)


class Unknown(ToyModel):
    """An operation that is not in ONNX."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.special.airy_ai(x))


class Counting(ToyModel):
    """Has an extra state, which is no tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


class Rich(nn.Module):
    """Takes a nested input, a keyword of the batch, one of another size and a number; gives more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 5)

    def forward(self, given: dict[str, Tensor], *, mask: Tensor, scale: float, shift: Tensor) -> dict[str, Any]:
        out: Tensor = self.layer(given["x"]) * mask[:, None] * scale + shift
        given["x"].zero_()  # what it is given is its own
        return {"out": out, "classes": (out.argmax(1), None)}


class RichTask:
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        out = model({"x": x.clone()}, shift=torch.ones(5), scale=2.0, mask=torch.ones(len(x)))["out"]
        return StepOutput(nn.functional.mse_loss(out, y), len(x))

    validation_step = training_step


class Around(RichTask):
    """Never calls the model itself."""

    def validation_step(self, model: Any, batch: Any) -> StepOutput:
        return StepOutput(nn.functional.mse_loss(model.net2(model.net1(batch[0])), batch[1]), len(batch[0]))


class Twice(RichTask):
    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(nn.functional.mse_loss(model(batch[0]), model(-batch[0])), len(batch[0]))


class Alone(Twice):
    """Gives the model nothing of a batch."""

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(torch.ones(3, 10)).mean(), len(batch[0]))


@pytest.fixture
def export(tmp_path):
    """Exports a model as it is; gives the file and what is said of it, as word → texts."""

    def run(
        model: nn.Module,
        format_: str,
        *overrides: str,
        span: int = 1,
        target: str | None = None,
        task: str | None = None,
    ) -> tuple[Path, dict[str, list[str]]]:
        raw = composed("recipe=toy", f"export.format={format_}", *overrides)
        raw["model"] = {"_target_": target or f"{type(model).__module__}.{type(model).__name__}"}
        if task is not None:
            raw["task"] = {"_target_": f"{HERE}.{task}"}
        state: dict[str, Any] = {"model": model.state_dict(), "training": {}, "generators": []}
        checkpoint = write(tmp_path / "checkpoints", state, step=7, epoch=0, metrics={}, config_text="")
        raw["checkpoint"]["path"] = str(checkpoint)
        path = tmp_path / f"file{SUFFIX[format_]}"
        answer = exporting.answer({"config": raw, "span": span, "path": str(path)})
        assert (answer["step"], answer["model"]) == (7, type(model).__name__)
        json.dumps(answer)
        said: dict[str, list[str]] = {}
        for word, text in answer["lines"]:
            said.setdefault(word, []).append(text)
        return path, said

    return run


def computed(path: Path, x: Tensor) -> Tensor:
    """By plain code, from the file alone."""
    if path.suffix == ".pt2":
        found: Tensor = torch.export.load(path).module()(x)
        return found
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


# Weights


@pytest.mark.parametrize("format_", ["state_dict", "safetensors"])
@pytest.mark.parametrize("make", [ToyModel, Tied, lambda: ToyModel().double(), lambda: ToyModel().bfloat16()])
def test_weights_are_there_under_their_names(export, format_, make):
    model = make()
    precision = {torch.float64: "64-true", torch.bfloat16: "bf16-true"}.get(next(model.parameters()).dtype, "32-true")
    path, said = export(model, format_, f"trainer.precision={precision}")
    found = torch.load(path, weights_only=True) if format_ == "state_dict" else load_file(path)
    wanted = model.state_dict()
    assert list(found) == list(wanted) if format_ == "state_dict" else found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    assert said["read back"] == ["every tensor is the same, bit for bit"]
    make().load_state_dict(found, strict=True)


def test_what_is_no_tensor_stays_in_a_state_dict_only(export):
    path, _ = export(Counting(), "state_dict")
    assert torch.load(path, weights_only=True)["_extra_state"] == {"seen": 3}
    with pytest.raises(ConfigError, match=r"_extra_state of Counting isn't one.\nUse export\.format=state_dict"):
        export(Counting(), "safetensors")


def test_tied_weights_keep_their_names(export, tmp_path):
    path, said = export(Tied(), "state_dict")
    found = torch.load(path, weights_only=True)
    assert found["first.weight"].data_ptr() == found["second.weight"].data_ptr()
    assert "tied" not in said
    path, said = export(Tied(), "safetensors")
    assert "second.weight shares its values with first.weight" in said["tied"][0]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tied"]) == {"second.weight": "first.weight"}
    facts = {"recipe": "toy", "step": "7", "torch_version": torch.__version__}
    assert facts.items() <= metadata.items()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # readable by those who may read new files


@pytest.mark.parametrize("format_", ["state_dict", "safetensors"])
def test_a_file_that_reads_back_as_something_else_is_refused(export, monkeypatch, format_):
    real = exporting._bits
    seen = []

    def worn(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return real(tensor + (len(seen) == 4))

    monkeypatch.setattr(exporting, "_bits", worn)
    with pytest.raises(RunError, match="The file isn't what was written to it: net"):
        export(ToyModel(), format_)


@pytest.mark.parametrize(
    ("model", "keywords", "error", "said"),
    [
        (lambda: Tied(), {"target": "recipes.toy.ToyModel"}, CheckpointError, "don't fit the model ToyModel"),
        (lambda: ToyModelParallel(["cpu"] * 3), {"span": 2}, CheckpointError, r"topology\.gpus_per_process=NUMBER"),
    ],
    ids=["another model", "another number of devices"],
)
def test_weights_that_do_not_fit_are_refused(export, model, keywords, error, said):
    with pytest.raises(error, match=said):
        export(model(), "state_dict", **keywords)


def test_a_full_disk_is_reported(export, monkeypatch):
    def full(*_: Any) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunError, match=r"file\.safetensors can't be written to .*No space left"):
        export(ToyModel(), "safetensors")


# Graphs


@pytest.mark.parametrize("format_", ["onnx", "torch_export"])
def test_a_graph_takes_batches_of_any_size(export, format_):
    model = Tied()
    path, said = export(model, format_)
    assert said["input"] == ["x: float32 [batch, 10]"]
    assert " for batches of 8 and 9: " in said["compared"][0]
    for size in (1, 2, 33):
        x = torch.randn(size, 10)
        torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", GRAPHS)
def test_a_graph_of_one_size_takes_that_of_the_evaluation(export, format_):
    model = Fixed()
    fixed = ("export.dynamic_batch=false", "data.eval_batch_size=8")
    path, said = export(model, format_, *fixed)
    assert said["input"] == ["x: float32 [8, 10]"]
    assert " for a batch of 8: " in said["compared"][0]
    x = torch.randn(8, 10)
    torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", GRAPHS)
def test_a_graph_of_several_devices(export, format_):
    model = ToyModelParallel(["cpu", "cpu", "cpu"])
    path, _ = export(model, format_, span=3)
    x = torch.randn(3, 10)
    torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("format_", GRAPHS)
def test_a_graph_in_the_models_type(export, format_, precision, dtype):
    model = ToyModel().to(dtype)
    path, said = export(model, format_, f"trainer.precision={precision}", "data.eval_batch_size=2")
    name = str(dtype).removeprefix("torch.")
    assert said["input"] == [f"x: {name} [batch, 10]"]
    assert f"({name}" in said["compared"][0]
    by_reference = format_ == "onnx" and dtype is torch.bfloat16
    assert ("onnx.reference" in said["compared"][0]) is by_reference
    assert ("onnxruntime" in "".join(said.get("note", []))) is by_reference
    if not by_reference:
        x = torch.randn(3, 10, dtype=dtype)
        torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", ["onnx", "torch_export"])
def test_inputs_are_what_the_task_gives_the_model(export, format_):
    model = Rich()
    path, said = export(model, format_, task="RichTask")
    assert said["input"] == ["given_x: float32 [batch, 10]", "mask: float32 [batch]", "shift: float32 [5]"]
    x, mask, shift = torch.randn(3, 10), torch.tensor([0.0, 1.0, 2.0]), torch.randn(5)
    wanted = model({"x": x.clone()}, mask=mask, scale=2.0, shift=shift)
    if format_ == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = session.run(None, {"given_x": x.numpy(), "mask": mask.numpy(), "shift": shift.numpy()})
        out, classes = map(torch.from_numpy, found[:2])
    else:
        again = torch.export.load(path).module()({"x": x.clone()}, mask=mask, scale=2.0, shift=shift)
        out, classes = again["out"], again["classes"][0]
    torch.testing.assert_close(out, wanted["out"].detach())
    assert torch.equal(classes, wanted["classes"][0])


def test_notes_on_what_was_exported(export):
    path, said = export(ToyModel(), "torch_export", "trainer.precision=bf16-mixed", task="Twice")
    assert said["input"] == ["x: float32 [batch, 10]"]
    assert "weights and computation are float32" in said["precision"][0]
    assert "validation_step calls the model 2 times" in said["note"][0]
    found = dict.fromkeys(("recipe", "step", "torch_version"), "")
    torch.export.load(path, extra_files=found)
    assert (found["recipe"], found["step"], found["torch_version"]) == ("toy", "7", torch.__version__)


@pytest.mark.exhaustive
def test_without_onnxruntime_the_reference_runs_the_file(export, monkeypatch):
    monkeypatch.setattr("framework.onnx_file.find_spec", lambda _: None)
    path, said = export(ToyModel(), "onnx")
    assert "by onnx.reference " in said["compared"][0]
    found = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert (found["recipe"], found["step"], found["torch_version"]) == ("toy", "7", torch.__version__)


# Refused


@pytest.mark.parametrize(
    ("model", "overrides", "task", "error", "said"),
    [
        (
            Fixed(),
            (),
            None,
            TargetError,
            r"with a batch of 9 samples[\s\S]*invalid for input[\s\S]*dynamic_batch=false",
        ),
        (
            Counted(),
            (),
            None,
            ConfigError,
            r"Counted can't be exported for batches of any size: [\s\S]*dynamic_batch=false",
        ),
        (Branching(), (), None, TargetError, r"torch\.export can't export Branching: [\s\S]*test_exporting\.py, line"),
        (Branching(), ("export.dynamic_batch=false",), None, TargetError, r"can't export Branching"),
        (Noisy(), (), None, RunError, r"batch of 8 samples, is not the same as the model[\s\S]*random numbers"),
        (ToyModel(), (), "Around", ConfigError, r"Around\.validation_step doesn't call the model itself"),
        (ToyModel(), (), "Alone", ConfigError, r"No tensor that the model is given[\s\S]*export\.dynamic_batch=false"),
    ],
    ids=["fixed", "counted", "branching", "branching, fixed", "noisy", "around", "alone"],
)
def test_what_can_not_be_a_graph_is_refused(export, model, overrides, task, error, said):
    with pytest.raises(error, match=said):
        export(model, "torch_export", *overrides, task=task)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (Noisy, RunError, r"The onnx file of Noisy, run by onnxruntime [\d.]+ with a batch of 8 samples"),
        (Unknown, TargetError, r"torch\.onnx can't turn Unknown into ONNX: "),
    ],
)
def test_what_can_not_be_an_onnx_file_is_refused(export, model, error, said):
    with pytest.raises(error, match=said):
        export(model(), "onnx")


def test_wrong_onnx_files_are_refused(export, tmp_path, monkeypatch):
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(RunError, match="The ONNX file isn't valid"):
        runtime(tmp_path / "a.onnx", [])
    monkeypatch.setattr(exporting, "_ONNX_LIMIT_BYTES", 100)
    with pytest.raises(ConfigError, match=r"The weights of ToyModel are 660 bytes, and one ONNX file holds less"):
        export(ToyModel(), "onnx")
