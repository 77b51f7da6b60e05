"""The command: Hydra composes what was typed, the result is parsed and checked, and a job runs.

All configurations of a command (one, or those of a sweep with -m) are composed and checked before the first job runs.
No torch here, and none of Hydra's frames or settings around a job.
"""

from __future__ import annotations

import platform
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.types import RunMode
from omegaconf import DictConfig

from framework.command import document
from framework.command.job import check_request, load_job
from framework.command.mistakes import explain, refuse_words
from framework.command.models import KEY, typed_models
from framework.command.remote_runs import RemoteRuns
from framework.command.request import JobResult, PythonCall, Request
from framework.command.resume import BaseRun, cache_of, find_base, is_trusted, names_a_run, own_outputs, typed_path
from framework.command.words import is_of_submission, is_of_sweeps, is_override
from framework.config.assets import docs_dir, import_from_working_dir, user_config_dir
from framework.config.hydra_compose import (
    MULTIRUN,
    Hydra,
    compose_config,
    current_hydra,
    flag_parser,
    groups_of,
    hydra_for,
    parse_flags,
    refuse_replaced,
    refuse_unused,
    resolved,
    search_path,
    shown_config,
    split_sweep,
    value_of,
    with_override,
    without_swept,
)
from framework.config.jobs import JOBS
from framework.config.parse import normalize_override, parse
from framework.config.renamed import present_override
from framework.config.saved import key_of, merge_overrides, search_path_override
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_WRONG_REQUEST,
    ConfigError,
    FrameworkError,
    StoppedBySignalError,
)
from framework.remote.place import outputs_folder
from framework.system.output import answer, answer_json, check_answered, json_text, tolerant_output
from framework.system.run_dir import new_name
from framework.system.shown_text import shown
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from framework.command.saved_sweep import SavedSweep
    from framework.command.sweep import SweepRequest
    from framework.launch.external_ranks import ExternalRanks
    from framework.launch.fork_server import ForkServer


def main(
    arguments: Sequence[str], *, fork_server: ForkServer | None = None, external_ranks: ExternalRanks | None = None
) -> int:
    """Run the command and return its exit status.

    Mistakes are printed in a few lines. An unexpected exception of a job is raised; in a sweep it is printed, and the
    next job runs.

    Args:
        arguments: those of the command line.
        fork_server: the fork server to start ranks from.
        external_ranks: set on rank 0 of ranks that torchrun, srun or Kubernetes started.
    """
    text = _own_answer(arguments)
    try:
        if text is not None:
            answer(text)
            return 0
        return _Command(arguments, fork_server=fork_server, external_ranks=external_ranks).run().status
    except FrameworkError as error:
        print(shown(str(error)), file=sys.stderr)
        # The mistake may come from a folder `conf` that took precedence unintentionally.
        if isinstance(error, ConfigError) and user_config_dir(Path.cwd()) and Path("conf/config.yaml").is_file():
            print(f"{Path('conf/config.yaml').absolute()} was used instead of the framework's own.", file=sys.stderr)
        return error.exit_status
    except SystemExit:
        # Hydra has printed that there is nothing to show.
        return EXIT_WRONG_REQUEST
    except StoppedBySignalError as stop:
        print(f"Stopped by {stop}", file=sys.stderr)
        return EXIT_STOPPED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_call(overrides: Sequence[str], call: PythonCall, *, fork_server: ForkServer) -> JobResult:
    """Run a job for Python code, as the command does. Raises FrameworkError, also for a wrong request."""
    with tolerant_output():
        return _Command(overrides, fork_server=fork_server, call=call).run()


def default_outputs(*, recipe: Any) -> list[Path]:
    """Return `path.outputs` of a command without arguments in this folder. recipe: one whose file may set it."""
    return _Command([], fork_server=None).own_outputs(recipe=recipe)


def _own_answer(arguments: Sequence[str]) -> str | None:
    """Return what to print for `--version`, which Hydra doesn't know; else None."""
    if "--version" in arguments:
        versions = installed_versions(("framework", "torch", "hydra-core"))
        if document.is_json(arguments):
            return json_text({"python": platform.python_version(), **versions})
        others = f"torch {versions['torch']}, hydra-core {versions['hydra-core']}"
        return f"framework {versions['framework']} (Python {platform.python_version()}, {others})"
    return None


def _by_present_names(override: str) -> str:
    """Return an override by the present names; print them if it has earlier ones."""
    present = present_override(override)
    if present != override:
        print(f"{override} is an earlier name. Type {present}", file=sys.stderr, flush=True)
    return present


def _with_model(typed: Sequence[str], model: str) -> list[str]:
    """Return the overrides with this `checkpoint.path` in place of the typed one."""
    return [*(text for text in typed if key_of(text) != KEY), model]


def _refuse_sweep_keys(overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings of sweeps in a command that makes one run."""
    of_sweeps = [text for text in overrides if is_of_sweeps(text)]
    if of_sweeps:
        raise ConfigError(f"{of_sweeps[0]} is for sweeps. Type -m too, to make one, or leave it out.")


class _Command:
    """One command: its arguments, and what is composed, checked and run for them."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        fork_server: ForkServer | None,
        external_ranks: ExternalRanks | None = None,
        call: PythonCall | None = None,
    ) -> None:
        self._arguments = arguments
        self._fork_server = fork_server
        self._external_ranks = external_ranks
        self._call = call
        self._parser = flag_parser()
        # Words are overrides and, if there are mistakes, anything else that is no flag.
        self._flags, self._words = parse_flags(self._parser, arguments)
        self._config_name = self._flags.config_name or "config"
        self._typed = [_by_present_names(normalize_override(text)) for text in self._flags.overrides]
        if self._flags.config_dir is not None:
            folder = Path(self._flags.config_dir)
            if not folder.is_dir():
                raise ConfigError(f"--config-dir={self._flags.config_dir}: there is no such folder.")
            self._typed.append(search_path_override([f"file://{folder.absolute()}"]))
        self._as_json = document.is_json(self._typed)
        self._typed = [text for text in self._typed if text.partition("=")[0] != document.KEY]
        self._is_sweep = self._flags.multirun or MULTIRUN in self._typed
        # What is typed about submitting the workers of a sweep, whose trials are trainings. Empty: it runs here.
        self._submission: list[str] = []
        names_a_sweep = any(key_of(text) == "sweep.worker" for text in self._typed)
        if (self._is_sweep or names_a_sweep) and "job=submit" in self._typed:
            self._submission = [text for text in self._typed if is_of_submission(text)]
            self._typed = [text for text in self._typed if not is_of_submission(text)]
        self._sweep_name = new_name()
        # Known once `run` has found the saved run that the command starts from, if any.
        self._base: BaseRun
        # The models that a sweep is over, as overrides of `checkpoint.path`; none if it is over a single one, or none.
        self._models: list[str] = []
        self._bases: dict[str, tuple[BaseRun, list[str]]] = {}
        self._search_path: tuple[str, ...] = ()
        self._remote = RemoteRuns(lambda: cache_of(self._typed, compose=self._compose_raw))

    def run(self) -> JobResult:
        """Compose, parse and check the configuration of every job, then run them; return how they ended."""
        import_from_working_dir()
        with hydra_for(self._flags.config_path):
            if not all(is_override(word) for word in self._words):
                refuse_words(self._words, loader=current_hydra().config_loader, is_sweep=self._is_sweep)
            for text in self._typed:
                if key_of(text) == "hydra.searchpath":
                    # Raises ConfigError for a folder that isn't there.
                    search_path(value_of(text))
            saved = self._saved_sweep()
            typed = self._typed
            if saved is not None:
                typed = merge_overrides(saved.plan.overrides, self._changes)
            elif self._is_sweep:
                # `resume=auto` has found none.
                typed = [text for text in typed if key_of(text) != "resume"]
            of_command = typed
            if self._is_sweep:
                self._models = typed_models(typed, fetched=self._remote.checkpoint)
            if self._models:
                # Each of the others is found when its trials are composed.
                typed = _with_model(typed, self._models[0])
            self._base, overrides = self._found_base(typed)
            with self._explained(overrides) as hydra:
                if self._show(hydra, overrides):
                    return JobResult(0)

                common = overrides
                if self._is_sweep:
                    # What all trials of the sweep have in common.
                    common = without_swept(overrides, hydra)
                config = self._compose(common)
                refuse_unused(common, config, compose=self._compose)
                is_new = self._base.found is None
                self._search_path = search_path(config.hydra.searchpath, must_exist=is_new)
                # A file may ask for a sweep, too.
                is_sweep = self._is_sweep or config.hydra.mode is RunMode.MULTIRUN
                if is_sweep:
                    sweep = self._sweep_request(config, typed=of_command, overrides=overrides, saved=saved)
                else:
                    _refuse_sweep_keys(overrides)
                    if is_new:
                        refuse_replaced(overrides, config)
                    raw, task_overrides = resolved(config)
            if is_sweep:
                from framework.command.sweep import run_sweep

                # A search composes trials while others run.
                result = run_sweep(sweep)
                if self._as_json:
                    answer_json(result.results)
                return result

        request = self._request(raw, task_overrides, base=self._base)
        job = load_job(request.config.job)
        result = job.run(request)
        if job.answers_json(request):
            answer_json(job.document(request, result))
        return result

    def own_outputs(self, *, recipe: Any) -> list[Path]:
        """Return `path.outputs` of the command. recipe: one whose file may set it."""
        with hydra_for(self._flags.config_path):
            return own_outputs(self._typed, compose=self._compose_raw, recipe=recipe)

    @contextmanager
    def _explained(self, overrides: Sequence[str]) -> Iterator[Hydra]:
        """Turn an exception that is about the configuration into a ConfigError that explains it."""
        hydra = current_hydra()
        try:
            yield hydra
        except Exception as error:
            explain(error, loader=hydra.config_loader, typed=overrides, is_sweep=self._is_sweep)
            raise

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose_config(self._config_name, overrides)

    def _compose_raw(self, overrides: Sequence[str]) -> Mapping[str, Any]:
        with self._explained(overrides):
            raw, _ = resolved(self._compose(overrides))
            return raw

    def _show(self, hydra: Hydra, overrides: list[str]) -> bool:
        """Print what `--help`, `--cfg` or `--info` asks for; return False if there is no such flag."""
        if self._as_json:
            return self._show_json(hydra, overrides)
        name = self._config_name
        flags = Namespace(**vars(self._flags))
        flags.overrides = overrides
        if flags.help:
            hydra.app_help(name, self._parser, flags)
            pages = "AGENTS.md: one page; own_code.md: write your own; recipes.md: examples"
            print(f"Documentation: {docs_dir()} ({pages})")
        elif flags.hydra_help:
            hydra.hydra_help(name, self._parser, flags)
        elif flags.multirun and (flags.cfg or flags.info):
            raise ConfigError("-m starts several runs, and --cfg and --info show one. Leave one of them out.")
        elif flags.cfg is not None:
            hydra.show_cfg(name, overrides, cfg_type=flags.cfg, package=flags.package, resolve=flags.resolve)
        elif flags.info is not None:
            hydra.show_info(flags.info, config_name=name, overrides=overrides)
        else:
            return False
        check_answered()
        return True

    def _show_json(self, hydra: Hydra, overrides: list[str]) -> bool:
        """Print as JSON what `--help` or `--cfg job` asks for; return False if there is no flag that asks."""
        flags = self._flags
        if flags.help:
            options = groups_of(hydra.config_loader)
            answer_json({"jobs": list(JOBS), "groups": options, "documentation": str(docs_dir())})
            return True
        if flags.cfg == "job" and not flags.multirun:
            answer_json(shown_config(self._compose(overrides), section=flags.package, resolve=flags.resolve))
            return True
        if flags.hydra_help or flags.cfg is not None or flags.info is not None:
            raise ConfigError(
                "format=json can go with --help, --version and --cfg job, not with Hydra's own texts. Leave it out."
            )
        return False

    # Sweeps

    @property
    def _changes(self) -> list[str]:
        """What is typed, apart from the names of runs and sweeps."""
        return [text for text in self._typed if not names_a_run(text) and key_of(text) != "sweep.worker"]

    def _saved_sweep(self) -> SavedSweep | None:
        """Return the sweep on disk that the command continues; None if it begins one, or is no sweep.

        Raises ConfigError if there is no such sweep, or it isn't known to be the user's.
        """
        key = "sweep.worker"
        name = typed_path(self._typed, key)
        if name is not None:
            self._is_sweep = True
        elif self._is_sweep:
            key = "resume"
            name = typed_path(self._typed, key)
        if name is None:
            return None
        from framework.command.saved_sweep import find_saved_sweep

        saved = find_saved_sweep(
            name,
            key=key,
            typed=self._changes,
            outputs=lambda: own_outputs(self._typed, compose=self._compose_raw),
            is_trusted=is_trusted(self._typed),
        )
        if saved is None:
            return None
        self._sweep_name = saved.folder.path.name
        return saved

    def _sweep_request(
        self, config: DictConfig, *, typed: Sequence[str], overrides: Sequence[str], saved: SavedSweep | None
    ) -> SweepRequest:
        """Return what the command asks of a sweep.

        Args:
            config: what its trials have in common.
            typed: what is typed, with what was typed before for a sweep that is continued.
            overrides: those to compose, of the first model if the sweep is over several.
        """
        from framework.command.check_trials import check_trials
        from framework.command.sweep import SweepRequest, check_sweep

        check_sweep(config.hydra, external_ranks=self._external_ranks)
        # Values to sweep over that are set in a file.
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        raw, _ = resolved(config)
        common = parse(self._base.configuration(raw))
        submit = None
        arguments = self._arguments
        if self._submission:
            with_submission = [*without_swept(overrides, current_hydra()), *self._submission]
            raw, _ = resolved(self._compose(with_submission))
            submit = parse(raw).submit
            arguments = [text for text in arguments if not is_of_submission(text)]
        request_of = partial(self._trial, typed=overrides)

        def combine(texts: Sequence[str]) -> list[list[str]]:
            """Return the overrides of each trial, for all combinations of values, and of models if there are some."""
            if not self._models:
                with self._explained(texts):
                    return split_sweep(texts)
            combinations = []
            for model in self._models:
                _, of_model = self._base_of(model)
                with self._explained(of_model):
                    combinations += [[model, *values] for values in split_sweep([*params, *of_model])]
            return combinations

        def compose_trials(combinations: Sequence[Sequence[str]]) -> list[Request]:
            """Return the checked request of each trial. Raises FrameworkError for a mistake in any."""
            if common.job == "plan":
                return [request_of(number, combination) for number, combination in enumerate(combinations)]
            return check_trials(combinations, request_of=request_of)

        return SweepRequest(
            common=common,
            overrides=[*params, *overrides],
            combine=combine,
            compose_trials=compose_trials,
            saved=saved,
            changes=tuple(self._changes),
            typed=tuple(text for text in typed if key_of(text) not in ("resume", "sweep.worker", "sweep.retry")),
            arguments=tuple(arguments),
            search_path=self._search_path,
            fork_server=self._fork_server,
            as_json=self._as_json,
            submit=submit,
            flags=tuple(self._own_flags()),
        )

    def _trial(self, number: int, overrides: Sequence[str], *, typed: Sequence[str]) -> Request:
        """Return what a trial of a sweep is given. typed: the command's overrides, all of whose mistakes are named."""
        of_hydra = [text for text in typed if key_of(text).startswith("hydra")]
        models = [text for text in overrides if key_of(text) == KEY]
        base = self._base
        if models:
            base, _ = self._base_of(models[-1])
        overrides = [text for text in overrides if text not in models]
        with self._explained(typed):
            config = self._compose([*of_hydra, f"hydra.job.num={number}", *overrides])
            if base.found is None:
                refuse_replaced(overrides, config)
            raw, task_overrides = resolved(config)
        return self._request(raw, task_overrides, base=base, number=number)

    def _base_of(self, model: str) -> tuple[BaseRun, list[str]]:
        """Return what the trials of a model are based on, and the overrides to compose; see `find_base`."""
        if model not in self._bases:
            self._bases[model] = self._found_base(_with_model(self._base.typed, model))
        return self._bases[model]

    def _found_base(self, typed: Sequence[str]) -> tuple[BaseRun, list[str]]:
        return find_base(typed, compose=self._compose_raw, change=with_override, swept=self._is_sweep)

    def _request(
        self, composed: Mapping[str, Any], overrides: Sequence[str], *, base: BaseRun, number: int | None = None
    ) -> Request:
        """Return what a job is given. number: of the job in a sweep."""
        raw = base.configuration(composed)
        # Without a job, as in a file of the user's that is half a configuration, `parse` says what is missing.
        if "job" in raw and load_job(raw["job"]).needs_ranks:
            raw = self._remote.pinned(raw)
        if self._call is not None and self._call.name is not None:
            raw["recipe"] = self._call.name
        config = parse(raw)
        document.check_only_typed(raw)
        # How a sweep is run, and what is printed, isn't part of a run.
        raw.pop("sweep", None)
        raw.pop(document.KEY, None)
        all_overrides = base.overrides or overrides
        overrides = tuple(text for text in all_overrides if not names_a_run(text) and not is_of_sweeps(text))
        parent_run = base.parent_run
        arguments = self._arguments
        sub_run = None
        if number is not None:
            # The command that would run this trial alone.
            arguments = [*self._own_flags(), *filter(names_a_run, base.typed), *overrides]
            folder = outputs_folder(config.path) / "multirun"
            # The models of a sweep are in runs of their own, and what they gave is in one place.
            if parent_run is not None and not self._models:
                folder = parent_run / config.job
            sub_run = folder / self._sweep_name / str(number)
        request = Request(
            config=config,
            raw=raw,
            overrides=overrides,
            search_path=self._search_path,
            arguments=tuple(arguments),
            as_json=self._as_json,
            call=self._call,
            fork_server=self._fork_server,
            sub_run=sub_run,
            external_ranks=self._external_ranks,
            is_planned=bool(self._submission),
            parent_run=parent_run,
        )
        check_request(request)
        return request

    def _own_flags(self) -> list[str]:
        """Return the flags that one run of a sweep is started with."""
        left_out = {*self._flags.overrides, "-m", "--multirun"}
        return [text for text in self._arguments if text not in left_out]
