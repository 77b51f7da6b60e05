"""The recipes of models with more than one loss, optimizer or length: what they show, on several processes."""

from __future__ import annotations

import pytest

from tests.helpers import results
from tests.helpers.documents import write_shown_files

pytestmark = pytest.mark.usefixtures("own_state")

TWO = ("topology.procs_per_node=2",)
GPT = ("recipe=gpt_char", "scheduler.total_steps=2000", "trainer.limit_val_batches=1", "data.eval_batch_size=32")
SHORT = (*GPT, "trainer.max_steps=6", "trainer.val_check_interval=6", "trainer.log_every_n_steps=2", "logger=jsonl")


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "overrides",
    [
        TWO,
        pytest.param((*TWO, "strategy=fsdp"), marks=pytest.mark.exhaustive),
        pytest.param((*TWO, "strategy=pipeline", "model.tie_weights=false"), marks=pytest.mark.exhaustive),
        pytest.param(("trainer.activation_checkpointing=auto",), marks=pytest.mark.exhaustive),
        pytest.param(("trainer.compile=default",), marks=[pytest.mark.exhaustive, pytest.mark.timeout(300)]),
    ],
    ids=["ddp", "fsdp", "pipeline", "recomputed", "compiled"],
)
def test_the_gpt_learns_the_same_in_every_way(train, shared_run, overrides):
    untied = tuple(each for each in overrides if "tie_weights" in each)
    one = shared_run(*SHORT, *untied)
    other = train(*SHORT, *overrides)
    for name in ("train/loss", "val/loss", "val/perplexity"):
        assert results.curve(other, name) == pytest.approx(results.curve(one, name), rel=2e-4)
    assert min(results.curve(one, "train/tokens_per_s").values()) > 0
    assert results.curve(one, "train/lr/no_decay").keys() == results.curve(one, "train/lr").keys()


def test_the_gpt_writes_a_text(train, shared_run, tmp_path):
    trained = shared_run(*SHORT)
    arguments = ("args.length=20", "args.prompt=Python", f"path.outputs={tmp_path}/outputs")
    run_dir = train("job=recipes.gpt.sample", f"checkpoint.path={trained}", *arguments)
    text = results.log(run_dir)
    assert len(text[text.index("Python") :]) >= len("Python") + 20


@pytest.mark.multiproc
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_muon_trains_block_matrices_on_any_topology(train, shared_run, strategy):
    muon = (*SHORT, "recipe=gpt_muon")
    one = shared_run(*muon)
    two = train(*muon, *TWO, f"strategy={strategy}")
    assert results.curve(one, "train/lr/matrices").keys() == results.curve(one, "train/lr/rest").keys()
    for name in ("train/loss", "val/loss"):
        assert results.curve(two, name) == pytest.approx(results.curve(one, name), rel=2e-4)


@pytest.mark.multiproc
def test_the_gan_is_the_same_on_any_topology(train):
    short = ("recipe=gan_digits", "trainer.max_epochs=1", "trainer.val_check_interval=25", "logger=tensorboard")
    one = train(*short)
    two = train(*short, *TWO)
    results.assert_same(results.weights(two), results.weights(one), tolerance=2e-4)
    for run_dir in (one, two):
        (picture,) = results.events(run_dir).Images("val/samples")
        assert (picture.step, picture.width) == (25, 8 * 9 + 1)


@pytest.mark.multiproc
def test_padded_texts_give_the_same_everywhere(train):
    short = ("recipe=text_padded", "trainer.max_epochs=1", "trainer.limit_train_batches=0.4", "logger=jsonl")
    one = train(*short)
    two = train(*short, *TWO)
    results.assert_same(results.weights(two), results.weights(one), tolerance=2e-3)
    assert results.results(two)["last"]["metrics"] == pytest.approx(results.results(one)["last"]["metrics"], rel=1e-3)


def test_a_network_for_digits_learns_another_head(train, shared_run, data_root, capfd):
    mnist = ("recipe=mnist", f"data.root={data_root}", "trainer.max_epochs=1", "trainer.limit_test_batches=0")
    trained = shared_run(*mnist, "trainer.max_steps=5", "trainer.val_check_interval=5", "trainer.limit_val_batches=1")
    run_dir = train("recipe=finetune_digits", f"init_from={trained}", "trainer.max_epochs=1", "logger=jsonl")
    begun = results.weights(trained)
    ended = results.weights(run_dir)
    kept = {name for name in begun if begun[name].shape == ended[name].shape and begun[name].equal(ended[name])}
    assert kept == {name for name in begun if name.startswith("features")}
    assert set(results.curve(run_dir, "train/lr/features").values()) == {0.0001}
    assert "left out: classifier.3.weight, classifier.3.bias" in results.log(run_dir)


@pytest.mark.multiproc
def test_a_documented_curriculum_is_the_same_on_any_topology(train, tmp_path):
    """Its first epochs have 314, 503, 691 and 880 digits."""
    write_shown_files(tmp_path)
    short = ("recipe=curriculum", "trainer.max_epochs=4", "logger=jsonl", "data.global_batch_size=64")
    # Dropout would draw other numbers on two processes.
    plain = ("model.dropout=0", "model.conv_dropout=0")
    one = train(*short, *plain)
    assert results.results(one)["steps"] == 5 + 8 + 11 + 14
    part = train(*short, *plain, "trainer.max_steps=11", "scheduler.total_steps=38")
    again = train(f"resume={part}", "trainer.max_steps=null", "scheduler.total_steps=null")
    results.assert_same(results.saved(again)["model"], results.saved(one)["model"])
    two = train(*short, *plain, *TWO)
    assert results.curve(two, "val/loss").keys() == {5, 13, 24, 38}
    assert results.curve(two, "val/loss") == pytest.approx(results.curve(one, "val/loss"), rel=1e-3)
