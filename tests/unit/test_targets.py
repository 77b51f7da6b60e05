"""`_target_` nodes checked before anything is built: each mistake with its key and what is right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from framework.errors import TargetError
from tests.helpers.internals import check_node, check_targets, import_target, requires, takes

FAKES = "tests.unit.fake_targets"
LR = "torch.optim.lr_scheduler"
# What the framework passes.
PLAIN: dict[str, Any] = {}
MODEL = {"supplied": ("devices",)}
OPTIMIZER = {"positional": 1}
SCHEDULE = {**OPTIMIZER, "supplied": ("total_steps",)}


def node(name: str, **keywords: Any) -> dict[str, Any]:
    """Return a node for the fake of this name, or for a full name."""
    return {"_target_": name if "." in name else f"{FAKES}.{name}", **keywords}


def config(**changes: Any) -> Any:
    sections = {
        "model": node("Net", activation=node("torch.nn.ReLU")),
        "data": {"datasets": node("datasets", parts=2), "collate_fn": None, "sampler": None},
        "task": node("framework.tasks.Supervised", loss=node("torch.nn.MSELoss"), metrics={}),
        "strategy": node("framework.strategies.auto"),
        "peft": None,
        "optimizer": node("torch.optim.SGD", lr=0.1),
        "scheduler": {"schedule": node("framework.optim.cosine", warmup_steps=2)},
        "logger": {"one": node("FakeLogger", prefix="x")},
        "callbacks": {"one": node("Observer")},
        "objects": None,
        **changes,
    }
    for name in ("data", "scheduler"):
        sections[name] = SimpleNamespace(**sections[name])
    return SimpleNamespace(**sections)


def test_what_fits_passes() -> None:
    check_targets(config())
    check_targets(config(scheduler={"schedule": None}))


@pytest.mark.parametrize("is_package", [False, True])
def test_a_package_that_hides_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_package: bool
) -> None:
    name = f"twice_{is_package}"
    own = tmp_path / "own" / name
    installed = tmp_path / "installed" / name
    for folder in (installed, own):
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(folder.parent)
    (own / "__init__.py").touch()
    (installed / "part.py").touch()
    advice = "delete this __init__.py, and both folders are found"
    if is_package:
        (installed / "__init__.py").touch()
        advice = "rename it."
    with pytest.raises(TargetError, match=f"there is no part in {name} .*It hides {installed}: {advice}"):
        import_target(f"{name}.part.Model")


def test_folders_that_both_count_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("own", "installed"):
        (tmp_path / folder / "shared").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "own" / "shared" / "mine.py").touch()
    with pytest.raises(TargetError, match=r"there is no Model in shared.mine \(\S+mine.py\)\.$"):
        import_target("shared.mine.Model")


@pytest.mark.parametrize(
    ("given", "supplied", "message"),
    [
        (node("torch.optim.SGD", momentun=0.9), OPTIMIZER, "Did you mean k.momentum? It takes lr, momentum, "),
        (node("torch.optim.SGD", lr="abc"), OPTIMIZER, "k.lr=abc: must be a number for torch.optim.SGD."),
        (node("torch.optim.SGD", params=[]), OPTIMIZER, "k.params is filled in by the framework. Leave it out."),
        (node(f"{LR}.StepLR"), SCHEDULE, f"k.step_size is required by {LR}.StepLR"),
        (node("Watcher", patience=1), PLAIN, f"k.patience: {FAKES}.Watcher has no such keyword"),
        (node("torch.nn.Lineer"), PLAIN, "k._target_=torch.nn.Lineer: there is no Lineer in torch.nn. Did you mean"),
        (node("torch.optm.SGD"), PLAIN, "there is no optm in torch. Did you mean torch.optim?"),
        (node(FAKES), PLAIN, "it is a module and can't be called."),
        (node("FakeTask", loss=node("torch.nn.MSELoss", reductoin="mean")), PLAIN, "Did you mean k.loss.reduction?"),
        (
            node("FakeTask", loss={"parts": [node("torch.nn.Linear", in_features=1)]}),
            PLAIN,
            "k.loss.parts.0.out_features is required by torch.nn.Linear",
        ),
    ],
)
def test_each_mistake_names_its_key(given: Any, supplied: Any, message: str) -> None:
    (mistake,) = check_node(given, "k", **supplied)
    assert message in mistake


@pytest.mark.parametrize(
    ("given", "supplied"),
    [
        (node(f"{LR}.OneCycleLR", max_lr=1, total_steps=5), SCHEDULE),
        (node("framework.optim.cosine"), SCHEDULE),
        (node("Anything", whatever=1), MODEL),
        (node("FakeTask", loss=node("torch.nn.Linear", _partial_=True)), PLAIN),
        (node("FakeTask", loss=node("no.such"), _recursive_=False), PLAIN),
    ],
)
def test_what_could_be_right_is_not_refused(given: Any, supplied: Any) -> None:
    assert list(check_node(given, "k", **supplied)) == []


def test_every_mistake_of_every_section_is_reported() -> None:
    wrong = node("torch.no_such")
    sections: dict[str, Any] = dict.fromkeys(("model", "task", "strategy", "optimizer"), wrong)
    sections |= {"data": {"datasets": wrong, "collate_fn": None, "sampler": None}, "scheduler": {"schedule": wrong}}
    sections |= {"logger": {"a": wrong}, "callbacks": {"b": wrong}}
    with pytest.raises(TargetError) as caught:
        check_targets(config(**sections))
    keys = [line.partition("._target_=")[0] for line in str(caught.value).splitlines()]
    of_one = ["model", "data.datasets", "task", "strategy", "optimizer"]
    assert keys == [*of_one, "logger.a", "callbacks.b", "scheduler.schedule"]


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "missing_import.py").write_text("import no_such_package")
    with pytest.raises(TargetError, match="because it imports no_such_package, which isn't installed"):
        import_target("missing_import.Thing")
    (tmp_path / "failing_import.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_target("failing_import.Thing")


def test_arguments_of_a_target_are_known() -> None:
    assert takes(node("Spread"), "devices")
    assert not takes(node("Anything"), "devices")
    assert requires(node("framework.optim.cosine"), "total_steps")
    assert not requires(node("framework.optim.cosine", total_steps=3), "total_steps")
    assert not requires(node(f"{LR}.OneCycleLR"), "total_steps")
