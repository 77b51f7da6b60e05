"""The command: Hydra composes what was typed, the result is parsed and checked, and a job runs.

All configurations of a command (one, or those of a sweep with -m) are composed and checked before the first job runs.
No torch here, and none of Hydra's frames or settings around a job.
"""

from __future__ import annotations

import importlib
import logging
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from hydra import initialize_config_dir

# Hydra offers its flags and its splitting of sweeps nowhere else; its version is pinned.
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from framework.config.assets import config_dir, import_from_working_dir, user_config_dir
from framework.errors import EXIT_INTERRUPTED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, RunError
from framework.jobs.saved_run import (
    BaseConfig,
    find_auto_run,
    names_a_run,
    not_composable,
    overrides_to_compose,
    saved_run,
)
from framework.system.run_dir import new_name
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from framework.jobs.request import JobResult, Request, SubRun
    from framework.launch.fork_server import ForkServer
    from framework.launch.handshake import AdoptedRanks

_MULTIRUN = "hydra.mode=MULTIRUN"
# As in our config.yaml, which the user's own may replace.
_QUIET = ("hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")


def main(
    argv: Sequence[str] | None = None,
    *,
    fork_server: ForkServer | None = None,
    adopted_ranks: AdoptedRanks | None = None,
) -> int:
    """Run the command and return its exit status.

    Mistakes are printed in a few lines. An unexpected exception of a job is raised; in a sweep it is printed, and the
    next job runs.

    Args:
        argv: the arguments; by default those of the process.
        fork_server: the fork server to start ranks from.
        adopted_ranks: set on rank 0 of ranks that torchrun, srun or Kubernetes started.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    answer = _own_answer(arguments)
    if answer is not None:
        print(answer)
        return 0
    try:
        return _Command(arguments, fork_server=fork_server, adopted_ranks=adopted_ranks).run()
    except FrameworkError as error:
        print(error, file=sys.stderr)
        if isinstance(error, ConfigError) and user_config_dir(Path.cwd()) and Path("conf/config.yaml").is_file():
            print(f"{Path('conf/config.yaml').absolute()} was used instead of the framework's own.", file=sys.stderr)
        return error.exit_status
    except SystemExit:  # Hydra has printed that there is nothing to show
        return EXIT_WRONG_REQUEST
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


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


@dataclass(frozen=True)
class _Composition:
    """What Hydra composed for one run, resolved."""

    raw: dict[str, Any]
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    sub_run: SubRun | None
    # Searched for options, in this order.
    folders: tuple[Path, ...]


class _Command:
    """One command: its arguments, and what is composed, checked and run for them."""

    def __init__(
        self, arguments: list[str], *, fork_server: ForkServer | None, adopted_ranks: AdoptedRanks | None
    ) -> None:
        from framework.config.parse import spelled_out

        self._arguments = arguments
        self._parser = get_args_parser()
        self._flags = _parse_flags(self._parser, arguments)
        self._config_name = self._flags.config_name or "config"
        self._typed = [spelled_out(text) for text in self._flags.overrides]
        if self._flags.config_dir is not None:
            self._typed.append(f"hydra.searchpath=[file://{Path(self._flags.config_dir).absolute()}]")
        self._is_sweep = self._flags.multirun or _MULTIRUN in self._typed
        self._fork_server, self._adopted_ranks = fork_server, adopted_ranks
        self._base = BaseConfig(None, without_typed=None, typed=())

    def run(self) -> int:
        """Compose, parse and check the configuration of every job, then run them; return the exit status."""
        import_from_working_dir()
        overrides = self._find_base()
        with self._hydra(overrides, is_sweep=self._is_sweep) as hydra:
            if self._show(hydra, overrides):
                return 0
            if self._is_sweep:
                overrides = [*overrides, _MULTIRUN]
            mode = RunMode.MULTIRUN if self._is_sweep else RunMode.RUN
            config = hydra.compose_config(self._config_name, overrides, run_mode=mode)
            is_sweep = config.hydra.mode is RunMode.MULTIRUN
            if is_sweep:
                self._check_sweep(config)
                if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
                    return self._run_sweeper(hydra, overrides)
            # All are composed and checked before the first one runs.
            compositions = list(_compose_grid(hydra, config)) if is_sweep else [_composition(config)]
        requests = [self._request(each) for each in compositions]
        if is_sweep:
            from framework.jobs.sweep import run_sweep

            return run_sweep(requests)
        result: JobResult = importlib.import_module(f"framework.jobs.{requests[0].config.job}").main(requests[0])
        return result.status

    @contextmanager
    def _hydra(self, overrides: Sequence[str], *, is_sweep: bool) -> Iterator[Hydra]:
        """Initialize Hydra. An exception that is about the configuration becomes a ConfigError that explains it."""
        Plugins.instance().register(UserConfigFirst)
        folder = config_dir() if self._flags.config_path is None else Path(self._flags.config_path).absolute()
        with initialize_config_dir(str(folder), job_name="framework", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            try:
                yield hydra
            except (FrameworkError, BrokenPipeError):  # a broken pipe says nothing about the configuration
                raise
            except Exception as error:
                from framework.config.explain import explain

                explain(error, loader=hydra.config_loader, typed=overrides, is_sweep=is_sweep)
                raise

    def _find_base(self) -> list[str]:
        """Find the saved run that the command starts from, if any; return the overrides to compose."""
        typed = find_auto_run(self._typed, compose=lambda texts: self._compose_run(texts).raw, swept=self._is_sweep)
        saved = saved_run(typed)
        without_typed = None
        if saved is not None:
            try:
                without_typed = self._compose_run(overrides_to_compose([], saved)).raw
            except ConfigError as error:
                raise not_composable(saved, error) from error
        self._base = BaseConfig(saved, without_typed=without_typed, typed=tuple(typed))
        return overrides_to_compose(typed, saved)

    def _compose_run(self, overrides: Sequence[str]) -> _Composition:
        with self._hydra(overrides, is_sweep=False) as hydra:
            return _composition(hydra.compose_config(self._config_name, list(overrides), run_mode=RunMode.RUN))

    def _show(self, hydra: Hydra, overrides: list[str]) -> bool:
        """Print what `--help`, `--cfg` or `--info` asks for; return False if there is no such flag."""
        flags, name = Namespace(**vars(self._flags) | {"overrides": overrides}), self._config_name
        if flags.help:
            hydra.app_help(name, self._parser, flags)
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

    def _check_sweep(self, config: DictConfig) -> None:
        if self._adopted_ranks is not None:
            starter = self._adopted_ranks.cluster.starter
            raise ConfigError(
                f"-m makes several runs, and {starter} has started these processes for one.\n"
                "Leave -m out, or type launcher=local and start the command once."
            )
        if not str(config.hydra.launcher._target_).endswith(".BasicLauncher"):  # others pickle jobs
            raise ConfigError(
                f"hydra/launcher={config.hydra.runtime.choices['hydra/launcher']} can't be used: a sweep runs its jobs "
                "one after another. Use hydra/launcher=basic; to run jobs at the same time, start a command for each."
            )

    def _run_sweeper(self, hydra: Hydra, overrides: list[str]) -> int:
        """Run the jobs as a sweeper such as Optuna's chooses them, by their results; return the exit status."""
        from framework.jobs.sweep import Sweep

        sweep, sweep_name = Sweep(), new_name()

        def run_job(config: DictConfig) -> float | None:
            request = self._request(_composition(config, sweep_name=sweep_name))
            label = " ".join(request.overrides)
            result = sweep.run(request, label=label)
            if result.status != 0:
                raise RunError(f"The job {label} failed with exit status {result.status}.")
            return result.score

        with TemporaryDirectory() as scratch:  # the sweeper may write files before there is a job
            try:
                with _plugins_logged(Path(scratch, "sweep.log")):
                    quiet = [*overrides, *_QUIET, f"hydra.sweep.dir={scratch}"]
                    hydra.multirun(self._config_name, run_job, quiet, with_log_configuration=False)
            finally:
                status = sweep.close(sweeper_files=list(Path(scratch).iterdir()))
        return status

    def _request(self, composition: _Composition) -> Request:
        from framework.config.checks import check
        from framework.config.parse import parse
        from framework.jobs.request import Request

        sub_run, parent_run = composition.sub_run, self._base.parent_run
        raw = self._base.configuration(composition.raw, swept=sub_run is not None)
        try:
            config = parse(raw)
        except ConfigError:
            from framework.config.explain import raise_misplaced

            raise_misplaced(composition.choices, composition.folders)
            raise
        check(config)
        arguments = self._arguments
        overrides = tuple(text for text in composition.overrides if not names_a_run(text))
        if sub_run is not None:
            not_flags = {*self._flags.overrides, "-m", "--multirun"}
            flags = [text for text in arguments if text not in not_flags]
            arguments = [*flags, *filter(names_a_run, self._base.typed), *overrides]
            if parent_run is not None:
                sub_run = replace(sub_run, folder=parent_run / config.job / sub_run.folder.name)
        return Request(
            config=config,
            raw=raw,
            overrides=overrides,
            arguments=tuple(arguments),
            fork_server=self._fork_server,
            sub_run=sub_run,
            adopted_ranks=self._adopted_ranks,
            parent_run=parent_run,
        )


def _parse_flags(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse the command line as Hydra does, in any order. Raises ConfigError for an unknown flag."""

    def refuse(message: str) -> NoReturn:
        dashed = [text for text in arguments if text.startswith("--") and "=" in text]
        advice = f"Keys are written without dashes: {dashed[0].lstrip('-')}" if dashed else ""
        raise ConfigError(f"{message}\n{advice or '`--hydra-help` lists the options.'}")

    parser.error = refuse  # type: ignore[method-assign] # it would print the usage and exit
    # Overrides first: `--info` would take one that follows it.
    return parser.parse_intermixed_args(sorted(arguments, key=lambda text: text.startswith("-") or "=" not in text))


# Composing


class UserConfigFirst(SearchPathPlugin):
    """Hydra looks in the folder `conf` of the working directory before the framework's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = user_config_dir(Path.cwd())
        if folder is not None:
            search_path.prepend(provider="user", path=f"file://{folder}", anchor="main")


def _compose_grid(hydra: Hydra, config: DictConfig) -> Iterator[_Composition]:
    """Compose each job of a sweep over all combinations of values. config: what was composed for the whole sweep."""
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    loader, sweep_name = hydra.config_loader, new_name()
    parsed = OverridesParser.create(loader).parse_overrides([*params, *typed])
    (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    for number, overrides in enumerate(jobs):
        job = loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.num = job.hydra.job.id = number
        yield _composition(job, sweep_name=sweep_name)


def _composition(config: DictConfig, *, sweep_name: str | None = None) -> _Composition:
    """Return the resolved, plain values of what Hydra composed. sweep_name: set for a job of a sweep."""
    from framework.jobs.request import SubRun

    if "hydra" in config:  # a sweeper passes its jobs without it, after Hydra has set it
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
    raw: Any = OmegaConf.to_container(config, resolve=True)
    settings = HydraConfig.get()
    chosen = settings.runtime.choices.items()
    choices = {group: option for group, option in chosen if option is not None and not group.startswith("hydra/")}
    sub_run = None
    if sweep_name is not None:
        sub_run = SubRun(Path(raw["path"]["outputs"], "multirun", sweep_name), number=settings.job.num)
    folders = tuple(Path(source.path) for source in settings.runtime.config_sources if source.schema == "file")
    overrides = tuple(settings.overrides.task)
    return _Composition(raw=raw, overrides=overrides, choices=choices, sub_run=sub_run, folders=folders)


@contextmanager
def _plugins_logged(file: Path) -> Iterator[None]:
    """Write what Hydra's plugins log, such as a sweeper's best job, to `file`."""
    logger = logging.getLogger("hydra_plugins")
    handler, level = logging.FileHandler(file, delay=True), logger.level
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
