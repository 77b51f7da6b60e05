"""The programs of docs/migration.md, before and after: what others train is trained here with the same numbers.

In the order of the data set, both programs see the same batches and end with the same weights; shuffled, with about the
same accuracy.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.command import ROOT, run_framework, run_python
from tests.helpers.documents import shown_files

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs/migration.md").read_text()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
BEFORE = {
    "torchrun": (*TORCHRUN, "before_torchrun.py"),
    "accelerate": (*TORCHRUN, "before_accelerate.py"),
    "lightning": ("before_lightning.py",),
    "template": ("train.py", "experiment=digits"),
}
TEMPLATE = {
    "configs/train.yaml": """
defaults: [_self_, data: digits, model: digits, callbacks: default, trainer: default, experiment: null]
seed: null
ckpt_path: null
""",
    "train.py": """
import sys
from pathlib import Path
import lightning, torch
from hydra import __version__, compose, initialize_config_dir
from hydra.utils import instantiate

base = {"version_base": "1.3"} if __version__.startswith("1.3.") else {}
with initialize_config_dir(config_dir=str(Path("configs").absolute()), **base):
    config = compose("train", sys.argv[1:])
lightning.seed_everything(config.seed)
datamodule, model = instantiate(config.data), instantiate(config.model)
callbacks = [instantiate(each) for each in config.callbacks.values()]
trainer = instantiate(config.trainer, callbacks=callbacks)
trainer.fit(model=model, datamodule=datamodule, ckpt_path=config.ckpt_path)
torch.save(model.net.state_dict(), "net.pt")
print(f"accuracy {trainer.callback_metrics['val/accuracy']:.4f}")
""",
}
"""What the template has beside the files of the experiment, as far as these need it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the files of the page."""
    for name, content in {**shown_files(PAGE), **TEMPLATE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def in_order(folder: Path) -> None:
    """Let the programs read the samples in the order of the data set; recipes are given `data.shuffle=false`."""
    for file in folder.rglob("*.py"):
        file.write_text(
            file.read_text().replace("shuffle=True", "shuffle=False").replace('"shuffle": True', '"shuffle": False')
        )


def before(name: str, folder: Path) -> float:
    """Run the program as it was, and return its last accuracy."""
    done = run_python(*BEFORE[name], cwd=folder, timeout=150)
    if "terminate called without an active exception" in done.stderr:
        # torch sometimes does so after the last line.
        done = run_python(*BEFORE[name], cwd=folder, timeout=150)
    return accuracy(done)


def after(name: str, folder: Path) -> float:
    """Run the program as it is here, and return its last accuracy."""
    return accuracy(run_python(f"after_{name}.py", cwd=folder, timeout=150))


def recipe(name: str, folder: Path, *overrides: str) -> float:
    """Train a recipe of the page, and return its last accuracy."""
    return accuracy(run_framework(f"recipe={name}", *overrides, cwd=folder, timeout=150))


def accuracy(done: Any) -> float:
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"accuracy +(\d\.\d+)", done.stdout)[-1])


def weights(folder: Path, run: str, which: str = "last") -> dict[str, Tensor]:
    (file,) = folder.glob(f"outputs/{run}/*/checkpoints/{which}/model.pt")
    state: dict[str, Tensor] = torch.load(file)
    return state


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def start_weights(folder: Path, *, hidden: int, seed: int) -> str:
    """Return the override that starts a recipe from the weights the programs before start from."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    torch.save(net.state_dict(), folder / "start.pt")
    return f"init_from={folder / 'start.pt'}"


def test_a_plain_loop_has_the_same_bits(folder: Path) -> None:
    assert run_python("plain_loop.py", cwd=folder, timeout=150).returncode == 0
    (shown,) = re.findall(r"^python -m framework (.* init_from=initial\.pt .*)$", PAGE, flags=re.MULTILINE)
    done = run_framework(*shlex.split(shown), cwd=folder, timeout=150)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(weights(folder, "handwriting"), torch.load(folder / "net.pt"), rtol=0, atol=0)


def test_torchrun(folder: Path) -> None:
    in_order(folder)
    # One of the 298 samples comes twice.
    padded = before("torchrun", folder)
    assert after("torchrun", folder) == pytest.approx(padded, abs=1 / 297)
    assert_close(weights(folder, "after_torchrun"), torch.load(folder / "net.pt"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_state")
def test_the_recipe_of_torchrun(folder: Path) -> None:
    in_order(folder)
    padded = before("torchrun", folder)
    start = start_weights(folder, hidden=64, seed=0)
    assert recipe("handwriting", folder, start, "data.shuffle=false") == pytest.approx(padded, abs=1 / 297)
    assert_close(weights(folder, "handwriting"), torch.load(folder / "net.pt"))


@pytest.mark.exhaustive
def test_accelerate(folder: Path) -> None:
    in_order(folder)
    assert after("accelerate", folder) == before("accelerate", folder)
    assert_close(weights(folder, "after_accelerate"), torch.load(folder / "net.pt"))


def on_one_device(folder: Path) -> None:
    """Let Lightning train in one process, with the global batch of two: with several, it always shuffles."""
    file = folder / "before_lightning.py"
    one = file.read_text().replace('devices=2, strategy="ddp"', "devices=1").replace("batch_size=25", "batch_size=50")
    file.write_text(one)


@pytest.mark.exhaustive
def test_lightning(folder: Path) -> None:
    in_order(folder)
    on_one_device(folder)
    assert after("lightning", folder) == before("lightning", folder)
    assert_close(weights(folder, "after_lightning", "best"), lightning_weights(folder))


@pytest.mark.exhaustive
def test_weights_of_lightning(folder: Path) -> None:
    on_one_device(folder)
    before("lightning", folder)
    (checkpoint,) = folder.rglob("best.ckpt")
    (shown,) = re.findall(r"`init_from=best.ckpt (.*)`", PAGE)
    kept = ("optimizer.lr=0", "trainer.max_epochs=1")
    recipe("handwriting", folder, f"init_from={checkpoint}", *shlex.split(shown), *kept)
    assert_close(weights(folder, "handwriting"), lightning_weights(folder))


def lightning_weights(folder: Path) -> dict[str, Tensor]:
    (checkpoint,) = folder.rglob("best.ckpt")
    # The checkpoint holds the module's own hyperparameters.
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("framework.tasks.lightning") is None, reason="there is no framework.tasks.lightning"
)
def test_the_lightning_module_as_it_is(folder: Path) -> None:
    assert recipe("handwriting_lightning", folder) == recipe("handwriting", folder)
    expected = {f"net.{name}": value for name, value in weights(folder, "handwriting").items()}
    assert_close(weights(folder, "handwriting_lightning"), expected)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_state")
def test_the_template(folder: Path) -> None:
    in_order(folder)
    expected = before("template", folder)
    start = start_weights(folder, hidden=128, seed=12345)
    assert recipe("handwriting_128", folder, start, "data.shuffle=false") == expected
    assert_close(weights(folder, "handwriting_128"), torch.load(folder / "net.pt"))


@pytest.mark.usefixtures("own_state")
def test_the_templates_classes_train_unchanged(folder: Path) -> None:
    in_order(folder)
    expected = before("template", folder)
    start_weights(folder, hidden=128, seed=12345)
    start = {f"net.{name}": value for name, value in torch.load(folder / "start.pt").items()}
    torch.save(start, folder / "start.pt")
    assert recipe("handwriting_lit", folder, f"init_from={folder / 'start.pt'}", "data.shuffle=false") == expected
    of_net = {name.removeprefix("net."): value for name, value in weights(folder, "handwriting_lit").items()}
    assert_close(of_net, torch.load(folder / "net.pt"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["torchrun", "accelerate", "lightning"])
def test_shuffled(name: str, folder: Path) -> None:
    assert after(name, folder) == pytest.approx(before(name, folder), abs=0.02)


@pytest.mark.exhaustive
def test_the_template_shuffled(folder: Path) -> None:
    assert recipe("handwriting_128", folder) == pytest.approx(before("template", folder), abs=0.02)
