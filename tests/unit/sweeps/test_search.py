"""A search by Optuna itself: what it suggests, prunes and remembers, whoever is killed, and what it refuses."""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from framework.errors import ConfigError
from tests.helpers.internals import OptunaSearch, SweepFolder, importances, is_over, search_module
from tests.unit.sweeps.searches import (
    OVERRIDES,
    TPE,
    ask_all,
    loss,
    new_search,
    new_sweep,
    run_all,
    run_trial,
    settings_of,
    work,
)

RANDOM = {"_target_": "optuna.samplers.RandomSampler"}
CMA_ES = {"_target_": "optuna.samplers.CmaEsSampler"}
GP = {"_target_": "optuna.samplers.GPSampler", "n_startup_trials": 4}
MEDIAN = {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 3}
HYPERBAND = {"_target_": "optuna.pruners.HyperbandPruner", "min_resource": 1, "max_resource": 9}

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk", "optuna_is_quiet")


@pytest.fixture
def optuna_is_quiet() -> Any:
    """Put back how much Optuna says, which is a setting of the process."""
    verbosity = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(verbosity)


def trials_in(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """Return what Optuna itself reads in the journal of a sweep."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend)).trials


# Suggestions


def test_tpe_finds_better_values_than_chance(tmp_path: Path) -> None:
    """Over five seeds each, the median of the best of 40 trials."""
    best: dict[str, list[float]] = {"tpe": [], "random": []}
    for seed in range(5):
        for name, sampler in {"tpe": TPE, "random": RANDOM}.items():
            search = new_search(tmp_path / f"{name}{seed}", settings_of(sampler=sampler, seed=seed, n_trials=40))
            best[name].append(min(value for _, value in run_all(search)))
    assert statistics.median(best["tpe"]) < 0.5 * statistics.median(best["random"])


@pytest.mark.parametrize(
    ("sampler", "n_trials"), [(TPE, 18), (RANDOM, 6), (CMA_ES, 18), (GP, 7)], ids=["TPE", "random", "CMA-ES", "GP"]
)
def test_suggestions_depend_on_seed_and_results_alone(sampler: dict[str, Any], n_trials: int, tmp_path: Path) -> None:
    """A search whose worker is replaced before every trial makes those of one that isn't; another seed makes others."""
    settings = settings_of(sampler=sampler, n_trials=n_trials)
    undisturbed = run_all(new_search(tmp_path / "undisturbed", settings))
    folder = new_sweep(tmp_path / "interrupted", settings)
    trials = []
    while (asked := OptunaSearch(settings, folder).ask()) is not None:
        # Killed before its result is known, and continued.
        (resumed,) = OptunaSearch(settings, folder).open_trials()
        assert resumed == asked
        trials.append((asked.overrides, run_trial(OptunaSearch(settings, folder), resumed)))
    assert trials == undisturbed
    assert len(set(trials)) == n_trials

    of_another_seed = new_search(tmp_path / "seed", settings_of(sampler=sampler, seed=1, n_trials=1)).ask()
    assert of_another_seed is not None
    assert of_another_seed.overrides != undisturbed[0][0]


def test_cma_es_moves_to_better_values(tmp_path: Path) -> None:
    settings = settings_of("x=interval(-4,4)", "n=interval(1,9)", sampler=CMA_ES, n_trials=40)
    values = [value for _, value in run_all(new_search(tmp_path, settings))]
    assert statistics.mean(values[-10:]) < 0.5 * statistics.mean(values[:10])


def test_a_gaussian_process_finds_the_best_value_soon(tmp_path: Path) -> None:
    """In 12 trials, of which chance gets no nearer than 0.14 with six seeds."""
    settings = settings_of("x=interval(-4,4)", "n=interval(1,9)", sampler=GP, n_trials=12)
    assert min(value for _, value in run_all(new_search(tmp_path, settings))) < 0.1


def test_a_seed_of_the_sampler_takes_precedence(tmp_path: Path) -> None:
    first = new_search(tmp_path / "a", settings_of(sampler={**TPE, "seed": 7}, seed=0)).ask()
    second = new_search(tmp_path / "b", settings_of(sampler={**TPE, "seed": 7}, seed=1)).ask()
    assert first == second


def test_the_direction_is_that_of_the_mode(tmp_path: Path) -> None:
    settings = settings_of("x=interval(0,1)", mode="max", n_trials=30)
    search = new_search(tmp_path, settings)
    drawn = []
    while (asked := search.ask()) is not None:
        drawn.append(float(asked.overrides[0].removeprefix("x=")))
        search.tell(asked.index, value=drawn[-1], state="finished")
    assert statistics.mean(drawn[-10:]) > 0.8


def test_the_order_of_typed_keys_changes_no_suggestion(tmp_path: Path) -> None:
    suggested = []
    for number, overrides in enumerate((OVERRIDES, OVERRIDES[::-1])):
        search = new_search(tmp_path / str(number), settings_of(*overrides, n_trials=14))
        suggested.append([sorted(overrides) for overrides, _ in run_all(search)])
    assert suggested[0] == suggested[1]


# Ends of trials


def test_failures_do_not_end_a_search(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(n_trials=4))
    assert search.ask() is not None
    search.tell(0, value=None, state="failed")
    for value in (math.nan, -math.inf, 0.5):
        asked = search.ask()
        assert asked is not None
        search.tell(asked.index, value=value, state="finished")
    # The total counts them, too.
    assert search.ask() is None
    assert [trial.state for trial in trials_in(tmp_path)] == [TrialState.FAIL] * 3 + [TrialState.COMPLETE]
    assert trials_in(tmp_path)[3].value == 0.5


def test_the_first_end_of_a_trial_counts(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of())
    assert search.ask() is not None
    search.tell(0, value=1.0, state="finished")
    search.tell(0, value=2.0, state="finished")
    search.tell(0, value=None, state="failed")
    assert search.report(0, step=9, value=0.0) is False
    (trial,) = trials_in(tmp_path)
    assert (trial.state, trial.value, trial.intermediate_values) == (TrialState.COMPLETE, 1.0, {})


def test_failed_trials_can_run_again(tmp_path: Path) -> None:
    settings = settings_of(n_trials=3)
    search = new_search(tmp_path, settings)
    asked = [search.ask() for _ in range(3)]
    search.tell(0, value=None, state="failed")
    search.tell(1, value=0.5, state="finished")
    assert search.reopen_failed() == {0}
    # Whoever continues the search after a kill sees it.
    assert OptunaSearch(settings, SweepFolder(tmp_path)).open_trials() == [asked[0], asked[2]]
    assert search.reopen_failed() == frozenset()
    search.tell(0, value=0.25, state="finished")
    assert search.open_trials() == [asked[2]]
    assert search.ask() is None
    assert [trial.value for trial in trials_in(tmp_path)] == [None, 0.5, None, 0.25]


def test_a_search_is_over_when_all_trials_have_ended(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(n_trials=2))
    file = SweepFolder(tmp_path).study_file
    assert not is_over(tmp_path / "nothing.log", n_trials=0)
    assert search.ask() is not None
    search.tell(0, value=1.0, state="finished")
    assert not is_over(file, n_trials=2)
    assert search.ask() is not None
    assert not is_over(file, n_trials=2)
    search.tell(1, value=None, state="failed")
    assert is_over(file, n_trials=2)
    assert not is_over(file, n_trials=3)
    search.reopen_failed()
    assert not is_over(file, n_trials=2)
    # Whoever continues it is told what is wrong.
    file.write_text("[]\n")
    assert not is_over(file, n_trials=2)


def test_a_total_can_be_raised(tmp_path: Path) -> None:
    folder = new_sweep(tmp_path, settings_of(n_trials=3))
    assert len(run_all(OptunaSearch(settings_of(n_trials=3), folder))) == 3
    more = OptunaSearch(settings_of(n_trials=5), folder)
    indices = []
    while (asked := more.ask()) is not None:
        indices.append(asked.index)
    assert indices == [3, 4]


# Pruning


def test_the_median_pruner_ends_a_bad_trial(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(pruner=MEDIAN))
    for _ in range(3):
        asked = search.ask()
        assert asked is not None
        run_trial(search, asked)
    good = search.ask()
    bad = search.ask()
    assert good is not None
    assert bad is not None
    assert not search.report(good.index, step=0, value=-10.0)
    assert search.report(bad.index, step=0, value=1000.0)
    search.tell(bad.index, value=1000.0, state="pruned")
    pruned = trials_in(tmp_path)[bad.index]
    assert (pruned.state, pruned.value) == (TrialState.PRUNED, 1000.0)
    # The worker was killed before it told that: the resumed trial reports the same again.
    assert not search.report(good.index, step=0, value=-10.0)


def test_nothing_is_pruned_without_a_pruner(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(pruner=None))
    for value in (*[0.0] * 6, 1000.0):
        asked = search.ask()
        assert asked is not None
        assert not search.report(asked.index, step=0, value=value)
        search.tell(asked.index, value=value, state="finished")


@pytest.mark.parametrize("pruner", [MEDIAN, HYPERBAND], ids=lambda node: node["_target_"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_pruner_knows_nan_and_infinite_values(pruner: dict[str, Any], mode: str, tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(pruner=pruner, mode=mode, n_trials=30))
    # It would be the best value, were it one.
    infinite = {"min": -math.inf, "max": math.inf}[mode]
    without_numbers: list[bool] = []
    with_numbers: list[bool] = []
    while (asked := search.ask()) is not None:
        has_numbers = asked.index % 3 < 2
        values = [0.5, 0.5] if has_numbers else [infinite, math.nan]
        is_pruned = False
        for step, value in zip((3, 9), values, strict=True):
            is_pruned |= search.report(asked.index, step=step, value=value)
        search.tell(asked.index, value=values[-1], state="pruned" if is_pruned else "finished")
        (with_numbers if has_numbers else without_numbers).append(is_pruned)
    # Once there is something to compare with, all that have no number are pruned.
    assert without_numbers[3:] == [True] * 7
    assert not all(with_numbers)


def test_hyperband_ends_what_is_not_promoted(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(pruner=HYPERBAND, n_trials=40))
    pruned = []
    while (asked := search.ask()) is not None:
        value = loss(asked)
        is_pruned = any(search.report(asked.index, step=step, value=value) for step in (1, 3, 9))
        search.tell(asked.index, value=value, state="pruned" if is_pruned else "finished")
        if is_pruned:
            pruned.append(value)
    finished = [trial.value for trial in trials_in(tmp_path) if trial.value is not None and trial.value not in pruned]
    assert len(pruned) > 10
    assert statistics.median(finished) < statistics.median(pruned)


# Kills, and several workers


def start(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_search_killed_many_times_loses_and_repeats_nothing(tmp_path: Path) -> None:
    settings = settings_of(n_trials=60, pruner=MEDIAN)
    undisturbed = run_all(new_search(tmp_path / "undisturbed", settings))
    folder = new_sweep(tmp_path / "killed", settings)
    told = tmp_path / "told"
    draws = random.Random(0)
    num_kills = 0
    start_s = time.monotonic()
    while True:
        num_bytes = size_of(folder.study_file)
        worker = start(work, settings, folder, told)
        # It has begun to write, however slow this machine is.
        while worker.is_alive() and size_of(folder.study_file) == num_bytes:
            time.sleep(0.001)
        worker.join(draws.uniform(0, 0.03))
        if worker.exitcode is not None:
            break
        worker.kill()
        worker.join()
        num_kills += 1
    # No kill costs 30 s, as Optuna's own lock would, nor any noticeable time.
    assert time.monotonic() - start_s < 5 + num_kills
    assert worker.exitcode == 0
    assert num_kills >= 10

    trials = trials_in(folder.path)
    assert [trial.value for trial in trials] == [value for _, value in undisturbed]
    assert all(trial.state == TrialState.COMPLETE for trial in trials)
    lines = [line.split() for line in told.read_text().splitlines()]
    indices = [int(index) for index, _ in lines]
    assert len(set(indices)) == len(indices)
    assert all(float(value) == trials[int(index)].value for index, value in lines)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_that_ask_at_the_same_time_get_different_trials(tmp_path: Path) -> None:
    settings = settings_of(n_trials=40)
    folder = new_sweep(tmp_path, settings)
    files = [tmp_path / "first", tmp_path / "second"]
    all_are_there = multiprocessing.get_context("fork").Barrier(len(files))
    workers = [start(ask_all, settings, folder, file, all_are_there) for file in files]
    for worker in workers:
        worker.join()
    shares = [[int(line) for line in file.read_text().split()] for file in files]
    assert sorted(shares[0] + shares[1]) == list(range(40))
    assert all(shares)
    trials = OptunaSearch(settings, folder).open_trials()
    assert len({trial.overrides for trial in trials}) == 40


def test_threads_share_a_search(tmp_path: Path) -> None:
    search = new_search(tmp_path, settings_of(n_trials=20))
    indices: list[int] = []

    def ask() -> None:
        while (asked := search.ask()) is not None:
            indices.append(asked.index)
            run_trial(search, asked)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(indices) == list(range(20))
    assert search.open_trials() == []


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    """Wherever a kill or a full disk ended the line of a trial; what was complete before it stays."""
    settings = settings_of(n_trials=20)
    folder = new_sweep(tmp_path, settings)
    search = OptunaSearch(settings, folder)
    for _ in range(12):
        asked = search.ask()
        assert asked is not None
        run_trial(search, asked)
    before = folder.study_file.read_bytes()
    expected = search.ask()
    after = folder.study_file.read_bytes()
    assert expected is not None
    for num_bytes in {*range(len(before), len(after), 50), len(after) - 1}:
        folder.study_file.write_bytes(after[:num_bytes])
        assert OptunaSearch(settings, folder).ask() == expected
        assert OptunaSearch(settings, folder).open_trials() == [expected]
        assert len(trials_in(tmp_path)) == 13


@pytest.mark.parametrize("begin", [0, 1, 200])
def test_a_damaged_last_line_is_cut_off(tmp_path: Path, begin: int) -> None:
    """A power cut may leave zeros where the last lines were, up to the end of the file or to a line's."""
    settings = settings_of(n_trials=20)
    folder = new_sweep(tmp_path, settings)
    search = OptunaSearch(settings, folder)
    for _ in range(3):
        asked = search.ask()
        assert asked is not None
        run_trial(search, asked)
    before = folder.study_file.read_bytes()
    expected = search.ask()
    after = folder.study_file.read_bytes()
    zeros = bytes(len(after) - len(before) - begin - 1)
    for end in (b"\0", b"\n"):
        folder.study_file.write_bytes(after[: len(before) + begin] + zeros + end)
        assert OptunaSearch(settings, folder).ask() == expected
        assert OptunaSearch(settings, folder).open_trials() == [expected]


# Refusals


def test_the_journal_of_another_sweep_is_refused(tmp_path: Path) -> None:
    settings = settings_of()
    other = new_search(tmp_path / "other", settings)
    other.ask()
    folder = new_sweep(tmp_path / "own", settings, created="2026-01-02T00:00:00")
    folder.study_file.write_bytes((tmp_path / "other" / "study.log").read_bytes())
    with pytest.raises(ConfigError, match=r"study.log belongs to another sweep\. Put this sweep's own"):
        OptunaSearch(settings, folder)

    # One that something else made.
    folder.study_file.unlink()
    backend = optuna.storages.journal.JournalFileBackend(str(folder.study_file))
    optuna.create_study(storage=optuna.storages.JournalStorage(backend), study_name="mine")
    with pytest.raises(ConfigError, match="belongs to another sweep"):
        OptunaSearch(settings, folder)


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    settings = settings_of()
    folder = new_sweep(tmp_path, settings)
    OptunaSearch(settings, folder).ask()
    journal = folder.study_file.read_bytes()
    for text in (b"", b"{}\n", b"[1]\n", b'{"op_code": 99}\n', b"\0\0\0\n"):
        folder.study_file.write_bytes(text + b"not JSON\n" + journal)
        with pytest.raises(ConfigError, match=r"study.log can't be read as Optuna's journal .* Restore it"):
            OptunaSearch(settings, folder)


def test_a_continued_sweep_searches_the_same(tmp_path: Path) -> None:
    folder = new_sweep(tmp_path, settings_of())
    with pytest.raises(
        ConfigError, match=r"(?s)has searched other values so far.*x: -4.0 to 4.0 before, 0.0 to 1.0 now"
    ):
        OptunaSearch(settings_of("x=interval(0,1)", *OVERRIDES[1:]), folder)
    with pytest.raises(ConfigError, match=r"checkpoint\.mode=max, and the sweep has searched with min so far"):
        OptunaSearch(settings_of(mode="max"), folder)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"sampler": {"_target_": "optuna.samplers.GridSampler", "search_space": {}}},
            r"GridSampler: a grid is `-m key=a,b` with sweep=grid",
        ),
        (
            {"sampler": {"_target_": "optuna.samplers.TPESamplr"}},
            r"there is no TPESamplr in optuna.samplers. Did you mean optuna.samplers.TPESampler\?",
        ),
        (
            {"sampler": {"_target_": "optuna.pruners.MedianPruner"}},
            "this is no BaseSampler of Optuna. Name one, such as",
        ),
        ({"sampler": {}}, r"sweep.sampler has no _target_, such as sweep.sampler._target_=optuna.samplers.TPESampler"),
        (
            {"pruner": {"_target_": "collections.Counter"}},
            "Counter: this is no BasePruner of Optuna. Name one, such as",
        ),
        ({"sampler": {**TPE, "n_startup_trial": 3}}, "Did you mean sweep.sampler.n_startup_trials"),
        ({"sampler": {**TPE, "n_startup_trials": "three"}}, "must be a number"),
        ({"pruner": {**MEDIAN, "warmup": 3}}, "sweep.pruner.warmup: optuna.pruners.MedianPruner has no such keyword"),
        ({"pruner": {**MEDIAN, "n_warmup_steps": -1}}, "MedianPruner refuses its keywords: .* cannot be negative"),
        (
            {"sampler": {**TPE, "seeds": 1}, "pruner": {**MEDIAN, "warmup": 3}},
            "(?s)has 2 mistakes:.*sweep.sampler.seeds.*sweep.pruner.warmup",
        ),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(
    changes: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    settings = settings_of(**changes)
    with pytest.raises(ConfigError, match=refusal):
        settings.check()
    folder = new_sweep(tmp_path, settings)
    with pytest.raises(ConfigError, match=refusal):
        OptunaSearch(settings, folder)
    assert not folder.study_file.exists()


def test_a_search_needs_values_to_choose_from() -> None:
    with pytest.raises(ConfigError, match=r"no key has values to choose from. Type one such as 'optimizer.lr=tag"):
        settings_of("seed=1").check()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(search_module, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs Optuna, which isn't installed: pip install 'framework\[sweep\]'"):
        settings_of().check()
    assert importances(tmp_path / "study.log") == {}
    monkeypatch.undo()
    monkeypatch.setattr(optuna, "__version__", "2.10.1")
    with pytest.raises(ConfigError, match=r"needs Optuna 5, and 2\.10\.1 is installed"):
        settings_of().check()
    monkeypatch.undo()
    monkeypatch.setattr(search_module, "find_spec", lambda name: None if name == "cmaes" else find_spec(name))
    with pytest.raises(ConfigError, match="it needs cmaes, which isn't installed"):
        settings_of(sampler=CMA_ES).check()


# Importances


def test_the_key_that_matters_is_the_most_important(tmp_path: Path) -> None:
    settings = settings_of("+x=interval(-4,4)", "z=interval(0,1)", "c=a,b", sampler=RANDOM, n_trials=40)
    search = new_search(tmp_path, settings)
    run_some(search, 3)
    # Too few to say anything.
    assert importances(tmp_path / "study.log") == {}
    run_some(search, 37)
    shares = importances(tmp_path / "study.log")
    assert next(iter(shares)) == "x"
    assert shares.keys() == {"x", "z", "c"}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["x"] > 0.6


def run_some(search: OptunaSearch, number: int) -> None:
    for _ in range(number):
        asked = search.ask()
        assert asked is not None
        x = float(asked.overrides[0].removeprefix("+x="))
        search.tell(asked.index, value=(x - 1) ** 2, state="finished")


def test_nothing_is_said_of_a_single_key_or_no_journal(tmp_path: Path) -> None:
    run_all(new_search(tmp_path, settings_of("x=interval(-4,4)", n_trials=8)))
    journal = tmp_path / "study.log"
    assert importances(journal) == {}
    journal.write_text("not JSON\n\n")
    assert importances(journal) == {}
    journal.unlink()
    assert importances(journal) == {}
    assert not journal.exists()
