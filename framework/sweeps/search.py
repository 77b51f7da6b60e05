"""A search: Optuna chooses each trial of a sweep by the results of those before it. No torch here.

`Search` is what a sweep's worker needs of one, `OptunaSearch` is Optuna's. The study is in the sweep's folder, so that
any number of workers, on one machine or several, search together, now or when the sweep is continued.

A trial of the search is a row of the sweep: with `sweep.over=[seed]`, the worker runs it with each seed, reports one of
them, and tells the mean. Here it is one index.

Nothing depends on which worker asks: a trial's sampler is built for it alone, from the seed and the trial's index. With
one worker at a time, a search that was killed and continued makes the same suggestions as one that wasn't.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from framework.config.instantiate import instantiate
from framework.config.mistakes import raise_mistakes
from framework.config.schema import Mode, Node
from framework.config.targets import check_node, import_target, takes
from framework.errors import ConfigError, DiskError, TargetError
from framework.sweeps.folder import SearchPlan, SweepFolder, SweepPlan
from framework.sweeps.journal import JournalLock, open_storage, open_study
from framework.sweeps.space import Choice, Dimension, Integers, Interval, Space

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_INSTALL = "pip install 'framework[sweep]'"
_MIN_VERSION = 5
# Optuna numbers trials, too, but one that is run again has several of its numbers.
_INDEX = "index"
# With fewer finished trials, nothing can be said about what mattered.
_MIN_FINISHED = 4

End = Literal["finished", "failed", "pruned"]
"""How a trial of a search ended."""


@final
@dataclass(frozen=True)
class Asked:
    """A trial that a search has chosen."""

    # 0, 1, … in the order in which they were chosen.
    index: int
    # Those of the searched keys. The command's other overrides are added to them.
    overrides: tuple[str, ...]


class Search(Protocol):
    """What chooses trials by results. Several workers may use one at the same time."""

    def ask(self) -> Asked | None:
        """Return a new trial; None if there are `sweep.n_trials` of them."""

    def open_trials(self) -> list[Asked]:
        """Return the trials that were asked for and not told: they run, or the worker that ran them has ended.

        One whose run has finished is told, any other is resumed, under its index, so that none is lost or repeated.
        """

    def report(self, index: int, *, step: int, value: float) -> bool:
        """Note a validation's value of `checkpoint.monitor`, and return True if the trial should be pruned.

        step: what trials are compared at, from 0 on, such as the number of the validation. The value of a step that
        has one already, as in a trial that was resumed, is ignored.
        """

    def tell(self, index: int, *, value: float | None, state: End) -> None:
        """Note how a trial ended. The first time counts, so telling it again after a kill does no harm.

        value: of a finished trial. Without one, or if it is infinite or NaN, the trial is noted as failed. The value of
        a pruned one is the last that was reported.
        """

    def reopen_failed(self) -> frozenset[int]:
        """Have failed trials reported and told again, because they are run again; return their indices.

        They keep their indices and values.
        """


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What a search is to do, as the command says it."""

    space: Space
    # As `sweep.sampler`: a class of Optuna's or the user's. It gets the seed, if it takes one.
    sampler: Node
    # As `sweep.pruner`.
    pruner: Node | None
    # Of all workers together, also after the search is continued, whatever became of them.
    n_trials: int
    # `checkpoint.mode`.
    mode: Mode
    # The command's `seed`; a `seed` of the sampler's own takes precedence.
    seed: int

    def check(self) -> None:
        """Raise ConfigError with everything that is wrong, before anything runs. Imports Optuna and the targets."""
        _check_installed()
        mistakes = []
        if not self.space.dimensions:
            mistakes.append(
                "sweep.sampler is set, and no key has values to choose from. Type one such as "
                "'optimizer.lr=tag(log,interval(1e-4,1))', or sweep=grid."
            )
        for key, node in {"sweep.sampler": self.sampler, "sweep.pruner": self.pruner}.items():
            if node is not None:
                mistakes += _node_mistakes(key, node)
        raise_mistakes(mistakes)
        self.build_sampler(0)
        self.build_pruner()

    def plan(self) -> SearchPlan:
        """Return what sweep.json has of the search."""
        return SearchPlan(self.space.as_json(), self.sampler, self.pruner, self.n_trials)

    def check_continues(self, plan: SweepPlan) -> None:
        """Raise ConfigError if what a sweep has found so far doesn't fit these settings."""
        if plan.search is None:
            raise ConfigError("The sweep is a grid, and a search can't continue it. Type sweep=grid, or start another.")
        if self.mode != plan.mode:
            raise ConfigError(
                f"checkpoint.mode={self.mode}, and the sweep has searched with {plan.mode} so far. Type that, or start "
                "another sweep."
            )
        changes = self.space.changes(plan.search.space)
        if changes:
            raise ConfigError(
                "The sweep has searched other values so far. Type those to continue it, or start another sweep.\n  "
                + "\n  ".join(changes)
            )

    def build_sampler(self, index: int) -> BaseSampler:
        """Return the sampler of one trial. Raises ConfigError if its class refuses its keywords."""
        node = dict(self.sampler)
        if takes(node, "seed"):
            seed = node.get("seed")
            if seed is None:
                seed = self.seed
            node["seed"] = _seed_of(seed, index)
        sampler: BaseSampler = _build("sweep.sampler", node)
        return sampler

    def build_pruner(self) -> BasePruner:
        """Return the pruner, one that prunes nothing if there is none. Raises ConfigError as `build_sampler` does."""
        from optuna.pruners import NopPruner

        if self.pruner is None:
            return NopPruner()
        pruner: BasePruner = _build("sweep.pruner", self.pruner)
        return pruner


@final
class OptunaSearch:
    """A search by Optuna; a `Search`."""

    def __init__(self, settings: SearchSettings, folder: SweepFolder) -> None:
        """Open the journal of a sweep, or create it.

        Raises ConfigError for wrong settings, for a sweep that they don't continue, and for a journal that is damaged
        or another sweep's.
        """
        settings.check()
        import optuna

        plan = SweepPlan.read(folder)
        settings.check_continues(plan)
        # Each trial has a sampler of its own, which would say the same as the one before, such as that CMA-ES draws
        # single values at random.
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._settings = settings
        # Sorted, so that the order in which the keys are typed changes nothing.
        self._distributions = {}
        for key, dimension in sorted(settings.space.dimensions.items()):
            self._distributions[key] = _distribution(dimension)
        self._file = folder.study_file
        self._lock = JournalLock(self._file)
        with self._journal():
            self._study = open_study(self._file, lock=self._lock, sweep=plan.created, mode=settings.mode)

    def check_total(self) -> None:
        """Raise ConfigError if there are more trials than there are to be."""
        with self._journal():
            count = len(self._trials())
        if count > self._settings.n_trials:
            raise ConfigError(
                f"sweep.n_trials={self._settings.n_trials}, and the search has chosen {count} already. It is a total: "
                f"use {count} for no more, or a larger number."
            )

    def ask(self) -> Asked | None:
        with self._journal():
            index = len(self._trials())
            if index >= self._settings.n_trials:
                return None
            # One line in the journal: a process that is killed here leaves a whole trial, or none.
            self._study.add_trial(self._suggestion(index))
            return self._asked(index)

    def open_trials(self) -> list[Asked]:
        with self._journal():
            return [self._asked(index) for index, trial in self._trials().items() if not trial.state.is_finished()]

    def report(self, index: int, *, step: int, value: float) -> bool:
        import optuna

        with self._journal():
            reported = self._trials()[index]
            # Another worker has taken it over and ended it.
            if reported.state.is_finished():
                return False
            # Built anew, because Optuna's pruners remember what they saw first, and other workers saw something else.
            self._study.pruner = self._settings.build_pruner()
            trial = optuna.Trial(self._study, reported._trial_id)
            if step not in reported.intermediate_values:
                # Optuna's pruners know NaN, and take an infinite value for the best or for a number.
                trial.report(value if math.isfinite(value) else math.nan, step)
            with warnings.catch_warnings():
                # NumPy's, if all trials have NaN at this step.
                warnings.simplefilter("ignore", RuntimeWarning)
                return trial.should_prune()

    def tell(self, index: int, *, value: float | None, state: End) -> None:
        from optuna.trial import TrialState

        with self._journal():
            number = self._trials()[index].number
            if state == "pruned":
                self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
            elif state == "finished" and value is not None and math.isfinite(value):
                self._study.tell(number, value, skip_if_finished=True)
            else:
                self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def reopen_failed(self) -> frozenset[int]:
        from optuna.trial import TrialState, create_trial

        with self._journal():
            failed = {index: trial for index, trial in self._trials().items() if trial.state == TrialState.FAIL}
            for trial in failed.values():
                # Optuna changes no trial that has ended.
                self._study.add_trial(
                    create_trial(
                        state=TrialState.RUNNING,
                        params=trial.params,
                        distributions=trial.distributions,
                        user_attrs=trial.user_attrs,
                        system_attrs=trial.system_attrs,
                    )
                )
        return frozenset(failed)

    @contextmanager
    def _journal(self) -> Iterator[None]:
        """Keep the journal from changing meanwhile, for other threads and processes. Raises DiskError."""
        try:
            with self._lock:
                yield
        except OSError as error:
            raise DiskError(f"{self._file} can't be written: {error.strerror or error}.") from error

    def _trials(self) -> dict[int, FrozenTrial]:
        """Return the trials by index; of one that was reopened, the last."""
        trials = {}
        for trial in self._study.get_trials(deepcopy=False):
            trials[trial.user_attrs[_INDEX]] = trial
        return trials

    def _asked(self, index: int) -> Asked:
        return Asked(index, self._settings.space.overrides(self._trials()[index].params))

    def _suggestion(self, index: int) -> FrozenTrial:
        """Return the next trial, which isn't in the journal yet.

        It is asked of a copy of the study in memory: Optuna writes each value that it chooses, and what its samplers
        note, in a line of its own.
        """
        import optuna

        # Without the pruner: Hyperband would show a sampler only the trials of one of its brackets, and each bracket
        # would begin with random trials.
        study = optuna.create_study(
            direction=self._study.direction,
            sampler=self._settings.build_sampler(index),
            pruner=optuna.pruners.NopPruner(),
        )
        study.add_trials(self._study.get_trials(deepcopy=False))
        trial = study.ask(self._distributions)
        trial.set_user_attr(_INDEX, index)
        return study.get_trials(deepcopy=False)[-1]


def is_over(file: Path, *, n_trials: int) -> bool:
    """Return True if a search has chosen all of its trials, and its journal says how each has ended. Changes nothing.

    False if Optuna can't read the journal: whoever continues the search is told why.
    """
    if not _is_installed() or not file.is_file():
        return False
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.load_study(study_name=None, storage=open_storage(file, lock=None))
        has_ended = {trial.user_attrs[_INDEX]: trial.state.is_finished() for trial in study.get_trials(deepcopy=False)}
    # The journal may be damaged or anybody's.
    except Exception:
        return False
    return len(has_ended) >= n_trials and all(has_ended.values())


def importances(file: Path) -> dict[str, float]:
    """Return how much each searched key mattered to the results in a journal, the most important one first.

    The shares add up to 1; see Optuna's `get_param_importances`. Empty if there is no such journal or Optuna can't read
    it, and with a single key or fewer than 4 finished trials, where there is nothing to say. Changes nothing.
    """
    if not _is_installed() or not file.is_file():
        return {}
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shares: dict[str, float] = {}
    with warnings.catch_warnings():
        # Few trials make Optuna warn.
        warnings.simplefilter("ignore")
        try:
            study = optuna.load_study(study_name=None, storage=open_storage(file, lock=None))
            finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if len(finished) >= _MIN_FINISHED and len(finished[0].params) > 1:
                shares = optuna.importance.get_param_importances(study)
        # The journal may be damaged or anybody's, and a report doesn't end for that.
        except Exception:
            return {}
    return {key.lstrip("+"): float(share) for key, share in shares.items() if math.isfinite(share)}


def _distribution(dimension: Dimension) -> BaseDistribution:
    """Return what Optuna draws for a key."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Choice):
        return CategoricalDistribution(dimension.values)
    if isinstance(dimension, Integers):
        return IntDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
    if isinstance(dimension, Interval):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    return IntDistribution(0, len(dimension.values) - 1)


def _seed_of(seed: int, index: int) -> int:
    """Return the seed of one trial's sampler; neighbouring seeds and trials have unrelated ones."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


# Nodes


class _Signatures:
    """The signatures of classes of Optuna, whose `__init__` is decorated and takes no more than it shows."""

    def parameters(self, target: str) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(import_target(target)).parameters

    def confirms(self, target: str) -> bool:
        return True


def _node_mistakes(key: str, node: Node) -> Iterator[str]:
    """Yield what is wrong with the node of a sampler or pruner."""
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler, CmaEsSampler, GridSampler

    name = node.get("_target_")
    if not isinstance(name, str):
        yield f"{key} has no _target_, such as {key}._target_={_EXAMPLES[key]}."
        return
    try:
        target = import_target(name)
    except TargetError as error:
        yield f"{key}._target_={name}: {error}"
        return
    base = BaseSampler if key == "sweep.sampler" else BasePruner
    if not (inspect.isclass(target) and issubclass(target, base)):
        yield f"{key}._target_={name}: this is no {base.__name__} of Optuna. Name one, such as {_EXAMPLES[key]}."
    elif issubclass(target, GridSampler):
        yield f"{key}._target_={name}: a grid is `-m key=a,b` with sweep=grid, which needs no sampler."
    elif issubclass(target, CmaEsSampler) and find_spec("cmaes") is None:
        yield f"{key}._target_={name}: it needs cmaes, which isn't installed: {_INSTALL}"
    else:
        yield from check_node(node, key, signatures=_Signatures())


_EXAMPLES = {"sweep.sampler": "optuna.samplers.TPESampler", "sweep.pruner": "optuna.pruners.MedianPruner"}


def _build(key: str, node: Node) -> Any:
    try:
        return instantiate(node, key=key)
    # Classes of Optuna and of the user may raise anything.
    except Exception as error:
        raise ConfigError(f"{key}: {node['_target_']} refuses its keywords: {error}") from error


def _is_installed() -> bool:
    spec = find_spec("optuna")
    return spec is not None and spec.origin is not None


def _check_installed() -> None:
    """Raise ConfigError unless Optuna is installed, in a version that a search can use."""
    if not _is_installed():
        raise ConfigError(f"sweep.sampler needs Optuna, which isn't installed: {_INSTALL}")
    import optuna

    if int(optuna.__version__.partition(".")[0]) < _MIN_VERSION:
        raise ConfigError(
            f"sweep.sampler needs Optuna {_MIN_VERSION}, and {optuna.__version__} is installed: {_INSTALL}"
        )
