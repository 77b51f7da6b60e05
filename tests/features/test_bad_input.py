"""Whatever is wrong gets a few clear lines and the right exit status, and nothing is lost.

Here, through the command: what this page doesn't have is
  unknown keys, groups, options, recipes            tests/unit/test_cli.py
  `_target_`s and their keywords                    tests/unit/test_targets.py, tests/features/test_own_recipe.py
  values of a wrong type or out of range            tests/unit/config/test_parse.py, test_checks.py
  GPUs that aren't there, a broken driver           tests/unit/test_hardware.py
  topologies that don't fit                         tests/unit/test_topology.py
  missing, truncated and damaged MNIST files        tests/recipes/test_mnist.py, tests/unit/data/test_files.py
  a loss that isn't finite, weights of another model for init_from     tests/features/test_checkpoints.py
  every kind of damage to a checkpoint              tests/unit/checkpoint/
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from framework import cli, hardware
from framework.checkpoint import find, read_manifest
from framework.checkpoint.format import FileFacts, encode
from framework.hardware import Gpu
from tests.helpers import disks, results
from tests.helpers.loops import plain_loop, toy_batches

KEEP_ALL = ("checkpoint.monitor=null", "checkpoint.save_top_k=-1")
SHORT = ("recipe=toy", "logger=jsonl", "trainer.max_steps=4", "trainer.limit_test_batches=0")


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(warm, tmp_path, monkeypatch, capfd) -> Command:
    """The command in an empty folder; the last override of a key counts. No answer has a traceback."""

    def run(*overrides: str) -> Answer:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        status = cli.main(["trainer.gpus=0", *overrides], warm=warm)
        answer = Answer(status, *capfd.readouterr())
        assert "Traceback" not in answer.out + answer.err
        return answer

    return run


@pytest.fixture
def gpus(monkeypatch) -> Callable[[int], None]:
    """Makes the driver show so many GPUs."""

    def show(number: int) -> None:
        seen = [Gpu(f"GPU {i}", f"GPU-{i}", 1 << 30) for i in range(number)]
        monkeypatch.setattr(hardware, "visible_gpus", lambda: seen)

    return show


# Refused before anything is started


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.gpus=-1",), "trainer.gpus=-1: must be a whole number at least 0, or auto"),
        pytest.param(
            ("trainer.gpus=abc",),
            "trainer.gpus=abc: must be a whole number at least 0, or auto",
            marks=pytest.mark.exhaustive,
        ),
        (("trainer.gpus=9",), "trainer.gpus=9, but this machine has 8 GPUs.\nUse trainer.gpus=8 or trainer.gpus=auto."),
        (
            ("topology.procs_per_node=3", "trainer.gpus=8"),
            "topology.procs_per_node=3 doesn't divide trainer.gpus=8.\nUse trainer.gpus=3, or topology.",
        ),
        (
            ("strategy=pipeline", "topology.procs_per_node=2", "topology=model_parallel"),
            "strategy=pipeline needs processes of one device each, and these have 2.\nUse topology.gpus_per_process=1",
        ),
        (
            ("strategy=single", "topology.procs_per_node=2"),
            "strategy=single is for one process, and there are 2.\nUse strategy=ddp (or auto), or",
        ),
        (("topology.node_rank=1",), "topology.node_rank=1 is out of range: with topology.nnodes=1 it is 0."),
        (
            ("topology.nnodes=2", "topology.node_rank=2"),
            "topology.node_rank=2 is out of range: with topology.nnodes=2 it is 0 to 1.",
        ),
        pytest.param(
            ("topology.node_rank=-1",),
            "topology.node_rank=-1: must be a whole number at least 0",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("data.batch_size=0",), "data.batch_size=0: must be a whole number at least 1", marks=pytest.mark.exhaustive
        ),
        (("data.batch_size=-4",), "data.batch_size=-4: must be a whole number at least 1"),
        (("data.global_batch_size=0",), "data.global_batch_size=0: must be a whole number at least 1, or null"),
        (("backend=glo",), "backend=glo: backend has no such option. Did you mean backend=gloo?"),
        (("backend.name=ncll",), "backend.name=ncll: must be one of auto, gloo, nccl, mpi. Did you mean"),
        (("strategy=ddpp",), "strategy=ddpp: strategy has no such option. Did you mean strategy=ddp?"),
        (("backend=nccl", "trainer.gpus=0"), "backend=nccl needs GPUs, and trainer.gpus=0 uses none. Use backend=gloo"),
        pytest.param(
            ("backend.timeout=-5s",),
            "backend.timeout=-5s: must be a time such as 90s, 30m, 2h or 1d",
            marks=pytest.mark.exhaustive,
        ),
        (("backend.timeout=soon",), "backend.timeout=soon: must be a time such as 90s, 30m, 2h or 1d"),
        (("backend.init_timeout=-5s",), "backend.init_timeout=-5s: must be a time such as 90s, 30m, 2h or 1d"),
        pytest.param(
            ("backend.init_timeout=soon",),
            "backend.init_timeout=soon: must be a time such as 90s, 30m, 2h or 1d",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_is_refused_before_anything_is_made(command, gpus, tmp_path, overrides, said):
    gpus(8)
    answer = command("recipe=toy", *overrides)
    assert said in answer.err
    assert (answer.status, answer.out) == (2, "")
    assert len(answer.err.splitlines()) <= 3
    assert list(tmp_path.iterdir()) == []


ALWAYS = (
    "recipe=toy trainer.gpus=8 topology.procs_per_node=3",
    "recipe=toy_model_parallel trainer.gpus=5 topology.procs_per_node=2",
    "recipe=toy_model_parallel trainer.gpus=0 topology.procs_per_node=2 strategy=pipeline",
)
REFUSED = (
    *ALWAYS,
    "recipe=toy trainer.gpus=2 topology.procs_per_node=3",
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


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(text.split(), id=text, marks=[] if text in ALWAYS else pytest.mark.exhaustive) for text in REFUSED],
)
def test_what_a_refusal_says_to_use_is_accepted_by_plan(command, overrides):
    refused = command("job=plan", *overrides)
    assert refused.status == 2
    ways = hints(refused.err)
    assert ways, refused.err
    for way in ways:
        replaced = {text.partition("=")[0] for text in way}
        kept = [text for text in overrides if text.partition("=")[0] not in replaced]
        answer = command("job=plan", *kept, *way)
        assert answer.status == 0, f"{refused.err}\ntyped: {way}\n{answer.err}"


def test_gpus_where_there_are_none(command, gpus, tmp_path):
    gpus(0)
    answer = command("recipe=toy", "trainer.gpus=8")
    assert answer.err == (
        "trainer.gpus=8, but this machine has no GPU.\n"
        "To run as CPU processes instead: trainer.gpus=0 topology.procs_per_node=8\n"
    )
    assert answer.status == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_weights_is_no_checkpoint(command, tmp_path):
    (tmp_path / "backbone.pt").write_bytes(b"weights")
    answer = command(*SHORT, "init_from=backbone.pt")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("backbone.pt is a file. init_from and checkpoint.path take a checkpoint of this")
    assert "outputs/RECIPE/RUN for the run's last one" in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["backbone.pt"]


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has mpi")
def test_mpi_where_torch_has_none(command, tmp_path):
    answer = command(*SHORT, "backend.name=mpi", "topology.procs_per_node=2")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == f"backend.name=mpi isn't in this torch, {torch.__version__}. Use one of {backends()}.\n"
    assert list(tmp_path.iterdir()) == []


def backends() -> str:
    there = [name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name)]
    return ", ".join(["auto", *there])


def test_nccl_where_auto_finds_no_gpus(command, gpus, tmp_path):
    gpus(0)
    answer = command(*SHORT, "backend=nccl", "trainer.gpus=auto")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == (
        "backend.name=nccl needs GPUs, and these processes run on the CPU (trainer.gpus=0, or auto without any).\n"
        "Use backend.name=gloo or backend.name=auto.\n"
    )
    assert list(tmp_path.iterdir()) == []


# Refused by the ranks, which have torch: once, not by each, and nothing is left


@pytest.mark.parametrize("how", [(), ("launcher=in_place",), ("topology.procs_per_node=2",), ("-m", "seed=1,2")])
def test_a_strategy_that_is_no_option_and_does_not_exist(command, tmp_path, own_state, how):
    answer = command(*SHORT, "strategy._target_=framework.strategies.ddpp", *how)
    assert answer.status == (1 if "-m" in how else 2)
    assert list(tmp_path.iterdir()) == []
    assert "strategy._target_=framework.strategies.ddpp" in answer.err
    assert "Did you mean framework.strategies.ddp?" in answer.err


# Fine, though it may look wrong


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=pytest.mark.multiproc)])
def test_a_batch_larger_than_the_data_is_one_short_batch_an_epoch(train, procs):
    """1,600 samples: two epochs are two steps, each of all the data."""
    overrides = ("data.batch_size=5000", f"topology.procs_per_node={procs}", "trainer.max_steps=2")
    run_dir = train(*SHORT, *overrides, "trainer.log_every_n_steps=1")
    assert (results.results(run_dir)["steps"], results.results(run_dir)["epochs"]) == (2, 2)
    wanted = plain_loop([[torch.cat(part) for part in zip(*epoch, strict=True)] for epoch in whole_epochs(2)])
    results.assert_same(results.weights(run_dir), wanted, tolerance=1e-6)


def whole_epochs(epochs: int) -> list[list[list[torch.Tensor]]]:
    batches = [list(batch) for batch in toy_batches(epochs=epochs, batches=80)]
    return [batches[80 * epoch : 80 * (epoch + 1)] for epoch in range(epochs)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--local_rank", "0"),
        ("--local-rank=1",),
        pytest.param(("--local-rank", "3"), marks=pytest.mark.exhaustive),
        pytest.param(("--local_rank=1",), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_what_old_launchers_add_is_ignored(train, arguments):
    run_dir = train(*arguments, "recipe=toy", "logger=none", "trainer.max_steps=1", "trainer.limit_test_batches=0")
    assert results.results(run_dir)["steps"] == 1
    assert "local" not in (run_dir / "overrides.yaml").read_text()


# Checkpoints to evaluate


@pytest.fixture(scope="module")
def trained(train_once):
    return train_once("recipe=toy", "logger=none", "trainer.max_steps=4", "checkpoint.every_n_steps=2", *KEEP_ALL)


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    """A run's copy, which a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "copied", symlinks=True))


@pytest.mark.parametrize("job", ["eval", "predict"])
def test_a_checkpoint_that_is_not_there_names_those_that_are(command, copied, job):
    answer = command(f"job={job}", f"checkpoint.path={copied}/checkpoints/step_00000003")
    assert answer.status == 2
    assert answer.err.startswith(f"There is no {copied}/checkpoints/step_00000003.\nDid you mean ")
    assert command(f"job={job}", "checkpoint.path=nowhere").err.startswith("There is no nowhere.\n")
    assert not Path("outputs").exists()


def test_a_checkpoint_with_a_flipped_bit_is_not_used(command, copied):
    place = copied / "checkpoints" / "step_00000004" / "model.pt"
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)
    answer = command("job=eval", f"checkpoint.path={copied}")
    assert answer.status == 2
    assert answer.err == (
        f"The checkpoint {place.parent} is damaged: model.pt has another checksum than when it was written.\n"
        f"Use another one of {copied}/checkpoints: step_00000002\n"
    )
    assert command("job=eval", f"checkpoint.path={copied}/checkpoints/step_00000002").status == 0


class Mine:
    """Unpickling it runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_would_run_code_is_not_read(command, copied, tmp_path):
    """With a manifest to which the file fits: checksums are no defence."""
    place = find(copied)
    mark = tmp_path / "it_ran"
    torch.save({"net1.weight": Mine(mark)}, place / "model.pt")
    forge(place, "model.pt")
    torch.load(place / "model.pt", weights_only=False)
    assert mark.exists()  # it would
    mark.unlink()
    answer = command("job=eval", f"checkpoint.path={place}")
    assert answer.status == 2
    assert f"The checkpoint {place} was not read: model.pt holds Python objects (" in answer.err
    assert "system), which could run any code." in answer.err
    assert not mark.exists()


def forge(place: Path, name: str) -> None:
    """Make the manifest say that the file is as it should be."""
    content = (place / name).read_bytes()
    manifest = read_manifest(place)
    facts = FileFacts(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
    changed = manifest.__class__(**{**vars(manifest), "files": {**manifest.files, name: facts}})
    (place / "manifest.json").write_text(encode(changed))


@pytest.mark.multiproc
def test_a_checkpoint_of_another_model_is_refused_by_names_and_shapes(command, copied, tmp_path):
    answer = command("job=eval", f"checkpoint.path={copied}", "model=cnn", "topology.procs_per_node=2")
    assert answer.status == 2
    assert "not in the checkpoint: features.0.weight" in answer.err
    assert "not in the model: net1.weight" in answer.err
    assert answer.err.count("don't fit the model ConvNet") == 1
    (tmp_path / "wider.py").write_text(WIDER)
    answer = command("job=predict", f"checkpoint.path={copied}", "model._target_=wider.Wider")
    assert answer.status == 2
    assert "net1.weight: the model has [12, 10], the checkpoint [10, 10]" in answer.err
    assert not (tmp_path / "predictions.csv").exists()


WIDER = """
from torch import nn
class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 12), nn.Linear(12, 5)
    def forward(self, x): return self.net2(self.net1(x))
"""

# Places that can't be written


def test_a_file_in_the_way_of_the_outputs(command, tmp_path):
    (tmp_path / "outputs").write_text("a file\n")
    answer = command(*SHORT)
    assert answer == Answer(
        status=2,
        out="",
        err="The run directory can't be made under outputs/toy: Not a directory.\n"
        "Choose a folder that can be written with path.outputs=FOLDER.\n",
    )
    assert (tmp_path / "outputs").read_text() == "a file\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many KiB."""
    with disks.small_disk(tmp_path / "disk") as mount:
        yield mount


def test_a_disk_that_becomes_full_ends_the_run_with_its_checkpoints(command, small_disk):
    """Room for one checkpoint of about 130 KiB beside the other files, not for two. See test_full_disk.py."""
    disk = small_disk(200)
    keep = (*KEEP_ALL, "checkpoint.every_n_steps=2", "logger=none", "trainer.max_steps=5")
    answer = command(*SHORT, *keep, f"path.outputs={disk}")
    assert answer.status == 1
    (run_dir,) = (disk / "toy").iterdir()
    lines = answer.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"The checkpoint of step 5 can't be written to {run_dir}/checkpoints: No space left on")
    assert lines[2] == (
        "The last good checkpoint is step_00000002. What was trained since isn't saved. Make room, then resume the run."
    )
    assert results.saved_steps(run_dir) == [2]
    assert results.weights(run_dir).keys() == {"net1.weight", "net1.bias", "net2.weight", "net2.bias"}
    assert results.run_file(run_dir)["status"] == "failed"
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
    answer = command(*SHORT, f"path.outputs={disk}")
    assert answer.status == 1
    assert "can't be written: No space left on device.\nMake room, or choose another folder" in answer.err


@pytest.mark.parametrize("size_kib", [4, 16, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (12, 24))])
def test_wherever_the_disk_becomes_full_the_answer_says_so(command, small_disk, size_kib):
    """Configuration, records, metrics, logs, report or checkpoint: the cause is told and nothing hides it."""
    disk = small_disk(size_kib)
    answer = command(*SHORT, "trainer.log_every_n_steps=1", f"path.outputs={disk}")
    assert answer.status == 1
    assert "No space left on device" in answer.err or "There is no room for a checkpoint: one takes" in answer.err
    assert len(answer.err.splitlines()) <= 4


# What happens while it runs


def test_a_loss_that_becomes_nan_names_its_step_and_keeps_the_last_good_checkpoint(command, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    nan = ("~task.loss", "~task.metrics", "task._target_=own.Nan", "+task.step=7", "trainer.max_steps=20")
    keep = ("checkpoint.monitor=null", "checkpoint.every_n_steps=3", "checkpoint.every_n_epochs=null")
    answer = command(*SHORT, *nan, *keep)
    assert answer.status == 1
    assert "since step 7" in answer.err
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    assert results.saved_steps(run_dir) == [3, 6]
    assert all(bool(tensor.isfinite().all()) for tensor in results.weights(run_dir).values())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_on_one_sample_names_it(command, tmp_path, workers):
    (tmp_path / "own.py").write_text(OWN)
    answer = command(*SHORT, *BAD_DATA, f"data.num_workers={workers}")
    assert answer.status == 1
    lines = answer.err.splitlines()
    assert lines[0] == "Sample 17 of the train dataset raised ValueError: broken picture"
    assert f"{tmp_path}/own.py, line 9, in __getitem__" in lines[1]
    assert len(lines) == 2


@pytest.mark.multiproc
def test_a_sample_that_raises_in_one_of_two_processes_is_one_answer(command, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    answer = command(*SHORT, *BAD_DATA, "topology.procs_per_node=2", "data.num_workers=1")
    assert answer.status == 1
    assert answer.err.startswith("Sample 17 of the train dataset raised ValueError: broken picture\n")
    assert "failed first\n" in answer.err, answer.err
    assert answer.err.count("ValueError: broken picture") == 1, answer.err


@pytest.mark.multiproc
def test_a_model_that_cannot_take_the_data_names_both_and_the_shape(command, tmp_path):
    answer = command(*SHORT, "model=cnn", "topology.procs_per_node=2")
    assert answer.status == 1
    lines = answer.err.splitlines()
    assert lines[0].startswith(
        "The model can't take the data: RuntimeError on the first batch: Expected 3D (unbatched)"
    )
    assert re.fullmatch(r"  model: recipes\.digits\.ConvNet, at \S+/recipes/\w+\.py:\d+", lines[1])
    assert lines[2:4] == ["  input: a tensor of shape (100, 10), float32", "  data:  recipes.toy.toy_regression"]
    assert "failed with the same error" in answer.err
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    assert "Traceback" in results.log(run_dir, 0)


def test_a_models_error_after_the_first_step_keeps_its_traceback(train, tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN)
    train(*SHORT, "model._target_=own.Late", "trainer.limit_val_batches=0", "checkpoint.monitor=null", status=1)
    printed = capfd.readouterr().err
    assert "can't take the data" not in printed
    assert "in forward" in printed
    assert "shapes cannot be multiplied" in printed


def test_output_that_does_not_fit_the_loss_names_both_shapes(command, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    answer = command(*SHORT, "model._target_=own.Narrow")
    assert answer.status == 2
    assert "The model's output doesn't fit task.loss (MSELoss)" in answer.err
    assert "output: a tensor of shape (200, 4), float32\n  target: a tensor of shape (200, 5), float32\n" in answer.err


BAD_DATA = ("data.datasets._target_=own.pictures", "~data.datasets.num_samples", "~data.datasets.seed")
OWN = '''
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
class Late(Narrow):
    """Its third batch has another shape."""
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(10, 5), 0
    def forward(self, x):
        self.calls += 1
        return self.layer(x if self.calls < 3 else x[:, :7])
class Nan:
    """The loss is NaN from one step on."""
    def __init__(self, step): self.step, self.steps = step, 0
    def training_step(self, model, batch):
        self.steps += 1
        output = self.validation_step(model, batch)
        return output._replace(loss=output.loss * float("nan")) if self.steps >= self.step else output
    def validation_step(self, model, batch):
        return StepOutput(nn.functional.mse_loss(model(batch[0]), batch[1]), len(batch[0]))
'''
