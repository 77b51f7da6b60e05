"""The command: Hydra composes what was typed, the result is parsed and checked, and a job runs.

All configurations of a command (one, or those of a sweep with -m) are composed and checked before the first job runs.
No torch here, and none of Hydra's frames or settings around a job.
"""

from __future__ import annotations

import platform
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra import compose, initialize_config_dir

# Hydra offers its flags, its splitting of sweeps and its application of overrides nowhere else; its version is pinned.
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from framework.command.base_run import BaseRun, find_base, names_a_run, own_outputs
from framework.command.mistakes import explain
from framework.command.request import JobResult, PythonCall, Request, job_module
from framework.command.sweep import Sweep, run_sweep, sweeper_direction
from framework.config.assets import config_dir, docs_dir, import_from_working_dir, user_config_dir
from framework.config.checks import check
from framework.config.parse import normalize_override, parse
from framework.config.renamed import present_override
from framework.config.saved import key_of, search_path_override, value_of
from framework.errors import EXIT_INTERRUPTED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, RunError
from framework.system.run_dir import new_name
from framework.system.shown_text import shown
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from framework.launch.fork_server import ForkServer
    from framework.launch.handshake import ExternalRanks

_MULTIRUN = "hydra.mode=MULTIRUN"
_HYDRA = threading.Lock()


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
    answer = _own_answer(arguments)
    if answer is not None:
        print(answer)
        return 0
    try:
        return _Command(arguments, fork_server=fork_server, external_ranks=external_ranks).run().status
    except FrameworkError as error:
        print(shown(str(error)), file=sys.stderr)
        if isinstance(error, ConfigError) and user_config_dir(Path.cwd()) and Path("conf/config.yaml").is_file():
            print(f"{Path('conf/config.yaml').absolute()} was used instead of the framework's own.", file=sys.stderr)
        return error.exit_status
    except SystemExit:  # Hydra has printed that there is nothing to show
        return EXIT_WRONG_REQUEST
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run_call(overrides: Sequence[str], call: PythonCall, *, fork_server: ForkServer) -> JobResult:
    """Run a job for Python code, as the command does. Raises FrameworkError, also for a wrong request."""
    return _Command(overrides, fork_server=fork_server, call=call).run()


def default_outputs(*, recipe: Any) -> list[Path]:
    """Return `path.outputs` of a command without arguments in this folder. recipe: one whose file may set it."""
    return _Command([], fork_server=None).own_outputs(recipe=recipe)


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Leave Hydra's global state to this thread, and restore that of a program that is a Hydra application itself."""
    with _HYDRA:
        hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
        GlobalHydra.instance().clear()
        try:
            yield
        finally:  # Hydra may have replaced its instances
            GlobalHydra.instance().hydra, HydraConfig.instance().cfg = hydra, config


def _own_answer(arguments: Sequence[str]) -> str | None:
    """Return what to print for `--version` and Bash completion, which Hydra doesn't do as needed; else None."""
    if "--version" in arguments:
        version = installed_versions(("framework", "torch", "hydra-core"))
        others = f"torch {version['torch']}, hydra-core {version['hydra-core']}"
        return f"framework {version['framework']} (Python {platform.python_version()}, {others})"
    if {"-sc", "--shell-completion"} & set(arguments):
        if "install=bash" in arguments:
            return Path(__file__).with_name("completion.bash").read_text()
        if "uninstall=bash" in arguments:
            return "complete -r framework python python3; unset -f _framework_completion"
    return None


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
        self._arguments, self._call = arguments, call
        self._parser = get_args_parser()
        self._flags = _parse_flags(self._parser, arguments)
        self._config_name = self._flags.config_name or "config"
        self._typed = [_of_today(normalize_override(text)) for text in self._flags.overrides]
        if self._flags.config_dir is not None:
            if not Path(self._flags.config_dir).is_dir():
                raise ConfigError(f"--config-dir={self._flags.config_dir}: there is no such folder.")
            self._typed.append(search_path_override([f"file://{Path(self._flags.config_dir).absolute()}"]))
        self._is_sweep = self._flags.multirun or _MULTIRUN in self._typed
        self._sweep_name = new_name()
        self._fork_server, self._adopted_ranks = fork_server, external_ranks
        self._base: BaseRun  # from `run` on
        self._search_path: tuple[str, ...] = ()

    def run(self) -> JobResult:
        """Compose, parse and check the configuration of every job, then run them; return how they ended."""
        import_from_working_dir()
        with self._hydra():
            for text in self._typed:
                if key_of(text) == "hydra.searchpath":
                    _search_path(value_of(text))
            self._base, overrides = find_base(
                self._typed, compose=self._compose_raw, change=_changed, swept=self._is_sweep
            )
            with self._explained(overrides) as hydra:
                if self._show(hydra, overrides):
                    return JobResult(0)
                parsed = OverridesParser.create(hydra.config_loader).parse_overrides(overrides)
                fixed = [str(each.input_line) for each in parsed if not (self._is_sweep and each.is_sweep_override())]
                config = self._compose(fixed)
                is_new = self._base.found is None
                self._search_path = _search_path(config.hydra.searchpath, must_exist=is_new)
                is_sweep = self._is_sweep or config.hydra.mode is RunMode.MULTIRUN
                if is_sweep:
                    self._check_sweep(config.hydra)
                    if not config.hydra.sweeper._target_.endswith(".BasicSweeper"):
                        return JobResult(self._run_sweeper(hydra, overrides, config))
                    compositions = [_resolved(self._compose(job)) for job in _grid(overrides, config.hydra)]
                else:
                    compositions = [_resolved(config)]
        # All are composed and checked before the first one runs.
        if is_sweep:
            requests = [self._request(*each, number=number) for number, each in enumerate(compositions)]
            return JobResult(run_sweep(requests))
        request = self._request(*compositions[0])
        result: JobResult = job_module(request.config.job).main(request)
        return result

    def own_outputs(self, *, recipe: Any) -> list[Path]:
        """Return `path.outputs` of the command. recipe: one whose file may set it."""
        with self._hydra():
            return own_outputs(self._typed, compose=self._compose_raw, recipe=recipe)

    @contextmanager
    def _hydra(self) -> Iterator[None]:
        """Have Hydra compose from the command's folders."""
        Plugins.instance().register(UserConfigFirst)
        folder = config_dir() if self._flags.config_path is None else Path(self._flags.config_path).absolute()
        with _own_hydra(), initialize_config_dir(str(folder), job_name="framework", version_base="1.3"):
            yield

    @contextmanager
    def _explained(self, overrides: Sequence[str]) -> Iterator[Hydra]:
        """Have an exception that is about the configuration become a ConfigError that explains it."""
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            yield hydra
        except Exception as error:
            explain(error, loader=hydra.config_loader, typed=overrides, is_sweep=self._is_sweep)
            raise

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        return compose(self._config_name, list(overrides), return_hydra_config=True)

    def _compose_raw(self, overrides: Sequence[str]) -> Mapping[str, Any]:
        with self._explained(overrides):
            return _resolved(self._compose(overrides))[0]

    def _show(self, hydra: Hydra, overrides: list[str]) -> bool:
        """Print what `--help`, `--cfg` or `--info` asks for; return False if there is no such flag."""
        flags, name = Namespace(**vars(self._flags) | {"overrides": overrides}), self._config_name
        if flags.help:
            hydra.app_help(name, self._parser, flags)
            print(f"Documentation: {docs_dir()} (own_code.md: write your own; recipes.md: examples)")
        elif flags.hydra_help:
            hydra.hydra_help(name, self._parser, flags)
        elif flags.multirun and (flags.cfg or flags.info):
            raise ConfigError("-m starts several runs, and --cfg and --info show one. Leave one of them out.")
        elif flags.cfg is not None:
            hydra.show_cfg(name, overrides, cfg_type=flags.cfg, package=flags.package, resolve=flags.resolve)
        elif flags.info is not None:
            hydra.show_info(flags.info, config_name=name, overrides=overrides)
        elif flags.shell_completion:
            hydra.shell_completion(name, overrides)
        else:
            return False
        return True

    def _check_sweep(self, settings: DictConfig) -> None:
        if self._adopted_ranks is not None:
            starter = self._adopted_ranks.cluster.starter
            raise ConfigError(
                f"-m makes several runs, and {starter} has started these processes for one.\n"
                "Leave -m out, or type launcher=local and start the command once."
            )
        if not settings.launcher._target_.endswith(".BasicLauncher"):  # others pickle jobs
            raise ConfigError(
                f"hydra/launcher={settings.runtime.choices['hydra/launcher']} can't be used: a sweep runs its jobs "
                "one after another. Use hydra/launcher=basic; to run jobs at the same time, start a command for each."
            )

    def _run_sweeper(self, hydra: Hydra, overrides: list[str], config: DictConfig) -> int:
        """Run the jobs as a sweeper such as Optuna's chooses them, by their results; return the exit status."""
        sweep = Sweep()
        checkpoint = config.checkpoint
        settings: Any = OmegaConf.to_container(config.hydra.sweeper, enum_to_str=True)
        direction = sweeper_direction(settings, typed=overrides, mode=checkpoint.mode, monitor=checkpoint.monitor)

        def run_job(config: DictConfig) -> float | None:
            request = self._request(*_resolved(config), number=HydraConfig.get().job.num)
            own = request.config.checkpoint
            if (own.monitor, own.mode) != (checkpoint.monitor, checkpoint.mode):
                raise ConfigError(
                    "checkpoint.monitor and checkpoint.mode say what the sweeper looks for, so they must be the same "
                    "in all jobs. Don't sweep over them."
                )
            label = " ".join(request.overrides)
            result = sweep.run(request, label=label)
            if result.status != 0:
                raise RunError(f"The job {label} failed with exit status {result.status}.")
            return result.score

        # For the sweeper's own files.
        folder = f"hydra.sweep.dir='{Path(config.path.outputs, 'multirun', self._sweep_name)}'"
        try:
            hydra.multirun(
                self._config_name, run_job, [*overrides, *direction, _MULTIRUN, folder], with_log_configuration=False
            )
        finally:
            status = sweep.close()
        return status

    def _request(self, composed: Mapping[str, Any], overrides: Sequence[str], *, number: int | None = None) -> Request:
        """Return what a job is handed. number: of the job in a sweep."""
        raw = self._base.configuration(composed)
        if self._call is not None and self._call.name is not None:
            raw["recipe"] = self._call.name
        config = parse(raw)
        check(config)
        overrides = tuple(text for text in self._base.overrides or overrides if not names_a_run(text))
        arguments, parent_run, sub_run = self._arguments, self._base.parent_run, None
        if number is not None:
            not_flags = {*self._flags.overrides, "-m", "--multirun"}
            flags = [text for text in arguments if text not in not_flags]
            arguments = [*flags, *filter(names_a_run, self._base.typed), *overrides]
            folder = Path(config.path.outputs, "multirun") if parent_run is None else parent_run / config.job
            sub_run = folder / self._sweep_name / str(number)
        return Request(
            config=config,
            raw=raw,
            overrides=overrides,
            search_path=self._search_path,
            arguments=tuple(arguments),
            call=self._call,
            fork_server=self._fork_server,
            sub_run=sub_run,
            external_ranks=self._adopted_ranks,
            parent_run=parent_run,
        )


def _of_today(override: str) -> str:
    """Return an override by the names of today; print them if it has earlier ones."""
    present = present_override(override)
    if present != override:
        print(f"{override} is an earlier name. Type {present}", file=sys.stderr, flush=True)
    return present


def _parse_flags(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse the command line as Hydra does, in any order. Raises ConfigError for an unknown flag."""

    def refuse(message: str) -> NoReturn:
        dashed = [text for text in arguments if text.startswith("--") and "=" in text]
        advice = f"Keys are written without dashes: {dashed[0].lstrip('-')}" if dashed else ""
        raise ConfigError(f"{message}\n{advice or '`--hydra-help` lists the options.'}")

    parser.error = refuse  # type: ignore[method-assign] # it would print the usage and exit
    # Overrides first: `--info` would take one that follows it.
    return parser.parse_intermixed_args(sorted(arguments, key=lambda text: text.startswith("-") or "=" not in text))


class UserConfigFirst(SearchPathPlugin):
    """Hydra looks in the folder `conf` of the working directory before the framework's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = user_config_dir(Path.cwd())
        if folder is not None:
            search_path.prepend(provider="user", path=f"file://{folder}", anchor="main")


def _search_path(entries: Sequence[str] | None, *, must_exist: bool = True) -> tuple[str, ...]:
    """Return the places of `hydra.searchpath` with absolute paths.

    Raises ConfigError for one that isn't there, unless they are those of a saved run. Hydra only warns.
    """
    places = []
    for entry in entries or ():
        scheme, _, path = entry.rpartition("://")
        if scheme in ("", "file"):
            folder = Path(path).absolute()
            if must_exist and not folder.is_dir():
                raise ConfigError(f"hydra.searchpath has {entry}: there is no folder {folder}.")
            places.append(f"file://{folder}")
            continue
        sources = SourcesRegistry.instance()
        is_there = scheme in sources.types and sources.resolve(scheme)("searchpath", entry).available()
        if must_exist and not is_there:
            raise ConfigError(f"hydra.searchpath has {entry}, which isn't there.")
        places.append(entry)
    return tuple(places)


def _changed(raw: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return a configuration with an override applied, as Hydra does. Raises ConfigError for a key that isn't there."""
    config = OmegaConf.create(dict(raw))
    OmegaConf.set_struct(config, True)
    try:
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([override]), config)
    except HydraException as error:
        raise ConfigError(f"{override}: {' '.join(str(error).split())}") from error
    changed: Any = OmegaConf.to_container(config, resolve=True)
    return changed  # type: ignore[no-any-return]


def _grid(overrides: Sequence[str], settings: DictConfig) -> Iterator[list[str]]:
    """Yield the overrides of each job of a sweep over all combinations of values."""
    params = [f"{key}={value}" for key, value in (settings.sweeper.params or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *overrides])
    own = [str(each.input_line) for each in parsed if each.is_hydra_override()]
    task = [each for each in parsed if not each.is_hydra_override()]
    (jobs,) = BasicSweeper.split_arguments(task, max_batch_size=None)
    for number, job in enumerate(jobs):
        yield [*own, f"hydra.job.num={number}", *job]


def _resolved(config: DictConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the resolved, plain values of what Hydra composed, and its overrides."""
    if "hydra" in config:  # a sweeper passes its jobs without it, after Hydra has set it
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
    raw: Any = OmegaConf.to_container(config, resolve=True)
    return raw, tuple(HydraConfig.get().overrides.task)
