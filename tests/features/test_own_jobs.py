"""A function of a user's own, called with a trained model."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers import results

FUNCTIONS = """
import json
from pathlib import Path
import torch

def ask(model, run_dir, context, config, times, label="x"):
    assert not model.training
    total = torch.tensor(float(context.rank + 1))
    if context.world_size > 1:
        torch.distributed.all_reduce(total)
    found = [context.rank, float(total), times, label, config.recipe, sum(p.numel() for p in model.parameters())]
    (run_dir.path / f"asked_{context.rank}").write_text(json.dumps(found))
    if context.is_main:
        print("asked", label)

def lonely():
    pass

def plain(model, times):
    raise ValueError(f"times {times}")

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.fixture
def trained(shared_run):
    return shared_run("recipe=toy", "trainer.max_steps=1", "logger=none")


@pytest.mark.multiproc
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_function_gets_model_and_arguments_everywhere(train, folder, trained, capfd, ranks):
    run_dir = train(
        "job=mine.ask",
        f"checkpoint.path={trained}",
        "args.times=3",
        "args.label=many words",
        f"topology.procs_per_node={ranks}",
        f"path.outputs={folder}/outputs",
    )
    assert run_dir.parent == folder / "outputs/toy/mine.ask"
    for rank in range(ranks):
        found = json.loads((run_dir / f"asked_{rank}").read_text())
        assert found == [rank, ranks * (ranks + 1) / 2, 3, "many words", "toy", 165]
    assert results.log(run_dir).count("asked many words") == 1
    assert "mine.ask has returned" in capfd.readouterr().out
    assert results.run_file(run_dir)["status"] == "finished"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("job=mine.ask", "args.tims=3"), r"args\.tims: mine\.ask has no such keyword\. Did you mean args\.times"),
        (("job=mine.plain", "args={times: 3, tiems: 3}"), r"args\.tiems: .*Did you mean args\.times\?"),
        (("job=mine.plain",), r"args\.times is required by mine\.plain"),
        (("job=mine.lonely",), r"mine\.lonely must take a first argument"),
        (
            ("job=mine.plian", "args.times=3"),
            r"job=mine\.plian: there is no plian in mine.* Did you mean mine\.plain\?",
        ),
        (("job=mine.not_a_function",), "can't be called"),
        (("job=evla",), r"Did you mean job=eval\?"),
        (("job=eval", "args.times=3"), r"args\.times is for a function of yours"),
        (("job=mine.plain", "args=3"), r"args=3: must be a mapping"),
    ],
)
def test_wrong_functions_and_arguments_are_refused(train, folder, trained, capfd, overrides, said):
    train(*overrides, f"checkpoint.path={trained}", f"path.outputs={folder}/outputs", status=2)
    assert re.search(said, capfd.readouterr().err)


def test_a_function_without_a_checkpoint_gets_the_model_as_built(train, folder):
    run_dir = train("job=mine.ask", "recipe=toy", "args.times=2", f"path.outputs={folder}/outputs")
    assert json.loads((run_dir / "asked_0").read_text()) == [0, 1.0, 2, "x", "toy", 165]


def test_a_function_that_raises_is_reported(train, folder, trained):
    outputs = f"path.outputs={folder}/outputs"
    run_dir = train("job=mine.plain", "args.times=3", f"checkpoint.path={trained}", outputs, status=1)
    assert json.loads((run_dir / "failure.json").read_text())["first"]["exception"] == "ValueError: times 3"


CLASSES = """
from framework import Job

class Ranks(Job):
    def work(self, setup, model):
        assert model is None
        return {"ranks": setup.context.world_size}

class Largest(Job):
    needs_weights = True

    def work(self, setup, model):
        assert not model.training
        return {"times": setup.config.args["times"]}

    def text(self, request, run_dir, *, status):
        return f"{status}: {run_dir.read_run()['results']['times']} times"

class Picky(Job):
    def mistakes(self, config):
        if config.seed == 0:
            yield "seed=0 is refused."

class NotAJob:
    pass
"""


@pytest.mark.multiproc
def test_a_class_works_without_weights(train, folder, capfd):
    (folder / "classes.py").write_text(CLASSES)
    run_dir = train("job=classes.Ranks", "recipe=toy", "topology.procs_per_node=2", f"path.outputs={folder}/outputs")
    assert run_dir.parent == folder / "outputs/toy/classes.Ranks"
    assert results.run_file(run_dir)["results"] == {"ranks": 2}
    assert "Running classes.Ranks on toy: 2 processes, CPU" in capfd.readouterr().out


def test_a_class_gets_the_model_and_prints_its_text(train, folder, trained, capfd):
    (folder / "classes.py").write_text(CLASSES)
    outputs = f"path.outputs={folder}/outputs"
    train("job=classes.Largest", f"checkpoint.path={trained}", "args.times=3", outputs)
    assert "0: 3 times" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("job=classes.Picky", "seed=0"), r"seed=0 is refused\."),
        (("job=classes.Largest",), r"job=classes\.Largest needs weights"),
        (("job=classes.NotAJob",), r"job=classes\.NotAJob: it isn't a subclass of framework\.Job"),
        (("job=classes.Lragest",), r"there is no Lragest in classes.* Did you mean classes\.Largest\?"),
        (("job=classes.Ranks", "resume=RUN"), r"resume can't go with job=classes\.Ranks"),
    ],
)
def test_wrong_classes_and_configurations_are_refused(train, folder, trained, capfd, overrides, said):
    (folder / "classes.py").write_text(CLASSES)
    typed = [text.replace("RUN", str(trained)) for text in overrides]
    train(*typed, "recipe=toy", f"path.outputs={folder}/outputs", status=2)
    assert re.search(said, capfd.readouterr().err)
