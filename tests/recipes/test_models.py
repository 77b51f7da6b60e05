"""The recipes' own parts: the networks have the promised layers; the data are seeded."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework import ConfigError, Datasets
from recipes.digits import ConvNet, digits
from recipes.toy import ToyModel, toy_regression
from recipes.toy_model_parallel import ToyModelParallel


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build()


def tensors(part) -> tuple[Tensor, ...]:
    assert type(part) is TensorDataset
    return part.tensors


def same(one: Datasets, other: Datasets) -> bool:
    ours = chain.from_iterable(tensors(part) for part in one)
    theirs = chain.from_iterable(tensors(part) for part in other)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim > 1]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_toy_network_spans_one_or_more_devices(k):
    """Over two devices it is the toy network, weight for weight."""
    model = seeded(ToyModel if k == 1 else lambda: ToyModelParallel(devices=["cpu"] * k))
    layers = max(k, 2)
    assert shapes(model) == [*[(10, 10)] * (layers - 1), (5, 10)]
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    expected = x
    for number in range(1, layers):
        expected = model.get_submodule(f"net{number}")(expected).relu()
    torch.testing.assert_close(model(x), model.get_submodule(f"net{layers}")(expected))
    if k == 2:
        toy = seeded(ToyModel).state_dict()
        assert list(model.state_dict()) == list(toy)
        assert all(torch.equal(weight, toy[name]) for name, weight in model.state_dict().items())


def test_each_layer_is_on_its_own_device():
    model = seeded(lambda: ToyModelParallel(devices=["cpu", "meta"]))
    assert [model.get_submodule(f"net{n}").weight.device.type for n in (1, 2)] == ["cpu", "meta"]
    assert model(torch.zeros(3, 10)).device.type == "meta"
    for devices in ([], ["cpu"]):
        with pytest.raises(ConfigError, match=rf"got {len(devices)} device(.|\n)*gpus_per_process=2"):
            ToyModelParallel(devices=devices)


def test_the_digits_network_has_the_original_layers():
    model = seeded(ConvNet)
    kinds = [type(module).__name__ for module in model.modules() if not list(module.children())]
    convolutions = ["Conv2d", "ReLU", "Conv2d", "ReLU", "MaxPool2d", "Dropout", "Flatten"]
    classifier = ["Linear", "ReLU"]
    assert kinds == [*convolutions, *classifier, "Dropout", "Linear"]
    assert shapes(model) == [(32, 1, 3, 3), (32, 32, 3, 3), (128, 4608), (10, 128)]
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25, 0.5]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize(("make", "sizes"), [(toy_regression, [1600, 200, 200]), (digits, [1257, 180, 360])])
def test_seeded_data_ignores_the_number_of_threads(own_state, make, sizes):
    before = torch.get_rng_state()
    data = make()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert same(make(), data)
    assert not same(make(seed=1), data)
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(part) for part in data] == sizes
    everything = torch.cat([tensors(part)[0].flatten(1) for part in data])
    # No sample is in two parts.
    assert len(everything.unique(dim=0)) == sum(sizes)


def test_digits_are_normalised_images_of_all_classes(own_state):
    images, labels = tensors(digits().train)
    assert (images.shape[1:], images.dtype, labels.dtype) == ((1, 28, 28), torch.float32, torch.int64)
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    assert len(labels.unique()) == 10
    small = digits(size=8, val_size=100, test_size=200)
    assert [len(tensors(part)[0]) for part in small] == [1497, 100, 200]
    assert tensors(small.test)[0].shape == (200, 1, 8, 8)
    no_parts = toy_regression(num_samples=50, val_fraction=0, test_fraction=0)
    assert (len(tensors(no_parts.train)[0]), no_parts.val, no_parts.test) == (50, None, None)
