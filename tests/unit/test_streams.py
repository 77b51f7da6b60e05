"""What is asked of a stream and can't be, and of a stream where there is none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.parse import parse
from framework.config.schema import Config, LoaderKind, StreamSharing
from framework.data.batching import BatchPlan
from framework.errors import ConfigError
from framework.strategies.single import AsItIs
from framework.streams import check_streams, train_limit
from framework.types import Datasets, MicroBatch, Window
from tests.unit.config.raw import raw_config
from tests.unit.small_trainer import make_trainer, samples
from tests.unit.streams import Parts

STREAM = Datasets(Parts([3]), val=samples(4))


class Mixing(AsItIs):
    mixes_samples = True


class Cutting(AsItIs):
    num_stages = 2


def config(*, job: str = "train", **changes: Any) -> Config:
    whole = parse(raw_config())
    data = {key: value for key, value in changes.items() if hasattr(whole.data, key)}
    trainer = {key: value for key, value in changes.items() if hasattr(whole.trainer, key)}
    of_data = replace(whole.data, **{"shuffle": False, **data})
    return replace(whole, job=job, data=of_data, trainer=replace(whole.trainer, **trainer))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shuffle": True}, "data.shuffle=true can't go with a train part that is a stream"),
        ({"loader": "resident"}, "data.loader=resident keeps a part in memory, and train is a stream"),
        ({"num_workers": 2}, "data.num_workers=2 can't go with a train part that is a stream"),
        ({"limit_train_batches": 0.5}, "trainer.limit_train_batches=0.5 is a share of the train part"),
        ({"overfit_batches": 2}, "trainer.overfit_batches can't go with a stream (train)"),
        ({"job": "parity", "stream": StreamSharing.JOIN}, "data.stream=join can't go with job=parity"),
    ],
)
def test_what_a_stream_cannot_give_is_refused(changes: dict[str, Any], said: str) -> None:
    if changes.get("loader"):
        raw = raw_config()
        raw["data"] |= {"loader": "resident", "shuffle": False}
        asked = parse(raw)
    else:
        asked = config(**changes)
    with pytest.raises(ConfigError) as caught:
        check_streams(asked, STREAM, AsItIs())
    assert said in str(caught.value)


def test_what_can_go_with_a_stream_passes() -> None:
    check_streams(config(limit_train_batches=3, limit_val_batches=0.5, num_workers=1), STREAM, Mixing())
    check_streams(config(stream=StreamSharing.STOP), STREAM, AsItIs())
    check_streams(config(shuffle=True), Datasets(samples(4), val=Parts([3])), AsItIs())
    check_streams(config(shuffle=True, num_workers=3), Datasets(samples(4)), AsItIs())
    beside = Datasets(samples(4), val=Parts([3]))
    check_streams(config(shuffle=True, num_workers=8), beside, AsItIs())
    check_streams(config(shuffle=True, loader=LoaderKind.RESIDENT), beside, AsItIs())


def test_parts_of_its_own_want_a_strategy_that_can_do_without_and_a_stream() -> None:
    asked = config(stream=StreamSharing.JOIN)
    with pytest.raises(ConfigError, match=r"data.stream=join can't go with strategy.sync_batchnorm=true"):
        check_streams(asked, STREAM, Mixing())
    with pytest.raises(ConfigError, match=r"data.stream=join can't go with strategy=pipeline"):
        check_streams(asked, STREAM, Cutting())
    with pytest.raises(ConfigError, match=r"data.stream=join says how .* and data.datasets gives none"):
        check_streams(asked, Datasets(samples(4)), AsItIs())


def test_a_limit_counts_batches_of_each_process() -> None:
    plan = BatchPlan(12, 2, 3)
    limits = [train_limit(config(limit_train_batches=n, accumulate_grad_batches=2).trainer, plan) for n in (1, 2, 3)]
    assert limits == [12, 12, 24]
    assert train_limit(config().trainer, plan) is None


def test_one_stream_for_two_parts_is_refused() -> None:
    same = Parts([3])
    with pytest.raises(ConfigError, match="one object for several of train, val"):
        check_streams(config(), Datasets(same, val=same), AsItIs())


@pytest.mark.usefixtures("own_state")
def test_a_stand_in_leaves_nothing_but_zeros_in_gradients() -> None:
    """Neither in statistics nor in generators: so it doesn't matter which batch stands in."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    trainer = make_trainer(model=model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    drawn = torch.get_rng_state(), random.getstate()
    batch = [torch.full((4, 3), 5.0) + torch.arange(4.0)[:, None], torch.arange(4.0)]
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda *_: seen.append(model.get_buffer("0.running_mean").clone()))
    trainer.train_step(Window(iter([MicroBatch(batch, 0)] * 2), 2, 1, False))
    assert len(seen) == 2
    assert not torch.equal(seen[0], before["0.running_mean"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
