from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from framework.errors import TargetError
from framework.targets import (
    LOGGER,
    MODEL,
    OPTIMIZER,
    PLAIN,
    SCHEDULE,
    STRATEGY,
    Supplied,
    check_node,
    check_targets,
    import_target,
    requires,
    takes,
)

FAKES = "tests.unit.fake_targets"
CLEAN: dict[str, Any] = {
    "model": {"_target_": f"{FAKES}.Net", "activation": {"_target_": "torch.nn.ReLU"}},
    "data": {"datasets": {"_target_": f"{FAKES}.datasets", "parts": 2}},
    "task": {"_target_": "framework.tasks.Supervised", "loss": {"_target_": "torch.nn.MSELoss"}, "metrics": {}},
    "strategy": {"_target_": "framework.strategies.auto"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "scheduler": {"schedule": {"_target_": "framework.optim.cosine", "warmup_steps": 2}},
    "logger": {"one": {"_target_": f"{FAKES}.FakeLogger", "prefix": "x"}},
    "callbacks": {"one": {"_target_": f"{FAKES}.Observer"}},
}


def config(**changes: Any) -> Any:
    sections = {**CLEAN, **changes}
    for name in ("data", "scheduler"):
        sections[name] = SimpleNamespace(**sections[name])
    return SimpleNamespace(**sections)


def test_what_fits_passes():
    check_targets(config())
    check_targets(config(scheduler={"schedule": None}))


@pytest.mark.parametrize(
    ("node", "supplied", "message"),
    [
        (
            {"_target_": "torch.optim.SGD", "momentun": 0.9},
            OPTIMIZER,
            "k.momentun: torch.optim.SGD has no such keyword. Did you mean k.momentum? It takes lr, momentum, ",
        ),
        (
            {"_target_": "torch.optim.SGD", "params": []},
            OPTIMIZER,
            "k.params is filled in by the framework. Leave it out.",
        ),
        ({"_target_": f"{FAKES}.Spread", "devices": []}, MODEL, "k.devices is filled in"),
        ({"_target_": "framework.strategies.DDP", "context": 1}, STRATEGY, "k.context is filled in"),
        ({"_target_": f"{FAKES}.FakeLogger", "run_dir": "x"}, LOGGER, "k.run_dir is filled in"),
        (
            {"_target_": "torch.optim.lr_scheduler.StepLR"},
            SCHEDULE,
            "k.step_size is needed by torch.optim.lr_scheduler.StepLR",
        ),
        ({"_target_": f"{FAKES}.FakeLogger"}, PLAIN, "k.run_dir is needed by"),
        (
            {"_target_": f"{FAKES}.Watcher", "patience": 1},
            PLAIN,
            "k.patience: tests.unit.fake_targets.Watcher has no such keyword",
        ),
        (
            {"_target_": "torch.nn.Lineer"},
            PLAIN,
            "k._target_=torch.nn.Lineer: there is no Lineer in torch.nn. Did you mean torch.nn.Linear?",
        ),
        ({"_target_": "torch.optm.SGD"}, PLAIN, "there is no optm in torch. Did you mean torch.optim?"),
        ({"_target_": "torh.optim.SGD"}, PLAIN, "there is no module torh. Did you mean torch?"),
        ({"_target_": "torch.nn.Linear.sise"}, PLAIN, "there is no sise in torch.nn.Linear."),
        ({"_target_": "framework.topology.x.y"}, PLAIN, "there is no x in framework.topology."),
        ({"_target_": f"{FAKES}.NUMBER"}, PLAIN, "it is a int and can't be called."),
        ({"_target_": FAKES}, PLAIN, "it is a module and can't be called. It has Net, Spread, "),
        (
            {"_target_": f"{FAKES}.FakeTask", "loss": {"_target_": "torch.nn.MSELoss", "reductoin": "mean"}},
            PLAIN,
            "k.loss.reductoin: torch.nn.MSELoss has no such keyword. Did you mean k.loss.reduction?",
        ),
        (
            {"_target_": f"{FAKES}.FakeTask", "loss": {"parts": [{"_target_": "torch.nn.Linear", "in_features": 1}]}},
            PLAIN,
            "k.loss.parts.0.out_features is needed by torch.nn.Linear",
        ),
        ({"_target_": f"{FAKES}.Net", "_partial_": True}, MODEL, "k._partial_ can't be used here"),
        ({"_target_": f"{FAKES}.Net", "_args_": [3]}, MODEL, "k._args_ can't be used here"),
    ],
)
def test_each_mistake_is_told_with_its_key_and_what_is_right(node, supplied, message):
    (told,) = check_node(node, "k", supplied)
    assert message in told


@pytest.mark.parametrize(
    ("node", "supplied"),
    [
        ({"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 1, "total_steps": 5}, SCHEDULE),
        ({"_target_": "framework.optim.cosine"}, SCHEDULE),
        ({"_target_": f"{FAKES}.Anything", "whatever": 1}, MODEL),
        ({"_target_": "builtins.dict", "whatever": 1}, PLAIN),
        ({"_target_": f"{FAKES}.FakeTask", "loss": {"_target_": "torch.nn.Linear", "_partial_": True}}, PLAIN),
        ({"_target_": f"{FAKES}.FakeTask", "loss": {"_target_": "torch.nn.Linear", "_args_": [1, 2]}}, PLAIN),
        ({"_target_": f"{FAKES}.FakeTask", "loss": {"_target_": "no.such"}, "_recursive_": False}, PLAIN),
    ],
)
def test_what_could_be_right_is_not_refused(node, supplied):
    assert check_node(node, "k", supplied) == []


def test_every_section_is_checked_and_all_mistakes_are_told_at_once():
    wrong = {"_target_": "torch.no_such"}
    changed = config(
        model=wrong,
        data={"datasets": wrong},
        task=wrong,
        strategy=wrong,
        optimizer=wrong,
        scheduler={"schedule": wrong},
        logger={"a": wrong},
        callbacks={"b": wrong},
    )
    with pytest.raises(TargetError) as caught:
        check_targets(changed)
    keys = [line.partition("._target_=")[0] for line in str(caught.value).splitlines()]
    expected = "model data.datasets task strategy optimizer scheduler.schedule logger.a callbacks.b"
    assert keys == expected.split()


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        (tmp_path / "written_for_a_test.py").write_text(text)
        monkeypatch.delitem(sys.modules, "written_for_a_test", raising=False)
        return "written_for_a_test.Thing"

    yield write
    sys.modules.pop("written_for_a_test", None)


def test_a_module_that_lacks_another_says_which(module):
    with pytest.raises(TargetError, match="because it imports no_such_package, which isn't there"):
        import_target(module("import no_such_package"))


def test_a_module_that_fails_raises_its_own_exception(module):
    with pytest.raises(ZeroDivisionError):
        import_target(module("1 / 0"))


def test_keywords_are_looked_for_by_name():
    assert takes({"_target_": f"{FAKES}.Spread"}, "devices")
    assert not takes({"_target_": f"{FAKES}.Anything"}, "devices")
    assert requires({"_target_": "framework.optim.cosine"}, "total_steps")
    assert not requires({"_target_": "framework.optim.cosine", "total_steps": 3}, "total_steps")
    assert not requires({"_target_": "torch.optim.lr_scheduler.OneCycleLR"}, "total_steps")


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"lr": "abc"}, "optimizer.lr=abc: torch.optim.SGD takes a number there."),
        ({"lr": 0.1, "momentum": "much"}, "optimizer.momentum=much: torch.optim.SGD takes a number there."),
    ],
)
def test_text_where_only_a_number_fits_is_a_mistake(changes, mistake):
    node = {"_target_": "torch.optim.SGD", **changes}
    assert check_node(node, "optimizer", Supplied(positional=1)) == [mistake]
