"""What TensorBoard's files have beside the curves: hyperparameters, and on request a graph and histograms."""

from __future__ import annotations

import pytest
import torch
from tensorboard.plugins.hparams import metadata

from tests.features.lightning_recipes import MANUAL
from tests.helpers import results
from tests.helpers.recipes import write_recipe

SHORT = ("recipe=digits", "trainer.max_steps=6", "trainer.log_every_n_steps=2", "trainer.val_check_interval=3")
HISTOGRAMS = "logger.tensorboard.histograms_every_n_steps"
GRAPH = "logger.tensorboard.graph=true"


BROKEN = ("recipe=toy", "model._target_=tests.features.test_tensorboard.Broken")


class Broken(torch.nn.Linear):
    """Fails in the first step."""

    def __init__(self) -> None:
        super().__init__(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("broken")
        return super().forward(x)


def hparams(run_dir):
    """Keys and values of a finished run; None if it hasn't any."""
    content = results.events(run_dir).summary_metadata.get(metadata.SESSION_START_INFO_TAG)
    if content is None:
        return None
    assert metadata.SESSION_END_INFO_TAG in results.events(run_dir).summary_metadata
    info = metadata.parse_session_start_info_plugin_data(content.plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


def test_a_finished_run_has_hparams_and_metrics(train):
    run_dir = train(*SHORT, "optimizer.lr=0.03", "trainer.limit_test_batches=1")
    found = hparams(run_dir)
    first = {"*optimizer.lr": 0.03, "*recipe": "digits", "*seed": 0}
    shown = {**first, "trainer.max_steps": 6, "data.shuffle": True}
    assert shown.items() <= found.items()
    assert not any(name.startswith(("path.", "checkpoint.", "logger.")) for name in found)
    best = results.results(run_dir)["score"]
    events = results.events(run_dir)
    (event,) = events.Scalars("val/accuracy/best")
    assert (event.step, event.value) == (6, pytest.approx(best))
    assert [event.step for event in events.Scalars("val/accuracy")] == [3, 6]


def test_a_failed_run_has_none(train):
    assert hparams(train(*SHORT, *BROKEN, status=1)) is None


def test_histograms_of_parameters_and_gradients_on_request(train):
    run_dir = train(*SHORT, f"{HISTOGRAMS}=2")
    plain = train(*SHORT)
    events = results.events(run_dir)
    names = list(results.weights(run_dir))
    tags = {f"parameters/{name}" for name in names} | {f"gradients/{name}" for name in names}
    assert set(events.Tags()["histograms"]) == tags
    assert not results.events(plain).Tags()["histograms"]
    for name, gradients in ((name, events.Histograms(f"gradients/{name}")) for name in names):
        assert [event.step for event in gradients] == [2, 4, 6], name
    # All gradients together have the norm that is logged for the step.
    squares = sum(events.Histograms(f"gradients/{name}")[0].histogram_value.sum_squares for name in names)
    assert abs(squares**0.5 - results.curve(run_dir, "train/grad_norm")[2]) < 1e-4
    results.assert_same(results.weights(run_dir), results.weights(plain))


def test_histograms_of_several_optimizers(train):
    run_dir = train("recipe=gan_digits", "trainer.max_steps=3", "trainer.limit_val_batches=0", f"{HISTOGRAMS}=3")
    events = results.events(run_dir)
    parts = {tag.split("/")[1].split(".")[0] for tag in events.Tags()["histograms"]}
    assert len(parts) == 2
    for tag in events.Tags()["histograms"]:
        assert [event.step for event in events.Histograms(tag)] == [3], tag


def test_the_graph_on_request(train):
    run_dir = train(*SHORT, GRAPH)
    plain = train(*SHORT)
    graph = results.events(run_dir).Graph()
    assert any("classifier" in node.name for node in graph.node)
    assert not results.events(plain).Tags()["graph"]
    results.assert_same(results.weights(run_dir), results.weights(plain))


def test_an_untraceable_model_trains_without_its_graph(train):
    short = ("recipe=toy", "trainer.max_steps=3", "trainer.limit_val_batches=0", "checkpoint.monitor=null")
    run_dir = train(*short, "model._target_=tests.features.flop_cases.Uncopyable", GRAPH)
    assert "TensorBoard won't have the graph of the model: TypeError: holds a lock" in results.log(run_dir)
    assert results.results(run_dir)["steps"] == 3


@pytest.mark.exhaustive
@pytest.mark.multiproc
def test_gradients_of_a_module_that_steps_itself_are_averaged(train, tmp_path):
    write_recipe(tmp_path, "lit", MANUAL)
    run_dir = train("recipe=lit", "topology.procs_per_node=2", *SHORT[1:], f"{HISTOGRAMS}=2")
    events = results.events(run_dir)
    squares = sum(
        events.Histograms(tag)[0].histogram_value.sum_squares
        for tag in events.Tags()["histograms"]
        if tag.startswith("gradients/")
    )
    assert squares**0.5 == pytest.approx(results.curve(run_dir, "train/grad_norm")[2], abs=1e-4)
