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

from framework import StepOutput
from framework.checkpoint import LocalStorage
from framework.errors import CheckpointError, ConfigError, TargetError
from recipes.toy import ToyModel
from recipes.toy_model_parallel import ToyModelParallel
from tests.helpers.internals import export_model, graph_files_module, write_checkpoint
from tests.unit.config.raw import composed

HERE = "tests.unit.test_exporting"
EX = pytest.mark.exhaustive
GRAPHS = (pytest.param("onnx", marks=EX), "torch_export")
"""Default: that which is fast. One test of ONNX is unmarked, and takes five seconds to import what it needs."""
SUFFIX = {"state_dict": ".pt", "safetensors": ".safetensors", "onnx": ".onnx", "torch_export": ".pt2"}

pytestmark = pytest.mark.usefixtures("own_state")


class Tied(nn.Module):
    """Two layers with the same weight, and a buffer that is a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.second = nn.Linear(10, 10)
        self.last = nn.Linear(10, 5)
        self.second.weight = self.first.weight
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[2:4])  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x)))
        return out


class Fixed(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(8, 10))


class Branching(ToyModel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


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
        # Changing the argument must not change what is kept.
        given["x"].zero_()
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
        folder = tmp_path / "checkpoints"
        checkpoint = folder / write_checkpoint(LocalStorage(folder), state, step=7, epoch=0, metrics={}, config_text="")
        raw["checkpoint"]["path"] = str(checkpoint)
        path = tmp_path / f"file{SUFFIX[format_]}"
        answer = export_model({"config": raw, "span": span, "path": str(path)})
        assert (answer["step"], answer["model"]) == (7, type(model).__name__)
        json.dumps(answer)
        said: dict[str, list[str]] = {}
        for word, text in answer["facts"]:
            said.setdefault(word, []).append(text)
        return path, said

    return run


def computed(path: Path, x: Tensor) -> Tensor:
    """Return what plain code computes from the file alone."""
    if path.suffix == ".pt2":
        found: Tensor = torch.export.load(path).module()(x)
        return found
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


# Weights


@pytest.mark.parametrize("format_", ["state_dict", "safetensors"])
def test_weights_are_there_under_their_names(export, format_):
    doubled = ToyModel().double()
    halved = ToyModel().bfloat16()
    for model, precision in ((Tied(), "32-true"), (doubled, "64-true"), (halved, "bf16-true")):
        path, _ = export(model, format_, f"trainer.precision={precision}")
        found = torch.load(path, weights_only=True) if format_ == "state_dict" else load_file(path)
        wanted = model.state_dict()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype


def test_only_a_state_dict_keeps_other_values(export):
    path, _ = export(Counting(), "state_dict")
    assert torch.load(path, weights_only=True)["_extra_state"] == {"seen": 3}
    with pytest.raises(ConfigError, match=r"_extra_state of Counting isn't one.\nUse export\.format=state_dict"):
        export(Counting(), "safetensors")


def test_tied_weights_keep_their_names(export, tmp_path):
    found = torch.load(export(Tied(), "state_dict")[0], weights_only=True)
    assert found["first.weight"].data_ptr() == found["second.weight"].data_ptr()
    path, _ = export(Tied(), "safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    facts = {"recipe": "toy", "step": "7", "torch_version": torch.__version__}
    assert facts.items() <= metadata.items()
    (tmp_path / "plain").touch()
    # Whoever may read new files may read this one.
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("model", "keywords", "error", "said"),
    [
        (lambda: Tied(), {"target": "recipes.toy.ToyModel"}, CheckpointError, "don't fit the model"),
        (lambda: ToyModelParallel(["cpu"] * 3), {"span": 2}, CheckpointError, "don't fit the model"),
    ],
    ids=["another model", "another number of devices"],
)
def test_weights_that_do_not_fit_are_refused(export, model, keywords, error, said):
    with pytest.raises(error, match=said):
        export(model(), "state_dict", **keywords)


# Graphs


@pytest.mark.parametrize("format_", GRAPHS)
def test_a_graph_takes_batches_of_any_size(export, format_):
    model = Tied()
    path, said = export(model, format_)
    assert said["input"] == ["x: float32 [batch, 10]"]
    assert " for batches of 8 and 9" in said["compared"][0]
    for size in (1, 2, 33):
        x = torch.randn(size, 10)
        torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", GRAPHS)
def test_a_fixed_size_graph_takes_the_evaluations_size(export, format_):
    model = Fixed()
    fixed = ("export.dynamic_batch=false", "data.eval_batch_size=8")
    path, said = export(model, format_, *fixed)
    assert said["input"] == ["x: float32 [8, 10]"]
    assert " for batches of 8" in said["compared"][0]
    x = torch.randn(8, 10)
    torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", GRAPHS)
def test_a_graph_in_the_models_type(export, format_):
    model = ToyModel().bfloat16()
    path, said = export(model, format_, "trainer.precision=bf16-true", "data.eval_batch_size=2")
    assert said["input"] == ["x: bfloat16 [batch, 10]"]
    assert ("onnx.reference" in said["compared"][0]) is (format_ == "onnx")
    if format_ == "torch_export":
        x = torch.randn(3, 10, dtype=torch.bfloat16)
        torch.testing.assert_close(computed(path, x), model(x).detach())


@pytest.mark.parametrize("format_", ["onnx", pytest.param("torch_export", marks=EX)])
def test_inputs_are_what_the_task_gives_the_model(export, format_):
    model = Rich()
    path, said = export(model, format_, task="RichTask")
    assert said["input"] == ["given_x: float32 [batch, 10]", "mask: float32 [batch]", "shift: float32 [5]"]
    x = torch.randn(3, 10)
    mask = torch.tensor([0.0, 1.0, 2.0])
    shift = torch.randn(5)
    wanted = model({"x": x.clone()}, mask=mask, scale=2.0, shift=shift)
    if format_ == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = session.run(None, {"given_x": x.numpy(), "mask": mask.numpy(), "shift": shift.numpy()})
        out, classes = map(torch.from_numpy, found[:2])
    else:
        again = torch.export.load(path).module()({"x": x.clone()}, mask=mask, scale=2.0, shift=shift)
        out = again["out"]
        classes = again["classes"][0]
    torch.testing.assert_close(out, wanted["out"].detach())
    assert torch.equal(classes, wanted["classes"][0])


def test_the_first_call_becomes_the_example(export):
    path, said = export(ToyModel(), "torch_export", "trainer.precision=bf16-mixed", task="Twice")
    assert said["input"] == ["x: float32 [batch, 10]"]
    found = dict.fromkeys(("recipe", "step", "torch_version"), "")
    torch.export.load(path, extra_files=found)
    assert (found["recipe"], found["step"], found["torch_version"]) == ("toy", "7", torch.__version__)


@pytest.mark.exhaustive
def test_without_onnxruntime_the_reference_runs_the_file(export, monkeypatch):
    monkeypatch.setattr(graph_files_module, "find_spec", lambda _: None)
    path, said = export(ToyModel(), "onnx")
    assert "by onnx.reference" in said["compared"][0]
    found = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert (found["recipe"], found["step"], found["torch_version"]) == ("toy", "7", torch.__version__)


# Refused


@pytest.mark.parametrize(
    ("model", "overrides", "task", "error", "said"),
    [
        (Fixed(), (), None, TargetError, r"with batches of 8 and 9 samples[\s\S]*dynamic_batch=false"),
        (Branching(), (), None, TargetError, r"Branching can't be exported with [\s\S]*test_exporting\.py, line"),
        (ToyModel(), (), "Around", ConfigError, r"Around\.validation_step doesn't call model"),
    ],
    ids=["fixed", "branching", "around"],
)
def test_what_can_not_be_a_graph_is_refused(export, model, overrides, task, error, said):
    with pytest.raises(error, match=said):
        export(model, "torch_export", *overrides, task=task)
