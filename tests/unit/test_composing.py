"""The configurations of a sweep's trials are those of the trials alone, and are composed faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException

from tests.helpers.internals import compose_config, hydra_for, resolved

Composed = tuple[dict[str, Any], tuple[str, ...]]


def compose(overrides: list[str]) -> Composed:
    return resolved(compose_config("config", overrides))


def compose_alone(overrides: list[str]) -> Composed:
    with hydra_for(None):
        return compose(overrides)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose folder `more` has an option of the optimizer, and a group of its own."""
    files = {
        "optimizer/fast": "_target_: torch.optim.SGD\nlr: 9\n",
        "size/large": "width: 100\n",
        "size/told": "by: ['${hydra:job.num}', '${hydra:job.override_dirname}', '${hydra:overrides.task}']\n",
    }
    for name, content in files.items():
        file = tmp_path / "more" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "trials",
    [
        ["seed=1", "seed=2", "seed=3", "seed=1 data.batch_size=8", "seed=2 data.batch_size=9"],
        ["optimizer=adam", "optimizer=sgd", "optimizer=adam", "optimizer=adam optimizer.lr=3", "optimizer=sgd"],
        ["+optimizer.maximize=true", "++optimizer.maximize=false", "+optimizer.maximize=true optimizer.lr=2"],
        ["~optimizer.momentum", "optimizer.momentum=0.5", "~optimizer.momentum seed=2", "seed=2"],
        ["optimizer={lr:3}", "optimizer={lr:4,weight_decay:1}", "optimizer={lr:3}", "optimizer={lr:5}"],
        ["callbacks=[ema] callbacks.ema.decay=0.3", "callbacks=[ema]", "callbacks=[ema] callbacks.ema.decay=0.4"],
        ["~scheduler", "scheduler=step", "~scheduler", "~scheduler seed=3"],
        ["tags=[a]", "tags=[a,b]", "tags=[]", "tags=[c]"],
        ["seed=1 seed=2", "seed=2 seed=1", "seed=2 seed=2", "seed=1 seed=1"],
        ["optimizer.lr=${seed} seed=4", "optimizer.lr=${seed} seed=5", "optimizer.lr=${seed} seed=6"],
        [f"hydra.searchpath=[file://more] +size=told hydra.job.num={number} seed={number}" for number in range(4)],
        [f"hydra.searchpath=[file://more] optimizer=fast seed={number}" for number in range(4)],
        [f"hydra.searchpath=[file://more] +size=large seed={number}" for number in range(4)],
    ],
)
def test_a_trial_is_composed_as_alone(trials: list[str], own_folder: Path) -> None:
    commands = [["recipe=toy", *trial.split(" ")] for trial in trials]
    with hydra_for(None):
        together = [compose(overrides) for overrides in commands]
    assert together == [compose_alone(overrides) for overrides in commands]


def test_a_trial_does_not_change_the_next_one() -> None:
    with hydra_for(None):
        for _ in range(3):
            config = compose_config("config", ["recipe=toy", "tags=[a]"])
            config.tags.append("b")
            config.optimizer.lr = -1
            config.hydra.job.name = "another"
        raw, _ = compose(["recipe=toy", "tags=[a]"])
    assert raw == compose_alone(["recipe=toy", "tags=[a]"])[0]


@pytest.mark.parametrize("wrong", ["optimizer.lrr=1", "+seed=1", "optimizer=adm", "data.batch_size=1,2", "seed=(1"])
def test_a_mistake_is_the_same_in_every_trial(wrong: str) -> None:
    said = []
    with hydra_for(None):
        for seed in range(4):
            with pytest.raises(HydraException) as raised:
                compose(["recipe=toy", wrong, f"tags=[{seed}]"])
            said.append((type(raised.value), str(raised.value)))
    assert len(set(said)) == 1


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how many YAML files have been read since it was last asked."""
    num_files = 0
    load = yaml.load

    def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_files
        num_files += 1
        return load(*arguments, **keywords)

    def ask() -> int:
        nonlocal num_files
        number = num_files
        num_files = 0
        return number

    monkeypatch.setattr(yaml, "load", counting)
    return ask


def test_each_file_is_read_once(num_read: Callable[[], int]) -> None:
    with hydra_for(None):
        compose(["recipe=toy", "optimizer=sgd"])
        num_files = num_read()
        assert num_files > 10
        for seed in range(10):
            compose(["recipe=toy", "optimizer=sgd", f"seed={seed}", f"optimizer.lr={seed}"])
        assert num_read() == 0

        for seed in range(10):
            compose(["recipe=toy", "optimizer=adam", f"seed={seed}"])
        assert num_read() == 1


def test_files_are_composed_once_for_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    num_composed = 0
    with hydra_for(None):
        compose(["recipe=toy", "optimizer=sgd"])
        merge = ConfigLoaderImpl._compose_config_from_defaults_list

        def counting(*arguments: Any, **keywords: Any) -> Any:
            nonlocal num_composed
            num_composed += 1
            return merge(*arguments, **keywords)

        monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", counting)
        for seed in range(20):
            compose(["recipe=toy", "optimizer=sgd", f"seed={seed}"])
            compose(["recipe=toy", "optimizer=adam", f"optimizer.lr={seed}"])
    assert num_composed == 2


def test_a_later_command_reads_files_again(own_folder: Path) -> None:
    overrides = ["recipe=toy", "hydra.searchpath=[file://more]", "optimizer=fast"]
    assert compose_alone(overrides)[0]["optimizer"]["lr"] == 9
    (own_folder / "more" / "optimizer" / "fast.yaml").write_text("_target_: torch.optim.SGD\nlr: 7\n")
    assert compose_alone(overrides)[0]["optimizer"]["lr"] == 7
