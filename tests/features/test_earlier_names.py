"""What earlier versions wrote: user code, recipes, overrides and pickles with names that have changed since."""

from __future__ import annotations

from pathlib import Path

import pytest

import framework
import framework.types
from tests.helpers.internals import compose, objects_module, present_overrides, without_removed

CSV = {"_target_": "framework.loggers.CSVLogger"}
JSONL = {"_target_": "framework.loggers.JsonlLogger"}


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        (["recipe=toy", "optimizer.lr=0.1"], ["recipe=toy", "optimizer.lr=0.1"]),
        (["launcher=in_place"], ["launcher=in_process"]),
        (["launcher.name=adopted"], ["launcher=external"]),
        (["logger=csv"], ["logger=[jsonl]"]),
        (["logger=[jsonl,csv,console]"], ["logger=[jsonl,console]"]),
        (["logger=tensorboard"], ["logger=tensorboard"]),
        (["trainer.cpu_affinity=true", "+trainer.log_rank_losses=true", "collectives.delay=2s", "seed=1"], ["seed=1"]),
    ],
)
def test_overrides_of_earlier_runs_are_updated(earlier: list[str], present: list[str]) -> None:
    assert present_overrides(earlier) == present


def test_metrics_of_a_csv_run_go_on_as_jsonl() -> None:
    assert without_removed({"logger": {"csv": CSV}}) == {"logger": {"jsonl": JSONL}}
    own = {"jsonl": {**JSONL, "own": 1}, "csv": CSV}
    assert without_removed({"logger": own}) == {"logger": {"jsonl": {**JSONL, "own": 1}}}


@pytest.mark.parametrize(
    ("earlier", "present"),
    [
        ("StepReport", "StepInfo"),
        ("EpochReport", "EpochInfo"),
        ("EvalReport", "EvalInfo"),
        ("Phase", "Objective"),
        ("Report", "Log"),
    ],
)
def test_earlier_public_names_warn(earlier: str, present: str) -> None:
    with pytest.warns(FutureWarning, match=f"framework.{earlier} is now framework.{present}"):
        found = getattr(framework, earlier)
    assert found is getattr(framework, present)


def test_pickles_find_classes_under_earlier_names() -> None:
    assert objects_module.Given is objects_module.ObjectFactory
    assert framework.types.StepReport is framework.StepInfo
    assert framework.types.Phase is framework.Objective
    assert framework.types.Image is framework.Image


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(("earlier", "present"), [("in_place", "InProcessLauncher"), ("adopted", "ExternalLauncher")])
def test_recipes_choose_launchers_by_earlier_names(
    earlier: str, present: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(f"# @package _global_\ndefaults:\n  - toy\n  - override /launcher: {earlier}\n")
    assert compose.main(["recipe=mine", "--cfg", "job", "-p", "launcher"]) == 0
    assert present in capsys.readouterr().out


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("logger=csv", "framework.load(RUN).history.to_csv"),
        ("trainer.cpu_affinity=true", "numactl and srun"),
        ("trainer.log_rank_losses=true", "StepInfo.loss"),
        ("collectives.delay=2s", "examples/collectives.py"),
    ],
)
def test_removed_options_say_what_to_do(
    typed: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose.main(["recipe=toy", typed]) == 2
    assert advice in capsys.readouterr().err
