"""`benchmarks/resume.py`: runs that are killed at random moments and resumed, and what it says of them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from benchmarks import resume
from benchmarks.resume import Case, Kill, Result, Setup, Wholes, differences, draw, run, table

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    return Wholes(tmp_path_factory.mktemp("whole"), data_root=None)


@pytest.mark.exhaustive
def test_kills_in_training_and_saving_resume_exactly(wholes: Wholes) -> None:
    kills = (Kill("training", 0.7), Kill("saving", 0.2))
    assert run(Case(0, Setup("toy", 3, "averaged"), kills), wholes).wrong == ()
    other = wholes.of(Setup("toy", 3, "plain")).run_dir
    found = list(differences(wholes.of(Setup("toy", 3, "averaged")).run_dir, other))
    for what in ("model.", "training.optimizer", "metrics.jsonl"):
        assert any(line.startswith(what) for line in found)
    assert list(differences(other, other)) == []
    case = Case(0, Setup("toy", 2, "plain"), kills[:1])
    text = table([Result(case, (), kills=1), Result(case, ("model.x: the tensors differ",), kills=1)])
    assert "| toy | 2 | 2 | 2 | 1 |" in text


def test_a_seed_is_one_case() -> None:
    cases = [draw(seed, recipes=["toy", "digits"], processes=(1, 4)) for seed in range(60)]
    assert cases == [draw(seed, recipes=["toy", "digits"], processes=(1, 4)) for seed in range(60)]
    assert {case.setup.num_processes for case in cases} == {1, 2, 3, 4}
    kills = chain.from_iterable(case.kills for case in cases)
    assert {kill.moment for kill in kills} == set(resume.MOMENTS)
    assert {case.setup.name for case in cases} == set(resume.SETUPS)


def test_records_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_dir, hashed in (("one", "aa"), ("other", "bb")):
        (tmp_path / run_dir / "record").mkdir(parents=True)
        row = '{"step": 1, "epoch": 0, "indices": [[0]], "inputs": ["x"], "gradients": {"w": "%s"}, "weights": {}, '
        row += '"buffers": {}, "optimizer": {}, "generators": {}}\n'
        (tmp_path / run_dir / "record" / "rank_0.jsonl").write_text(row % hashed)
    assert resume.main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out == "step 1, rank 0: gradients w differs: aa and bb\n"
    assert resume.main(["compare", str(tmp_path / "one"), str(tmp_path / "one")]) == 0
