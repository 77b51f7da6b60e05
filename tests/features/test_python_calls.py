"""`framework.train` and the runs it returns, in this process, with ranks of the session's fork server."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import framework
from framework import ConfigError, DataError, Datasets, RequestError, Run, RunFailedError
from tests.features.api_cases import Net, datasets, loaders, samples, smoothed
from tests.helpers import results
from tests.helpers.internals import VERSION_BASE, ForkServer, call_module

ADAM = partial(torch.optim.Adam, lr=0.01)
Call = Callable[..., Run]


@pytest.fixture
def call_train(fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`framework.train` on the CPU, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(call_module, "_fork_server", lambda: nullcontext(fork_server))

    def run(recipe: str | None = None, **given: Any) -> Run:
        trainer = {"gpus": 0, "max_epochs": 2, **given.pop("trainer", {})}
        return framework.train(recipe, trainer=trainer, **given)

    return run


@pytest.mark.multiproc
def test_a_model_and_two_loaders_are_enough(call_train: Call) -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run = call_train(
        model=net,
        data=loaders(),
        loss=nn.CrossEntropyLoss(),
        optimizer=ADAM,
        topology={"procs_per_node": 2},
        name="two_loaders",
    )
    assert run.status == "finished"
    assert run.directory.parent == Path("outputs/two_loaders").resolve()
    assert run.config["task"]["loss"] == {"_target_": "torch.nn.CrossEntropyLoss"}
    assert run.record["topology"]["world_size"] == 2
    results.assert_same(net.state_dict(), before)
    # A batch of 10 on each of 2 processes, 120 samples.
    assert list(run.history.index) == [6, 12]
    assert run.metrics == {"val/loss": run.history["val/loss"][12]}
    best = run.best_model()
    assert type(best) is Net
    assert not best.training
    results.assert_same(best.state_dict(), results.weights(run.directory))


def test_the_weights_given_are_those_it_starts_from(call_train: Call) -> None:
    net = Net()
    run = call_train(model=net, data=loaders(), loss=smoothed, optimizer=partial(torch.optim.SGD, lr=1e-12))
    for name, tensor in run.last_model().state_dict().items():
        torch.testing.assert_close(tensor, net.state_dict()[name])


def test_the_same_as_the_command(call_train: Call, train: Callable[..., Path]) -> None:
    called = call_train("toy", overrides=["seed=3", "optimizer.lr=0.05"])
    typed = train("recipe=toy", "seed=3", "optimizer.lr=0.05", "trainer.max_epochs=2")
    assert called.directory.parent == typed.parent
    results.assert_same(results.weights(called.directory), results.weights(typed))
    assert framework.load(typed).metrics == called.metrics


def test_named_parts_can_be_written_as_a_recipe(call_train: Call, train: Callable[..., Path], tmp_path: Path) -> None:
    run = call_train(
        model=partial(Net, hidden=6, activation=nn.Tanh),
        data=partial(datasets, size=90),
        loss=partial(smoothed, smoothing=0.2),
        optimizer=ADAM,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        callbacks=["ema"],
        seed=7,
    )
    file = run.to_yaml("conf/recipe/mine.yaml")
    assert "_target_: tests.features.api_cases.Net" in file.read_text()
    with pytest.raises(ConfigError, match="exists already"):
        run.to_yaml(file)
    typed = train("recipe=mine")
    results.assert_same(results.weights(typed), results.weights(run.directory))
    assert typed.parent.name == "mine"


def test_a_changed_recipe_can_be_saved_as_one(call_train: Call, train: Callable[..., Path]) -> None:
    run = call_train("digits", data=partial(datasets, size=50), model=Net, optimizer=ADAM, checkpoint={"monitor": None})
    run.to_yaml("conf/recipe/mine.yaml")
    results.assert_same(results.weights(train("recipe=mine")), results.weights(run.directory))


def test_what_has_no_name_is_named_as_such(call_train: Call) -> None:
    class Local(Net):
        pass

    run = call_train(model=Local(), data=loaders(), loss=lambda output, target: smoothed(output, target))
    with pytest.raises(ConfigError) as caught:
        run.to_yaml("conf/recipe/mine.yaml")
    assert not Path("conf").exists()
    for words in ("model: ", "Local is defined in a script", "task.loss: ", "data.datasets: these data sets"):
        assert words in str(caught.value)


def test_a_run_is_resumed_evaluated_and_predicted(call_train: Call, train: Callable[..., Path]) -> None:
    whole = call_train(model=partial(Net, hidden=5), data=loaders(), loss=smoothed, trainer={"max_epochs": 3})
    run = call_train(model=partial(Net, hidden=5), data=loaders(), loss=smoothed, metrics={"correct": correct})
    assert run.resume(trainer={"max_epochs": 3}) is run
    results.assert_same(run.last_model().state_dict(), whole.last_model().state_dict())

    _, val = loaders()
    evaluated = run.evaluate(val)
    assert evaluated == {name.replace("val/", "test/"): pytest.approx(value) for name, value in run.metrics.items()}
    assert run.evaluate(part="val") == pytest.approx(run.metrics)
    assert run.evaluate(samples(60, seed=1), trainer={"limit_test_batches": 1}) == pytest.approx(evaluated)
    output = run.predict(val)["output"]
    with torch.no_grad():
        torch.testing.assert_close(output, run.last_model()(val.dataset[:][0]))
    # The objects lie in the run directory, also if it is moved: the command finds them.
    moved = run.directory.rename(run.directory.with_name("moved"))
    results.assert_same(framework.load(moved).last_model().state_dict(), whole.last_model().state_dict())
    with pytest.raises(ConfigError, match="was moved or removed"):
        repr(run)
    train(f"resume={moved}", "trainer.max_epochs=4")
    assert framework.load(moved).history.index[-1] == 48


def test_own_data_is_evaluated_whole_by_a_run_of_a_fold(call_train: Call) -> None:
    folds = {"datasets": Datasets(samples(60)), "folds": 3, "fold": 0}
    run = call_train(model=partial(Net, hidden=5), data=folds, loss=smoothed)
    held_out = run.evaluate(part="val")
    assert held_out == pytest.approx({name: run.metrics[name] for name in held_out})
    few = samples(2, seed=1)
    run.evaluate(few)
    assert len(run.predict(few)["output"]) == 2


def correct(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output.argmax(dim=1) == target).sum(), len(target)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trainer": {"max_epoch": 3}}, "Did you mean trainer.max_epochs?"),
        ({"trainer": {"precision": "bf16"}}, "Type trainer.precision=bf16-mixed"),
        ({"trainier": {"max_epochs": 3}}, "Did you mean trainer?"),
        ({"strategy": "dpp"}, "Did you mean strategy=ddp?"),
        ({"strategy": "fdsp", "callbacks": ["emma"]}, r"has 2 mistakes:\n.*fsdp\?"),
        ({"devices": 2}, "Type trainer.gpus=2"),
        ({"max_epochs": 3}, r"Did you mean trainer=\{'max_epochs': ...\}\?"),
        ({"overrides": ["model=cnn"]}, "can't go with the argument model"),
        ({"overrides": "seed=1"}, "must be a list of strings"),
        ({"overrides": ["hydra.mode=MULTIRUN"]}, "framework.load"),
        ({"metrics": [correct]}, "must be a dict"),
        ({"metrics": {"acc (%)": correct}}, "can't be a name"),
        ({"loss": "cross_entropy"}, "must be a function or module"),
        ({"loss": None}, r"Missing: loss \(or task\)"),
        ({"recipe": Net}, "Did you mean model"),
        ({"name": "../up"}, "a folder below outputs"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(Net().parameters(), lr=0.1), 1)}, "StepLR, ..."),
        ({"model": {"_target_": "tests.features.api_cases.Net", "hiden": 3}}, "Did you mean model.hidden?"),
        ({"optimizer": torch.optim.SGD(Net().parameters(), lr=0.1)}, r"partial\(torch.optim.SGD, lr=0.1\)"),
        ({"data": ()}, "Give train"),
        ({"data": (open,)}, "the train part|map-style"),
        ({"metrics": {"correct": correct}, "loss": None}, "Missing: loss"),
        ({"task": {"_target_": "framework.tasks.ModelLoss"}}, "can't go with task"),
        ({"overrides": ["job=eval"]}, "framework.load"),
        ({"overrides": ["-m"]}, "framework.load"),
    ],
)
def test_mistakes_are_exceptions_with_the_commands_words(call_train: Call, given: dict[str, Any], words: str) -> None:
    parts = {"model": Net, "data": partial(datasets, size=20), "loss": nn.CrossEntropyLoss(), **given}
    with pytest.raises(RequestError, match=words):
        call_train(parts.pop("recipe", None), **parts)
    assert not Path("outputs").exists()


class Recorder:
    """A callback that keeps what it is given, and writes it."""

    def __init__(self, file: str, given: Any) -> None:
        self.file = file
        self.given = given

    def on_fit_end(self) -> None:
        Path(self.file).write_text(repr(self.given))


class Kind(enum.IntEnum):
    FIRST = 1


def test_arguments_arrive_as_they_were_given(call_train: Call) -> None:
    class Inner(nn.Linear):
        """A class that only this function has, like the classes of a notebook."""

    given = {
        "plain": [1, 2.5, None, True, "a 'b' \"c\"\nd\\"],
        "tuple": (1, (2, "x")),
        "interpolation": ["${a.b}", "${oc.env:HOME}", "\\${x}", "???"],
        "keys": {"top-5": 1, "a b": 2, "1": 3, "é": 4},
        "member": Kind.FIRST,
        "path": Path("x"),
        "type": torch.float16,
        "number": np.int64(3),
        "class": Net,
    }
    run = call_train(
        model=partial(Net, activation=partial(Inner, 8, 8)),  # type: ignore[arg-type]
        data=lambda: samples(20),
        loss=nn.CrossEntropyLoss(),
        metrics={"top-5": correct, "f1/macro": correct},
        callbacks=[Recorder("one", 1), Recorder("two", 2), partial(Recorder, "three", given), "ema"],
        path={"outputs": Path("elsewhere")},
        seed=np.int64(3),
        trainer={"check_val_every_n_epoch": None},
    )
    assert run.directory.parents[1] == Path("elsewhere").resolve()
    assert run.config["seed"] == 3
    assert [Path(name).read_text() for name in ("one", "two")] == ["1", "2"]
    assert Path("three").read_text() == repr({**given, "number": 3})


def test_a_stream_and_a_slice(call_train: Call) -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(samples(40))

    large = torch.randn(100_000, 4)
    part = TensorDataset(large[:60], (large[:60, :2] > 0).sum(dim=1))
    run = call_train(
        model=Net, data={"train": DataLoader(Numbers(), batch_size=8), "val": part}, loss=smoothed, optimizer=ADAM
    )
    assert (run.directory / "objects_0.pkl").stat().st_size < large.nbytes / 10
    assert run.evaluate(part)["test/loss"] == pytest.approx(run.metrics["val/loss"])
    assert run.evaluate(DataLoader(Numbers(), batch_size=8)).keys() == {"test/loss"}


def test_options_with_keys_and_several_optimizers(call_train: Call) -> None:
    run = call_train(
        model=Net,
        data=loaders,
        loss=smoothed,
        optimizer={
            "first": {"_target_": "torch.optim.SGD", "params": "^0", "lr": 0.1},
            "rest": partial(torch.optim.Adam, lr=0.01),
        },
        callbacks={"early_stopping": {"monitor": "val/loss", "patience": 7}},
    )
    assert run.config["callbacks"]["early_stopping"]["patience"] == 7
    assert {"train/lr/first", "train/lr/rest"} <= results.logged_names(run.directory)


def test_a_hydra_application_keeps_its_state(call_train: Call) -> None:
    folder = Path("conf")
    folder.mkdir()
    (folder / "app.yaml").write_text("number: 1\n")
    state = random.getstate()
    with initialize_config_dir(str(folder.resolve()), **VERSION_BASE):
        run = call_train("toy", trainer={"max_steps": 2})
        assert compose("app").number == 1
    assert run.status == "finished"
    assert random.getstate() == state


def test_an_object_that_cannot_be_pickled_is_named(call_train: Call) -> None:
    class Locked(Net):
        lock = Lock()

    with pytest.raises(ConfigError, match="model: an object of Locked can't be handed"):
        call_train(model=Locked(), data=loaders(), loss=nn.CrossEntropyLoss())


@pytest.mark.multiproc
def test_a_failure_is_an_exception_with_the_report(call_train: Call) -> None:
    def fails_on_one(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.distributed.get_rank() == 1 and output.requires_grad:
            raise ValueError("unhappy")
        return smoothed(output, target)

    with pytest.raises(RunFailedError, match=r"Rank 1 of 2 .* failed first: ValueError: unhappy") as caught:
        call_train(model=Net, data=loaders, loss=fails_on_one, topology={"procs_per_node": 2})
    assert caught.value.report.first.rank == 1
    assert caught.value.report.first.phase == "forward"
    assert framework.load(caught.value.directory).status == "failed"


def test_a_failure_in_process_is_raised_from_its_cause(call_train: Call) -> None:
    losses = []

    def fails_later(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses.append(smoothed(output, target))
        if len(losses) > 3:
            raise DataError("This sample is damaged.")
        return losses[-1]

    with pytest.raises(RunFailedError, match=r"^This sample is damaged\.") as caught:
        call_train(model=Net, data=loaders, loss=fails_later, launcher="in_process")
    assert isinstance(caught.value.__cause__, DataError)
    assert caught.value.report.first.step > 0
    assert framework.load(caught.value.directory).status == "failed"


def test_a_torchrun_rank_is_referred_to_the_command(call_train: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RequestError, match="__main__"):
        call_train("toy")
