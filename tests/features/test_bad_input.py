"""Whatever is wrong gets a few clear lines and the right exit status, and nothing is lost.

Here: what only ranks can see. Wrong keys, values, options and topologies: tests/unit/test_cli.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from framework import cli
from tests.helpers import disks, results
from tests.helpers.loops import plain_loop, toy_batches

SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_steps=4", "trainer.limit_test_batches=0")


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(warm, tmp_path, monkeypatch, capfd) -> Command:
    """The command in a folder with the module `own`; the last override of a key counts. No answer has a traceback."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> Answer:
        capfd.readouterr()
        status = cli.main(["trainer.gpus=0", *overrides], warm=warm)
        answer = Answer(status, *capfd.readouterr())
        assert "Traceback" not in answer.out + answer.err
        return answer

    return run


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"own.py", "__pycache__"}


# Refusals that say what to do


ALWAYS = ("recipe=toy_model_parallel trainer.gpus=0 topology.procs_per_node=2 strategy=pipeline",)
REFUSED = (
    *ALWAYS,
    "recipe=toy trainer.gpus=8 topology.procs_per_node=3",
    "recipe=toy_model_parallel trainer.gpus=5 topology.procs_per_node=2",
    "recipe=toy trainer.gpus=4 topology.procs_per_node=2",
    "recipe=toy trainer.gpus=2 strategy=single",
    "recipe=toy trainer.gpus=2 topology.share_gpus=true",
    "recipe=toy trainer.gpus=0 backend=nccl",
    "recipe=toy checkpoint.monitor=loss",
    "recipe=toy_model_parallel trainer.gpus=1",
    "recipe=toy_model_parallel trainer.gpus=8 topology.procs_per_node=8",
    "recipe=toy_model_parallel trainer.gpus=4 topology.procs_per_node=4 topology.gpus_per_process=2",
    "recipe=toy_model_parallel trainer.gpus=0 topology=single_node",
    "recipe=digits trainer.gpus=4 strategy=fsdp backend=gloo",
    "recipe=digits trainer.gpus=2 topology.procs_per_node=4 strategy=pipeline topology.share_gpus=true "
    "topology.gpus_per_process=1",
    "recipe=digits trainer.gpus=4 strategy=pipeline strategy.num_stages=3",
    "recipe=digits trainer.gpus=4 strategy=pipeline data.batch_size=8",
    "recipe=digits trainer.gpus=4 strategy=pipeline trainer.precision=16-mixed",
    "recipe=digits trainer.gpus=4 data.global_batch_size=3",
)
"""What `job=plan` refuses, in each of the ways that depend on several keys."""
OVERRIDES = re.compile(r"(?:(?:[a-z_]+\.)*[a-z_]+=[\w\[\]/-]+ ?)+")


def hints(text: str) -> list[list[str]]:
    """What an error says to use: the overrides that belong together."""
    advice = re.split(r"\b(?:Use|Set|Give|Did you mean) ", text, maxsplit=1)[1]
    return [found.split() for found in OVERRIDES.findall(advice)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [pytest.param(text.split(), id=text, marks=[] if text in ALWAYS else pytest.mark.exhaustive) for text in REFUSED],
)
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


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has mpi")
def test_mpi_where_torch_has_none(command, tmp_path):
    answer = command(*SHORT, "backend.name=mpi", "topology.procs_per_node=2")
    assert (answer.status, answer.out) == (2, "")
    assert f"backend.name=mpi isn't in this torch, {torch.__version__}. Use one of auto, gloo" in answer.err
    assert left(tmp_path) == set()


EX = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "how",
    [
        ("topology.procs_per_node=2",),
        *(pytest.param(how, marks=EX) for how in ((), ("launcher=in_place",), ("-m", "seed=1,2"))),
    ],
    ids=" ".join,
)
def test_a_strategy_that_does_not_exist(command, tmp_path, own_state, how):
    answer = command(*SHORT, "strategy._target_=framework.strategies.ddpp", *how)
    assert answer.status == (1 if "-m" in how else 2)
    assert left(tmp_path) == set()
    assert "strategy._target_=framework.strategies.ddpp" in answer.err
    assert answer.err.count("Did you mean framework.strategies.ddp?") == (2 if "-m" in how else 1)


def test_a_file_of_weights_is_no_checkpoint(command, tmp_path):
    (tmp_path / "backbone.pt").write_bytes(b"weights")
    answer = command(*SHORT, "init_from=backbone.pt")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("backbone.pt is a file. init_from and checkpoint.path take a checkpoint of this")
    assert left(tmp_path) == {"backbone.pt"}


def test_a_checkpoint_that_is_not_there_gets_the_nearest(command, tmp_path, shared_run):
    run_dir = shared_run(*SHORT)
    answer = command("job=eval", f"checkpoint.path={run_dir}/checkpoints/step_00000003")
    assert answer.status == 2
    assert answer.err.startswith(f"There is no {run_dir}/checkpoints/step_00000003.\nDid you mean ")
    assert left(tmp_path) == set()


# Fine, though it may look wrong


@EX
def test_a_batch_larger_than_the_data_is_one_short_batch_an_epoch(train):
    """1,600 samples: two epochs are two steps, each of all the data."""
    overrides = ("data.batch_size=5000", "topology.procs_per_node=2", "trainer.max_steps=2")
    run_dir = train(*SHORT, *overrides, "trainer.log_every_n_steps=1")
    assert (results.results(run_dir)["steps"], results.results(run_dir)["epochs"]) == (2, 2)
    batches = [list(batch) for batch in toy_batches(epochs=2, batches=80)]
    epochs = [batches[:80], batches[80:]]
    wanted = plain_loop([[torch.cat(part) for part in zip(*epoch, strict=True)] for epoch in epochs])
    results.assert_same(results.weights(run_dir), wanted, tolerance=1e-6)


@pytest.mark.parametrize(
    "arguments", [("--local_rank", "0"), pytest.param(("--local-rank=1",), marks=EX)], ids=" ".join
)
def test_arguments_that_old_launchers_add_are_ignored(train, arguments):
    run_dir = train(*arguments, "recipe=toy", "logger=none", "trainer.max_steps=1", "trainer.limit_test_batches=0")
    assert results.results(run_dir)["steps"] == 1
    assert "local" not in (run_dir / "overrides.yaml").read_text()


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


@pytest.mark.parametrize("size_kib", [16, *(pytest.param(size, marks=EX) for size in (4, 12, 24))])
def test_wherever_the_disk_becomes_full_the_answer_says_so(command, small_disk, size_kib):
    """Configuration, records, metrics, logs, report or checkpoint: nothing hides the cause."""
    disk = small_disk(size_kib)
    answer = command(*SHORT, "trainer.log_every_n_steps=1", f"path.outputs={disk}")
    assert answer.status == 1
    assert "No space left on device" in answer.err or "There is no room for a checkpoint: one takes" in answer.err
    assert len(answer.err.splitlines()) <= 4


# What happens while it runs


@pytest.mark.parametrize(("procs", "workers"), [(2, 1), pytest.param(1, 0, marks=EX), pytest.param(1, 1, marks=EX)])
def test_a_sample_that_raises_is_named_once(command, tmp_path, procs, workers):
    answer = command(*SHORT, *BAD_DATA, f"topology.procs_per_node={procs}", f"data.num_workers={workers}")
    assert answer.status == 1
    lines = answer.err.splitlines()
    assert lines[0] == "Sample 17 of the train dataset raised ValueError: broken picture"
    assert f"{tmp_path}/own.py, line 9, in __getitem__" in lines[1]
    assert answer.err.count("ValueError: broken picture") == 1


def test_a_model_that_cannot_take_the_data_names_both_and_the_shape(command, tmp_path):
    answer = command(*SHORT, "model=cnn", "topology.procs_per_node=2")
    assert answer.status == 1
    for fact in (
        *("The model can't take the data: RuntimeError on the first batch: Expected 3D", "recipes.digits.ConvNet"),
        *("a tensor of shape (100, 10), float32", "recipes.toy.toy_regression", "failed with the same error"),
    ):
        assert fact in answer.err
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    assert "Traceback" in results.log(run_dir, 0)


def test_a_models_error_after_the_first_step_keeps_its_traceback(train, tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN)
    train(*SHORT, "model._target_=own.Late", "trainer.limit_val_batches=0", "checkpoint.monitor=null", status=1)
    printed = capfd.readouterr().err
    assert "can't take the data" not in printed
    assert "in forward" in printed
    assert "shapes cannot be multiplied" in printed


def test_output_that_does_not_fit_the_loss_names_both_shapes(command):
    answer = command(*SHORT, "model._target_=own.Narrow")
    assert answer.status == 2
    assert "The model's output doesn't fit task.loss (MSELoss)" in answer.err
    assert "output: a tensor of shape (200, 4), float32\n  target: a tensor of shape (200, 5), float32\n" in answer.err


BAD_DATA = ("data.datasets._target_=own.pictures", "~data.datasets.num_samples", "~data.datasets.seed")
OWN = '''
import torch
from torch import nn
from torch.utils.data import Dataset
from framework import Datasets
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
class Late(Narrow):
    """Its third batch has another shape."""
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(10, 5), 0
    def forward(self, x):
        self.calls += 1
        return self.layer(x if self.calls < 3 else x[:, :7])
'''
