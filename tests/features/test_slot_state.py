"""State that belongs to samples: the documented language model, which carries the state of its LSTM."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy

from framework import ConfigError, Strategy
from framework.types import DataShare
from tests.helpers import results
from tests.helpers.documents import shown_files, write_shown_files
from tests.helpers.internals import seed_everything
from tests.helpers.source import ROOT
from tests.unit.small_trainer import Squares, make_trainer

pytestmark = pytest.mark.multiproc

PAGE = ROOT / "docs/own_code.md"
BATCH = 24
BPTT = 20
STEPS = 5
EPOCHS = 2
SHORT = (
    "recipe=word_lm",
    "model.hidden_size=8",
    "trainer.precision=64-true",
    "optimizer=sgd",
    "optimizer.lr=2.0",
    f"trainer.limit_train_batches={STEPS}",
    f"trainer.max_epochs={EPOCHS}",
)


@pytest.fixture
def folder(tmp_path):
    write_shown_files(tmp_path, pages=[PAGE])
    return tmp_path


def plain_loop() -> dict[str, torch.Tensor]:
    """As `main.py` of word_language_model trains."""
    recipe: dict[str, Any] = {}
    exec(shown_files(PAGE.read_text())["recipes/word_lm.py"], recipe)
    inputs, _ = recipe["words"](BPTT).train.tensors
    text = inputs.flatten()
    # The text in rows, as `batchify` cuts it, of whole pieces.
    row_length = len(text) // BPTT // BATCH * BPTT
    rows = text[: BATCH * row_length].view(BATCH, row_length)
    seed_everything(0, rank=0)
    model = recipe["LSTM"](8).double()
    for _ in range(EPOCHS):
        hidden = None
        for begin in range(0, STEPS * BPTT, BPTT):
            if hidden is not None:
                hidden = tuple(state.detach() for state in hidden)
            scores, hidden = model(rows[:, begin : begin + BPTT], hidden)
            following = rows[:, begin + 1 : begin + BPTT + 1]
            model.zero_grad()
            cross_entropy(scores.flatten(0, 1), following.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 2.0 * parameter.grad
    return model.state_dict()


def test_the_same_weights_on_any_number_of_processes(train, folder):
    wanted = plain_loop()
    for ranks in (1, 2, 3):
        run_dir = train(*SHORT, f"topology.procs_per_node={ranks}")
        results.assert_same(results.weights(run_dir), wanted, tolerance=1e-9)
    # The limit counts forward passes.
    three = ("trainer.accumulate_grad_batches=3", f"trainer.limit_train_batches={3 * STEPS}")
    accumulated = train(*SHORT, "topology.procs_per_node=2", *three)
    results.assert_same(results.weights(accumulated), wanted, tolerance=1e-9)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2)])
def test_resumes_on_another_number_of_processes(train, folder, before, after):
    """Within the second epoch, whose state isn't that of its beginning."""
    whole = train(*SHORT, f"topology.procs_per_node={before}")
    stopped = train(*SHORT, f"topology.procs_per_node={before}", f"+trainer.max_steps={STEPS + 3}")
    hidden, cell = results.saved(stopped)["training"]["slots"]["hidden"]
    assert hidden.shape == cell.shape == (2, BATCH, 8)

    same = train(f"resume={stopped}", "trainer.max_steps=null")
    results.assert_same(results.weights(same), results.weights(whole))
    other = train(f"resume={stopped}", "trainer.max_steps=null", f"topology.procs_per_node={after}")
    results.assert_same(results.weights(other), results.weights(whole), tolerance=1e-9)
    again, _ = results.saved(other)["training"]["slots"]["hidden"]
    wanted, _ = results.saved(whole)["training"]["slots"]["hidden"]
    torch.testing.assert_close(again, wanted, rtol=0.0, atol=1e-9)


def test_what_has_no_slots_is_refused(train, folder, capfd):
    train("recipe=word_lm", "data.drop_last=false", status=2)
    assert "Use data.drop_last=true" in capfd.readouterr().err

    run_dir = train("recipe=word_lm", "trainer.limit_train_batches=1", "trainer.max_epochs=1")
    train(f"resume={run_dir}", "data.global_batch_size=12", "trainer.max_epochs=2", status=2)
    printed = capfd.readouterr().err
    for fact in ("NextWord.hidden of 24 slots", "has 12 samples now", "Resume with data.global_batch_size=24"):
        assert fact in printed

    recipe = folder / "recipes" / "word_lm.py"
    source = recipe.read_text()
    recipe.write_text(source.replace('"hidden": 1', '"hidden": 0'))
    train("recipe=word_lm", status=2)
    printed = capfd.readouterr().err
    assert "shape (2, 24, 64)" in printed
    assert "Its dimension 0 must be the slot" in printed
    recipe.write_text(source.replace('"hidden": 1', '"hiden": 1'))
    train("recipe=word_lm", status=2)
    assert "slot_state has 'hiden'" in capfd.readouterr().err


OWN = """
import os
import torch
from torch import nn
from framework import StepOutput
from framework.tasks import Supervised

class Carries(Supervised):
    slot_state = {"hidden": 0}
    hidden = None

    def training_step(self, model, batch):
        x, y = batch
        if self.hidden is not None:
            print("strides", self.hidden.stride())
            x = x + self.hidden.sum(dim=0).unsqueeze(1)
        self.hidden = self.carried(x)
        return super().training_step(model, (x, y))

    def carried(self, x):
        # The transposed half of a larger tensor.
        return torch.cat([x, x]).t()[:, : len(x)]

class Transposed(Carries):
    slot_state = {"hidden": 1}

class ValidatesAsItTrains(Transposed):
    def validation_step(self, model, batch):
        self.hidden = None
        return self.training_step(model, batch)

class OtherSizes(Carries):
    def carried(self, x):
        return x.new_zeros(len(x), 1 + int(os.environ["RANK"]))

class OtherTypes(OtherSizes):
    def carried(self, x):
        return torch.zeros(len(x), dtype=[torch.float32, torch.float64][int(os.environ["RANK"])])

class SometimesNone(OtherSizes):
    def carried(self, x):
        return [x.new_zeros(len(x), 2), None][int(os.environ["RANK"])]

class Buffer(nn.Module):
    slot_state = {"hidden": 0}

    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", None)

    def training_step(self, model, batch):
        raise AssertionError("not reached")

    validation_step = training_step
"""
TOY = (
    "recipe=toy",
    "data.global_batch_size=20",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=6",
    "trainer.limit_test_batches=0",
    "trainer.precision=64-true",
    "task.loss._target_=torch.nn.MSELoss",
)


def hidden_of(run_dir):
    return results.saved(run_dir)["training"]["slots"]["hidden"]


def test_a_transposed_part_of_a_tensor_resumes_bit_for_bit(train, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    carries = (*TOY, "task._target_=own.Transposed")
    whole = train(*carries)
    stopped = train(*carries, "+trainer.max_steps=3")
    assert hidden_of(stopped).untyped_storage().nbytes() == 20 * 10 * 8
    train(f"resume={stopped}", "trainer.max_steps=null")
    assert torch.equal(hidden_of(stopped), hidden_of(whole))
    # The order of sums may depend on them.
    strides = {line for line in results.log(stopped).splitlines() if line.startswith("strides")}
    assert strides == {"strides (20, 1)"}


def test_an_evaluation_leaves_the_state_as_it_is(train, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    # Its batches have as many samples as those of the training.
    validated = ("task._target_=own.ValidatesAsItTrains", "data.eval_batch_size=20", "trainer.val_check_interval=2")
    run_dir = train(*TOY, *validated)
    results.assert_same(results.weights(run_dir), results.weights(train(*TOY, "task._target_=own.Transposed")))


@pytest.mark.parametrize(
    ("task", "facts"),
    [
        ("OtherSizes", ("torch.float64 [1], and for others torch.float64 [2]", "pad them to a fixed size")),
        ("OtherTypes", ("torch.float32 [], and for others torch.float64 []",)),
        ("SometimesNone", ("torch.float64 [2], and for others None",)),
        ("Buffer", ("slot_state has 'hidden', a buffer", "persistent=False")),
    ],
)
def test_what_cannot_be_put_together_is_refused(train, tmp_path, capfd, task, facts):
    (tmp_path / "own.py").write_text(OWN)
    short = ("topology.procs_per_node=2", "trainer.limit_train_batches=1", f"task._target_=own.{task}")
    removed = ("~task.loss", "~task.metrics") if task == "Buffer" else ()
    train(*TOY[:-1], *short, *removed, status=2)
    printed = capfd.readouterr().err
    for fact in facts:
        assert fact in printed


class TwoRanksOnAShare(Strategy):
    def data_share(self, context):
        return DataShare(0, 2)


class Carries(Squares):
    slot_state: ClassVar[dict[str, int]] = {"hidden": 0}
    hidden = None


def test_ranks_without_samples_of_their_own_are_refused():
    with pytest.raises(ConfigError, match=r"Carries.slot_state \(hidden\).*TwoRanksOnAShare isn't one"):
        make_trainer(task=Carries(), strategy=TwoRanksOnAShare())
