"""Whatever is wrong gets a few clear lines and the right exit status, and nothing is lost.

Here: what only ranks can see. Wrong keys, values, options and topologies: tests/unit/test_cli.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers import disks
from tests.helpers.internals import compose
from tests.helpers.trust import trusting

SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_steps=4", "trainer.limit_test_batches=0")


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(fork_server, tmp_path, monkeypatch, capfd) -> Command:
    """The command in a folder with the module `own`; the last override of a key counts. No answer has a traceback."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> Answer:
        capfd.readouterr()
        status = compose.main(["trainer.gpus=0", *trusting(overrides)], fork_server=fork_server)
        answer = Answer(status, *capfd.readouterr())
        assert "Traceback" not in answer.out + answer.err
        return answer

    return run


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"own.py", "__pycache__"}


# Refusals that say what to do


REFUSED = (
    "recipe=toy trainer.gpus=8 topology.procs_per_node=3",
    "recipe=toy trainer.gpus=2 strategy=single",
    "recipe=toy trainer.gpus=0 backend=nccl",
    "recipe=toy checkpoint.monitor=loss",
    "recipe=toy_model_parallel trainer.gpus=0 topology.procs_per_node=2 strategy=pipeline",
    "recipe=toy_model_parallel trainer.gpus=5 topology.procs_per_node=2",
    "recipe=digits trainer.gpus=4 strategy=fsdp backend=gloo",
    "recipe=digits trainer.gpus=4 strategy=pipeline strategy.num_stages=3",
    "recipe=digits trainer.gpus=4 data.global_batch_size=3",
)
"""What `job=plan` refuses, in each of the ways that depend on several keys."""
OVERRIDES = re.compile(r"(?:(?:[a-z_]+\.)*[a-z_]+=[\w\[\]/-]+ ?)+")


def hints(text: str) -> list[list[str]]:
    """What an error says to use: the overrides that belong together."""
    advice = re.split(r"\b(?:Use|Set|Give|Did you mean) ", text, maxsplit=1)[1]
    return [found.split() for found in OVERRIDES.findall(advice)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", [text.split() for text in REFUSED], ids=" ".join)
def test_what_a_refusal_suggests_is_accepted(command, overrides):
    refused = command("job=plan", *overrides)
    assert refused.status == 2
    ways = hints(refused.err)
    assert ways, refused.err
    for way in ways:
        replaced = {text.partition("=")[0] for text in way}
        kept = [text for text in overrides if text.partition("=")[0] not in replaced]
        answer = command("job=plan", *kept, *way)
        assert answer.status == 0, f"{refused.err}\ntyped: {way}\n{answer.err}"


# Refused by processes that have torch: once, not by each, and nothing is left


def test_a_strategy_that_does_not_exist(command, tmp_path):
    answer = command(*SHORT, "strategy._target_=framework.strategies.ddpp", "topology.procs_per_node=2")
    assert answer.status == 2
    assert left(tmp_path) == set()
    assert "strategy._target_=framework.strategies.ddpp" in answer.err
    assert answer.err.count("Did you mean framework.strategies.ddp?") == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("strategy=single", "strategy=single is for one process, and there are 2.\nUse strategy=ddp (or auto), or"),
        (
            "strategy=pipeline topology=model_parallel",
            "strategy=pipeline needs processes of one device each, and these have 2.",
        ),
        pytest.param(
            "strategy=pipeline trainer.precision=16-mixed",
            "strategy=pipeline can't go with trainer.precision=16-mixed",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "data.global_batch_size=3 trainer.accumulate_grad_batches=2",
            "data.global_batch_size=3 is less than one sample for each of the 4 forward passes",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_processes_that_the_strategy_cannot_use(command, tmp_path, overrides, said):
    answer = command("recipe=toy", *overrides.split(), "topology.procs_per_node=2")
    assert (answer.status, answer.err.count(said)) == (2, 1)
    assert left(tmp_path) == set()


def test_a_file_of_weights_is_no_checkpoint(command, tmp_path):
    (tmp_path / "backbone.pt").write_bytes(b"weights")
    answer = command("job=eval", "checkpoint.path=backbone.pt")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("backbone.pt is a file. checkpoint.path takes a checkpoint of this framework")
    assert left(tmp_path) == {"backbone.pt"}


def test_weights_that_cannot_be_read(command, tmp_path):
    (tmp_path / "backbone.pt").write_bytes(b"weights")
    answer = command(*SHORT, "init_from=backbone.pt", "topology.procs_per_node=2")
    assert answer.status == 2
    assert answer.err == "backbone.pt can't be read: torch.save didn't write it.\nSave model.state_dict() only.\n"
    assert left(tmp_path) == {"backbone.pt"}


def test_a_missing_checkpoint_suggests_the_nearest_one(command, tmp_path, shared_run):
    run_dir = shared_run(*SHORT)
    answer = command("job=eval", f"checkpoint.path={run_dir}/checkpoints/step_00000003")
    assert answer.status == 2
    assert answer.err.startswith(f"There is no checkpoint at {run_dir}/checkpoints/step_00000003.\nDid you mean ")
    assert left(tmp_path) == set()


# Places that can't be written


def test_a_file_in_the_way_of_the_outputs(command, tmp_path):
    (tmp_path / "outputs").write_text("a file\n")
    answer = command(*SHORT)
    assert (answer.status, answer.out) == (2, "")
    assert "under outputs/toy: Not a directory." in answer.err
    assert "path.outputs=FOLDER" in answer.err
    assert (tmp_path / "outputs").read_text() == "a file\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many KiB."""
    with disks.small_disk(tmp_path / "disk") as mount:
        yield mount


@pytest.mark.parametrize("size_kib", [16, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (4, 12, 24))])
def test_a_full_disk_is_named_wherever_it_happens(command, small_disk, size_kib):
    """Configuration, records, metrics, logs, report or checkpoint: nothing hides the cause."""
    disk = small_disk(size_kib)
    answer = command(*SHORT, "trainer.log_every_n_steps=1", f"path.outputs={disk}")
    assert answer.status == 1
    assert "No space left on device" in answer.err or "There is no room for a checkpoint: one takes" in answer.err
    assert len(answer.err.splitlines()) <= 4


# What happens while it runs


def test_a_sample_that_raises_is_named_once(command, tmp_path):
    answer = command(*SHORT, *BAD_DATA, "topology.procs_per_node=2", "data.num_workers=1")
    assert answer.status == 1
    lines = answer.err.splitlines()
    assert lines[0] == "Sample 17 of the train dataset raised ValueError: broken picture"
    assert f"{tmp_path}/own.py, line 9, in __getitem__" in lines[1]
    assert answer.err.count("ValueError: broken picture") == 1


def test_a_model_that_rejects_the_data_is_named(train, capfd):
    train(*SHORT, "model=cnn", "topology.procs_per_node=2", status=1)
    printed = capfd.readouterr().err
    for fact in ("RuntimeError: Expected 3D", "[100, 10]", "recipes/digits.py", "failed with the same error"):
        assert fact in printed


def test_output_that_mismatches_the_loss_names_both_shapes(command):
    answer = command(*SHORT, "model._target_=own.Narrow")
    assert answer.status == 2
    assert "The model's output doesn't fit task.loss (MSELoss)" in answer.err
    assert "output: a tensor of shape (200, 4), float32\n  target: a tensor of shape (200, 5), float32\n" in answer.err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("model._target_=own.Lazy", "first batch: layers.0 (LazyLinear), layers.1 (LazyBatchNorm1d)."),
        ("model._target_=own.Late", "Late has made scale after the start of the training, such as in its forward."),
        (
            "model._target_=own.Pair",
            "  output: a tuple of 2\n  target: a tensor of shape (200, 5), float32\nReturn one",
        ),
        ("~task +task._target_=own.Forgetful", "Forgetful.training_step returned None. Return framework.StepOutput("),
    ],
    ids=["lazy", "late", "pair", "none"],
)
def test_code_that_does_not_fit_a_training(command, overrides, said):
    answer = command(*SHORT, *overrides.split())
    assert answer.status == 2
    assert said in answer.err
    assert len(answer.err.splitlines()) <= 5


BAD_DATA = ("data.datasets._target_=own.pictures", "~data.datasets.num_samples", "~data.datasets.seed")
OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset
from framework import Datasets, StepOutput
class Pictures(Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        if i == 17: raise ValueError("broken picture")
        return torch.zeros(10), torch.zeros(5)
def pictures(): return Datasets(train=Pictures(), val=torch.utils.data.Subset(Pictures(), range(10)))
class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 4)
    def forward(self, x): return self.layer(x)
class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d())
    def forward(self, x): return self.layers(x)
class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 5)
    def forward(self, x):
        if not hasattr(self, "scale"): self.scale = nn.Parameter(torch.ones(5))
        return self.layer(x) * self.scale
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 5)
    def forward(self, x): return self.layer(x), x
class Forgetful:
    step = 0
    def training_step(self, model, batch):
        self.step += 1
        if self.step < 3: return self.validation_step(model, batch)
    def validation_step(self, model, batch):
        return StepOutput((model(batch[0]) - batch[1]).square().mean(), len(batch[1]))
"""
