"""Runs that are killed at random moments and started again: a few of those that `benchmarks/resume.py` draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import resume
from benchmarks.resume import Case, Kill, Result, Setup, Wholes, differences, draw, run, table

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("whole"), data_root=None)


@pytest.mark.parametrize(
    ("processes", "name", "kills"),
    [
        pytest.param(2, "workers", (Kill("training", 0.3),), marks=pytest.mark.exhaustive),
        (3, "averaged", (Kill("training", 0.7), Kill("saving", 0.2))),
    ],
)
def test_a_killed_run_ends_as_if_it_never_had_been(
    wholes: Wholes, processes: int, name: str, kills: tuple[Kill, ...]
) -> None:
    result = run(Case(0, Setup("toy", processes, name), kills), wholes)
    assert result.wrong == ()


@pytest.mark.exhaustive
def test_two_runs_that_differ_are_told_apart(wholes: Wholes) -> None:
    one, other = (wholes.of(Setup("toy", 1, name)).run_dir for name in ("averaged", "plain"))
    found = list(differences(one, other))
    assert any(line.startswith("model.") for line in found)
    assert any(line.startswith("training.optimizer") for line in found)
    assert any(line.startswith("metrics.jsonl") for line in found)
    assert list(differences(one, one)) == []


def test_a_seed_is_one_case() -> None:
    cases = [draw(seed, recipes=["toy", "digits"], processes=(1, 4)) for seed in range(60)]
    assert cases == [draw(seed, recipes=["toy", "digits"], processes=(1, 4)) for seed in range(60)]
    assert {case.setup.num_processes for case in cases} == {1, 2, 3, 4}
    assert {kill.moment for case in cases for kill in case.kills} == set(resume.MOMENTS)
    assert {case.setup.name for case in cases} == set(resume.SETUPS)


def test_the_table_counts_what_ended_equal() -> None:
    case = Case(0, Setup("toy", 2, "plain"), (Kill("training", 0.5),))
    text = table([Result(case, (), kills=1), Result(case, ("model.x: the tensors differ",), kills=1)])
    assert "| toy | 2 | 2 | 2 | 1 |" in text
    assert "| all |  | 2 | 2 | 1 |" in text


def test_records_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_dir, hashed in (("one", "aa"), ("other", "bb")):
        (tmp_path / run_dir / "record").mkdir(parents=True)
        row = '{"step": 1, "epoch": 0, "indices": [[0]], "inputs": ["x"], "gradients": {"w": "%s"}, "weights": {}, '
        row += '"buffers": {}, "optimizer": {}, "generators": {}}\n'
        (tmp_path / run_dir / "record" / "rank_0.jsonl").write_text(row % hashed)
    assert resume.main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == "step 1, rank 0: gradients w differs: aa and bb\n"
    assert resume.main(["compare", str(tmp_path / "one"), str(tmp_path / "one")]) == 0
