"""The recipes' own parts: the networks are those that were promised, the data are seeded and can be learned."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from framework import ConfigError, Datasets
from recipes.digits import ConvNet, digits
from recipes.toy import ToyModel, toy_regression
from recipes.toy_model_parallel import ToyModelParallel


def seeded(build, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def tensors(part) -> tuple[torch.Tensor, torch.Tensor]:
    assert type(part) is TensorDataset
    inputs, targets = part.tensors
    return inputs, targets


def test_the_toy_model_is_two_linear_layers():
    model = seeded(ToyModel)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == {"net1.weight": (10, 10), "net1.bias": (10,), "net2.weight": (5, 10), "net2.bias": (5,)}
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    hidden = (x @ model.net1.weight.T + model.net1.bias).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ model.net2.weight.T + model.net2.bias)


def test_toy_data_are_the_same_for_a_seed_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    first, again, other = toy_regression(), toy_regression(), toy_regression(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, Datasets)
    for part, same, differing, size in zip(first, again, other, (1600, 200, 200), strict=True):
        inputs, targets = tensors(part)
        assert (inputs.shape, targets.shape) == ((size, 10), (size, 5))
        assert all(torch.equal(a, b) for a, b in zip(tensors(part), tensors(same), strict=True))
        assert not torch.equal(inputs, tensors(differing)[0])


def test_toy_data_without_held_out_parts():
    data = toy_regression(num_samples=50, val_fraction=0, test_fraction=0)
    assert (len(data.train), data.val, data.test) == (50, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("global_batch_size", [20, 40])
def test_the_toy_loss_more_than_halves_in_ten_epochs(global_batch_size):
    data, model = toy_regression(), seeded(ToyModel)
    inputs, targets = tensors(data.train)
    val_inputs, val_targets = tensors(data.val)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def val_loss():
        with torch.no_grad():
            return nn.functional.mse_loss(model(val_inputs), val_targets).item()

    first = val_loss()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for batch in torch.randperm(len(inputs), generator=generator).split(global_batch_size):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    assert val_loss() < first / 2


def test_over_two_devices_it_is_the_toy_model():
    toy, parallel = seeded(ToyModel, seed=7), seeded(lambda: ToyModelParallel(devices=["cpu", "cpu"]), seed=7)
    assert list(parallel.state_dict()) == list(toy.state_dict())
    for name, weight in toy.state_dict().items():
        assert torch.equal(parallel.state_dict()[name], weight)
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(parallel(x), toy(x))


@pytest.mark.parametrize("k", [3, 4])
def test_over_more_devices_it_has_a_layer_on_each(k):
    model = seeded(lambda: ToyModelParallel(devices=["cpu"] * k))
    assert [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")] == [
        *[(10, 10)] * (k - 1),
        (5, 10),
    ]
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    expected = x
    for number in range(1, k):
        expected = model.get_submodule(f"net{number}")(expected).relu()
    torch.testing.assert_close(model(x), model.get_submodule(f"net{k}")(expected))


def test_each_layer_is_on_its_device_and_the_output_on_the_last():
    model = seeded(lambda: ToyModelParallel(devices=["cpu", "meta"]))
    assert model.get_submodule("net1").weight.device.type == "cpu"
    assert model.get_submodule("net2").weight.device.type == "meta"
    assert model(torch.zeros(3, 10)).device.type == "meta"


@pytest.mark.parametrize("devices", [[], ["cpu"]])
def test_less_than_two_devices_are_refused(devices):
    with pytest.raises(ConfigError, match=rf"got {len(devices)} device(.|\n)*gpus_per_process=2"):
        ToyModelParallel(devices=devices)


def test_the_network_for_digits_has_the_layers_it_should():
    model = seeded(ConvNet)
    kinds = [type(module).__name__ for module in model.modules() if not list(module.children())]
    assert kinds == [
        *["Conv2d", "ReLU", "Conv2d", "ReLU", "MaxPool2d", "Dropout", "Flatten"],
        *["Linear", "ReLU", "Dropout", "Linear"],
    ]
    shapes = [tuple(p.shape) for p in model.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 3, 3), (32, 32, 3, 3), (128, 4608), (10, 128)]
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.25, 0.5]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_digits_are_all_there_once_and_the_same_for_a_seed(own_state):
    data, again, other = digits(), digits(), digits(seed=1)
    assert [len(tensors(part)[0]) for part in data] == [1257, 180, 360]
    images, labels = tensors(data.train)
    assert images.shape[1:] == (1, 28, 28)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert abs(images.mean().item()) < 1e-4
    assert images.std().item() == pytest.approx(1, abs=1e-4)

    everything = torch.cat([tensors(part)[0].flatten(1) for part in data])
    assert len(everything.unique(dim=0)) == 1797
    for part, same in zip(data, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(part), tensors(same), strict=True))
        assert len(tensors(part)[1].unique()) == 10
    assert not torch.equal(labels, tensors(other.train)[1])


def test_digits_do_not_depend_on_the_number_of_threads(own_state):
    made = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made.append([tensors(part)[0] for part in digits()])
    for again in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], again, strict=True))


def test_digits_in_another_size_and_split(own_state):
    data = digits(size=8, val_size=100, test_size=200)
    assert [len(tensors(part)[0]) for part in data] == [1497, 100, 200]
    assert tensors(data.test)[0].shape == (200, 1, 8, 8)
