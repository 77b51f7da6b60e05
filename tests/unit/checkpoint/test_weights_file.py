"""Weights that something else has written: their formats, their names, and what doesn't fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from framework.checkpoint import find_weights
from framework.errors import CheckpointError, ConfigError
from framework.strategies import FSDP, Pipeline
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, InitConfig, Loaded, Texts, full_tensor, load_what_fits, read_weights

pytestmark = pytest.mark.usefixtures("own_state")


class Body(nn.Sequential):
    """Tied: the last layer has the weight of the first one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3))
        self[2].weight = self[0].weight


def values(model: nn.Module, *, seed: int = 1) -> dict[str, Tensor]:
    """Other ones than the model has, the same for tied names."""
    generator = torch.Generator().manual_seed(seed)
    made = dict[int, Tensor]()
    return {
        name: made.setdefault(tensor.data_ptr(), torch.rand(tensor.shape, generator=generator).to(tensor.dtype))
        for name, tensor in model.state_dict().items()
    }


def init(*skip: str, strict: bool = True, **rename: str) -> InitConfig:
    return InitConfig(
        rename={name.replace("__", "."): new for name, new in rename.items()}, skip=Texts(skip), strict=strict
    )


def load(model: nn.Module, state: Any, settings: InitConfig | None = None) -> Loaded:
    return load_what_fits(model, state, settings or init(), source="a file", context=cpu_context())


def assert_holds(model: nn.Module, state: dict[str, Tensor], *, but: str = "-") -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(full_tensor(tensor), state[name]) == (not name.startswith(but)), name


def pickled(**options: Any) -> Callable[[dict[str, Tensor], Path], None]:
    return lambda state, file: torch.save(state, file, **options)


def wrapped(key: str) -> Callable[[dict[str, Tensor], Path], None]:
    return lambda state, file: torch.save({"epoch": 1, key: state, "optimizer": {}}, file)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.pt", pickled()),
        ("a.pth", pickled(_use_new_zipfile_serialization=False)),
        ("a.bin", wrapped("model")),
        ("a.ckpt", wrapped("state_dict")),
        ("a.safetensors", lambda state, file: save_file({k: v.clone() for k, v in state.items()}, file)),
    ],
)
def test_files(tmp_path: Path, name: str, write: Callable[[dict[str, Tensor], Path], None]) -> None:
    model = Body()
    state = values(model)
    write(state, tmp_path / name)
    files = find_weights(tmp_path / name)
    assert files == (tmp_path / name,)
    load(model, read_weights(files))
    assert_holds(model, state)


def test_a_folder_in_several_files(tmp_path: Path) -> None:
    model = Body()
    state = values(model)
    # transformers leaves out tied weights, too.
    del state["2.weight"]
    places = {name: f"model-0000{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in sorted(set(places.values())):
        save_file({name: state[name] for name in state if places[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    files = find_weights(tmp_path)
    assert files is not None
    assert len(load(model, read_weights(files)).loaded) == len(state)
    assert_holds(model, state | {"2.weight": state["0.weight"]})
    (tmp_path / "model-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names files that aren't there: model-00001\.safetensors"):
        find_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json can't be read: KeyError"):
        find_weights(tmp_path)


def test_possible_checkpoints_are_left_to_find(tmp_path: Path) -> None:
    assert find_weights(tmp_path) is None
    assert find_weights(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model": {}, "args": argparse.Namespace(lr=1)}, "it holds argparse.Namespace, and Python objects could run"),
        ([1, 2], "holds list. It must be a state dict"),
        ({"epoch": 1}, "holds a dict of epoch. It must be a state dict, or have one as state_dict or model"),
    ],
)
def test_files_without_weights(tmp_path: Path, content: Any, said: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said):
        read_weights([tmp_path / "a.pt"])


def test_patterns_rename_in_order_and_skip() -> None:
    model = Body()
    state = values(model)
    given = {f"module.net.{name}": tensor for name, tensor in state.items()}
    given["module.net.head.weight"] = given.pop("module.net.3.weight")
    given["module.net.3.bias"] = torch.zeros(7)
    before = model.state_dict()["3.bias"].clone()
    settings = InitConfig(rename={r"^module\.": "", r"net\.(\d)": r"\1", "net.head": "3"}, skip=Texts((r"3\.b",)))
    loaded = load(model, given, settings)
    assert_holds(model, {**state, "3.bias": before})
    assert (loaded.left_out, loaded.kept) == (["3.bias"], ["3.bias"])
    assert loaded.describe().splitlines() == [
        "Weights of a file: 10 tensors loaded",
        "  left out: 3.bias",
        "  as the model was built: 3.bias",
    ]
    assert "\n  loaded: 0.weight, 0.bias, 1.weight, " in loaded.describe(shown=None)


def converted(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a state whose floating-point tensors have another type."""
    changed = dict(state)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            changed[name] = tensor.to(dtype)
    return changed


def test_other_types_are_converted() -> None:
    model = Body().double()
    state = converted(values(model), torch.half)
    load(model, state)
    assert_holds(model, converted(state, torch.double))


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


STATE = values(Body())


class Unfitting(NamedTuple):
    state: Any
    error: type[Exception]
    says: str
    settings: InitConfig = init()


WRONG = [
    Unfitting(
        state=without(STATE, "3.bias"),
        error=CheckpointError,
        says=r"(?s)don't fit Body.*not in the file: 3\.bias\nUse init\.rename",
    ),
    Unfitting(
        state=STATE | {"4.bias": torch.ones(3)},
        error=CheckpointError,
        says=r"not in the model: 4\.bias\n.*init\.strict=false",
    ),
    Unfitting(
        state=STATE | {"3.weight": torch.ones(5, 4)},
        settings=init(strict=False),
        error=CheckpointError,
        says=r"(?s)3\.weight: \(5, 4\) float32 in the file, \(3, 4\) float32 in the model\n.*init\.skip=\[3\.weight\]",
    ),
    Unfitting(
        state=STATE | {"3.bias": torch.ones(3).to(torch.int8)}, error=CheckpointError, says=r"\(3,\) int8 in the file"
    ),
    Unfitting(
        state={"a": torch.ones(1)}, settings=init(strict=False), error=CheckpointError, says="no name is in both"
    ),
    Unfitting(
        state=STATE,
        settings=init("runing_mean"),
        error=ConfigError,
        says=r"a file or the model matches 'runing_mean'\. Did you mean 1\.running_mean\?\nThe names are 0",
    ),
    Unfitting(
        state={"encoder.a": torch.ones(1)},
        settings=init(encodr="b"),
        error=ConfigError,
        says=r"in a file matches 'encodr'\. Did you mean encoder\?",
    ),
    Unfitting(
        state=STATE,
        settings=InitConfig(rename={r"^(\d)": r"\2"}),
        error=ConfigError,
        says=r"can't replace '\^\(\\\\d\)': invalid group reference",
    ),
    Unfitting(
        state=STATE,
        settings=InitConfig(rename={r"^\d": "0"}),
        error=ConfigError,
        says="gives 0.weight and 1.weight of a file the same name, 0.weight",
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=[case.says[:30] for case in WRONG])
def test_what_does_not_fit_is_named(case: Unfitting) -> None:
    with pytest.raises(case.error, match=case.says):
        load(Body(), case.state, case.settings)


def test_without_strict_the_rest_is_listed() -> None:
    model = Body()
    before = model.state_dict()["3.bias"].clone()
    loaded = load(model, without(STATE, "3.bias") | {"4.bias": torch.ones(3)}, init(strict=False))
    assert (loaded.left_out, loaded.kept) == (["4.bias"], ["3.bias"])
    assert_holds(model, {**STATE, "3.bias": before})


def test_tied_names_are_skipped_together() -> None:
    model = Body()
    before = model.state_dict()["0.weight"].clone()
    loaded = load(model, without(STATE, "2.weight") | {"0.weight": torch.ones(9, 9)}, init(r"0\.weight"))
    assert (loaded.left_out, sorted(loaded.kept)) == (["0.weight"], ["0.weight", "2.weight"])
    assert_holds(model, {**STATE, "0.weight": before, "2.weight": before})


def parted(context: Context, kind: str) -> tuple[Loaded, dict[str, Tensor], list[str]]:
    """A model of which each rank has a part; the errors of what doesn't fit."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    others = values(model, seed=2)
    state = values(model) | {"9.bias": torch.ones(1)}
    if kind == "fsdp":
        wrapped = FSDP(context=context).wrap(model)
    else:
        wrapped = Pipeline(context=context, num_microbatches=2).wrap(model)
    errors = []
    for wrong in (state, without(state, "1.bias", "9.bias"), state | {"2.bias": torch.ones(9)}):
        with pytest.raises(CheckpointError) as caught:
            load_what_fits(wrapped, wrong, init(), source="a file", context=context)
        errors.append(str(caught.value).partition(".\n" if "don't fit" in str(caught.value) else ":\n")[2])
    rest = without(others, "1.bias") | {"9.bias": torch.ones(1)}
    loaded = load_what_fits(wrapped, rest, init(r"^0\.b", strict=False), source="", context=context)
    return loaded, {name: full_tensor(each).clone() for name, each in wrapped.state_dict().items()}, errors


@pytest.mark.multiproc
@pytest.mark.parametrize("kind", ["fsdp", "pipeline"])
def test_each_rank_loads_its_own_part(rank_pool: Any, kind: str) -> None:
    """Shards of each tensor, or stages: names of other ranks are neither missing nor unexpected."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    for ranks in (2, 3):
        answers = rank_pool.run(parted, kind, ranks=ranks)
        whole = {name: tensor for _, part, _ in answers for name, tensor in part.items()}
        assert whole.keys() == model.state_dict().keys()
        for name, tensor in values(model, seed=2).items():
            assert torch.equal(whole[name], tensor) == (name not in ("0.bias", "1.bias")), name
        for loaded, _, errors in answers:
            assert (loaded.left_out, sorted(loaded.kept)) == (["0.bias", "9.bias"], ["0.bias", "1.bias"])
            assert [error.split("\n")[0] for error in errors] == [
                "  not in the model: 9.bias",
                "  not in the file: 1.bias",
                "  2.bias: (9,) float32 in the file, (3,) float32 in the model",
            ]
