"""`job=export`: one plain file of a trained model, read back by code that knows nothing of this framework."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.digits import ConvNet, digits
from tests.helpers import results
from tests.helpers.command import started_framework
from tests.helpers.internals import compose
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

TRAIN = ("logger=none", "callbacks=ema", "trainer.limit_train_batches=3", "trainer.max_epochs=2")


@pytest.fixture(scope="module")
def trained(shared_run) -> Path:
    """Averages its weights: those to evaluate are others than those trained last."""
    run: Path = shared_run("recipe=digits", "callbacks.ema.decay=0.5", *TRAIN)
    return run


@pytest.fixture
def export(fork_server, tmp_path, monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """The command in a folder of its own: its status, what it prints and what it says on stderr."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*overrides: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = compose.main(["job=export", *trusting(overrides)], fork_server=fork_server)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return run


def names(folder: Path | None = None) -> set[str]:
    return {path.name for path in (folder or Path.cwd()).iterdir()}


def plain(model: nn.Module, run_dir: Path, which: str = "last") -> nn.Module:
    """The model that job=eval evaluates."""
    model.load_state_dict(results.weights(run_dir, which))
    return model.eval()


def by_onnxruntime(file: Path) -> Callable[[Tensor], Tensor]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


@pytest.mark.parametrize(
    ("format_", "suffix"), [("state_dict", "pt"), pytest.param(*("safetensors",) * 2, marks=pytest.mark.exhaustive)]
)
def test_weights_are_those_that_are_evaluated(export, trained, tmp_path, format_, suffix):
    """A copy of the checkpoint outside its run gives the same weights."""
    away = shutil.copytree((trained / "checkpoints" / "last").resolve(), tmp_path / "away")
    status, out, err = export(f"checkpoint.path={away}", f"export.format={format_}")
    assert (status, err) == (0, "")
    assert names() == {f"digits_6.{suffix}"}
    file = Path(f"digits_6.{suffix}")
    for fact in ("Exported ConvNet of digits after step 6", format_, f"{file}, {file.stat().st_size:,} bytes"):
        assert fact in out
    found = torch.load(file, weights_only=True) if suffix == "pt" else load_file(file)
    wanted = results.weights(trained)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("format_", "suffix"), [("onnx", "onnx"), ("torch_export", "pt2")])
def test_a_graph_computes_what_the_evaluated_model_does(export, trained, format_, suffix):
    best = f"checkpoint.path={trained}/best"
    status, out, err = export(best, f"export.format={format_}", f"export.output=mine.{suffix}")
    assert (status, err) == (0, "")
    assert names() == {f"mine.{suffix}"}
    assert "batches of 8 and 9" in out
    file = Path(f"mine.{suffix}")
    again = by_onnxruntime(file) if suffix == "onnx" else torch.export.load(file).module()
    images = digits().test[:20][0]  # type: ignore[index]
    model = plain(ConvNet(), trained, "best")
    with torch.no_grad():
        for batch in (images, images[:1]):
            torch.testing.assert_close(again(batch), model(batch), atol=1e-5, rtol=1e-4)


# Refused, and nothing is left


def test_existing_outputs_and_other_models_are_refused(export, trained):
    Path("there.pt").write_text("of mine")
    other = ("model._target_=recipes.toy.ToyModel", "~model.dropout", "~model.conv_dropout")
    for overrides, said in (
        (("export.output=there.pt",), "there.pt exists already."),
        (other, "don't fit the model"),
    ):
        status, out, err = export(f"checkpoint.path={trained}", *overrides)
        assert (status, out) == (2, "")
        assert said in err
        assert names() == {"there.pt"}
        assert Path("there.pt").read_text() == "of mine"


OWN = """
import time
from torch import rand_like
from recipes.toy import ToyModel

class Noisy(ToyModel):
    def forward(self, x):
        out = super().forward(x)
        return out + rand_like(out)

class Slow(ToyModel):
    def forward(self, x):
        print("in the middle", flush=True)
        time.sleep(60)
"""


def test_a_failed_export_leaves_no_file(export, shared_run):
    Path("own.py").write_text(OWN)
    toy = shared_run("recipe=toy", "logger=none", "trainer.max_steps=1")
    status, out, err = export(f"checkpoint.path={toy}", "model._target_=own.Noisy", "export.format=torch_export")
    assert (status, out) == (1, "")
    assert "is not the same as the model; it was removed." in err
    assert names() <= {"own.py", "__pycache__"}


@pytest.mark.exhaustive
def test_an_interrupt_leaves_nothing(shared_run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    toy = shared_run("recipe=toy", "logger=none", "trainer.max_steps=1")
    own = ("model._target_=own.Slow", "export.format=torch_export")
    with started_framework("job=export", f"checkpoint.path={toy}", "trust=true", *own, cwd=tmp_path) as command:
        command.wait_for_output("in the middle", timeout=60)
        assert ".toy_1.pt2" in "".join(names(tmp_path))
        command.process.send_signal(signal.SIGINT)
        assert command.wait(timeout=30) == 130
        command.assert_all_gone()
    assert names(tmp_path) <= {"own.py", "__pycache__"}
