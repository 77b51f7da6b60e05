"""The command: Hydra composes what was typed, the result is parsed and checked, and a job is given it.

All configurations of a command (one, or those of a sweep with -m) are composed and checked before a job sees any. No
torch here, and none of Hydra's frames or settings around a job.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from framework.config.assets import config_dir, import_from_working_dir, option_file, user_config_dir
from framework.errors import EXIT_INTERRUPTED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, RunError
from framework.jobs.saved_run import (
    Ground,
    SavedRun,
    composable,
    names_a_run,
    not_composable,
    saved_run,
    with_run_found,
)
from framework.launch.environment import without_launch_arguments
from framework.run_dir import new_name
from framework.versions import installed_versions

if TYPE_CHECKING:
    from framework.jobs.request import JobResult, Place, Request
    from framework.jobs.sweep import Sweep
    from framework.launch.leader import Leader
    from framework.launch.warm import WarmServer

_FULL_ERROR = "HYDRA_FULL_ERROR"
_SWEEP_FLAGS = ("-m", "--multirun")
_QUIET = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")  # as in our config.yaml

# Hydra's script completes `framework` or `python FILE.py`, not `python -m framework`. For any other `python …`, Bash
# completes file names.
_BASH_COMPLETION = {
    "install=bash": r"""
_framework_completion() {
    local command=("${COMP_WORDS[0]}") line=${COMP_LINE:0:COMP_POINT} pattern='^[^ ]+ +(.*)$'
    if [[ ${command##*/} == python* ]]; then
        command+=(-m framework)
        pattern='^[^ ]+ +-m +framework +(.*)$'
    fi
    [[ $line =~ $pattern ]] || return
    local word=${line##* }
    local found=$(COMP_LINE="framework ${BASH_REMATCH[1]}" "${command[@]}" -sc query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then # what Bash replaces begins after the `=`
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
}
complete -o nospace -o bashdefault -o default -F _framework_completion framework python python3""",
    "uninstall=bash": "complete -r framework python python3; unset -f _framework_completion",
}


def main(argv: Sequence[str] | None = None, *, warm: WarmServer | None = None, leader: Leader | None = None) -> int:
    """Do what `argv` (default: the process's arguments) asks for; gives the exit status.

    warm: the fork server to start ranks from. leader: in rank 0 of ranks that something else has started. Mistakes are
    a few lines on stderr. An unexpected exception of a job comes out of here as it is, except in a sweep, where its
    traceback is printed and the next run starts.
    """
    arguments = without_launch_arguments(sys.argv[1:] if argv is None else argv)
    answer = _own_answer(arguments)
    if answer is not None:
        print(answer)
        return 0
    try:
        if leader is not None and _is_sweep(arguments):
            raise _no_sweep(leader)
        asked = _read(arguments, means=_Means(warm, leader))
        if asked.sweep is not None:
            return asked.sweep.close()
        if not asked.requests:
            if _is_sweep(arguments) and not {"--cfg", "-c", "--info", "-i", "--help", "-h"} & set(arguments):
                raise ConfigError("The sweep has no jobs: one of its ranges is empty.")
            return 0
        if asked.requests[0].place is None:
            return _run(asked.requests[0])
        from framework.jobs.sweep import run_sweep

        return run_sweep(asked.requests)
    except FrameworkError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _own_answer(arguments: Sequence[str]) -> str | None:
    """Return what to print for `--version` and Bash completion, which Hydra doesn't do as needed; else None."""
    if "--version" in arguments:
        version = installed_versions(("framework", "torch", "hydra-core"))
        others = f"torch {version['torch']}, hydra-core {version['hydra-core']}"
        return f"framework {version['framework']} (Python {platform.python_version()}, {others})"
    if {"-sc", "--shell-completion"} & set(arguments):
        return next((_BASH_COMPLETION[text] for text in arguments if text in _BASH_COMPLETION), None)
    return None


@dataclass(frozen=True)
class _Means:
    """What there is to run ranks with: the fork server, or ranks that something else has started."""

    warm: WarmServer | None
    leader: Leader | None


@dataclass(frozen=True)
class _Composition:
    """What Hydra gave for one run, resolved."""

    raw: dict[str, Any]
    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    place: Place | None
    folders: tuple[Path, ...]  # searched for options, in this order


@dataclass(frozen=True)
class _Asked:
    """What the command asks for: nothing where it only shows something (`--help`, `--cfg job`).

    sweep: the jobs that a sweeper other than Hydra's grid has run already, since it chooses by their results.
    """

    requests: list[Request]
    sweep: Sweep | None


def _read(arguments: list[str], *, means: _Means) -> _Asked:
    """Compose, parse and check; every job of a grid before the first is run. Raises ConfigError."""
    import_from_working_dir()
    try:
        return _read_arguments(arguments, means=means)
    except ConfigError as error:
        own = _own_config()
        if own is None:
            raise
        raise ConfigError(f"{error}\n{own} was used instead of the framework's own.") from error


def _read_arguments(arguments: list[str], *, means: _Means) -> _Asked:
    typed = [_spelled_out(text) for text in arguments if _is_override(text)]
    others = [text for text in arguments if not _is_override(text)]
    sweeps: list[Sweep] = []

    def run_at_once(composition: _Composition) -> float | None:
        from framework.jobs.sweep import Sweep

        if not sweeps:
            sweeps.append(Sweep())
        request = _request(composition, ground, means=means, arguments=arguments)
        label = " ".join(request.overrides)
        result = sweeps[0].run(request, label=label)
        if result.status != 0:
            raise RunError(f"The job {label} failed with exit status {result.status}.")
        return result.score

    typed = with_run_found(
        typed, compose=lambda texts: _compose(list(texts), run_at_once=run_at_once)[0].raw, swept=_is_sweep(others)
    )
    saved = saved_run(typed)
    before = None if saved is None else _without_typed(saved, run_at_once=run_at_once)
    ground = Ground(saved, without_typed=before, typed=tuple(typed))
    try:
        compositions = _compose([*composable(typed, saved), *others], run_at_once=run_at_once)
    except (FrameworkError, KeyboardInterrupt):
        if sweeps:
            sweeps[0].close()
        raise
    # Composing is all that `--cfg job` needs; the schema is read for what runs.
    requests = [_request(each, ground, means=means, arguments=arguments) for each in compositions]
    return _Asked(requests, sweeps[0] if sweeps else None)


def _spelled_out(override: str) -> str:
    from framework.config.parse import spelled_out

    return spelled_out(override)


def _without_typed(saved: SavedRun, *, run_at_once: Callable[[_Composition], float | None]) -> dict[str, Any]:
    """What the saved run's own overrides compose now. Raises ConfigError where they don't any more."""
    try:
        return _compose(composable([], saved), run_at_once=run_at_once)[0].raw
    except ConfigError as error:
        raise not_composable(saved, error) from error


def _request(composition: _Composition, ground: Ground, *, means: _Means, arguments: Sequence[str]) -> Request:
    from framework.config.checks import check
    from framework.config.parse import parse
    from framework.jobs.request import Request

    if means.leader is not None and composition.place is not None:
        raise _no_sweep(means.leader)
    raw = ground.configuration(composition.raw, swept=composition.place is not None)
    try:
        config = parse(raw)
    except ConfigError:
        from framework.config.explain import raise_misplaced

        raise_misplaced(composition.choices, composition.folders)
        raise
    check(config)
    overrides = tuple(text for text in composition.overrides if not names_a_run(text))
    if composition.place is not None:
        flags = [text for text in arguments if not _is_override(text) and text not in _SWEEP_FLAGS]
        arguments = [*flags, *filter(names_a_run, ground.typed), *overrides]
    place, home = composition.place, ground.home
    if place is not None and home is not None:
        place = replace(place, folder=home / config.job / place.folder.name)
    return Request(
        config=config,
        raw=raw,
        overrides=overrides,
        replaced=_replaced(composition),
        arguments=tuple(arguments),
        warm=means.warm,
        place=place,
        leader=means.leader,
        home=home,
    )


def _replaced(composition: _Composition) -> dict[str, str]:
    """Return the chosen options that differ from the recipe's, such as model=toy → the recipe's own, cnn."""
    file = option_file("recipe", composition.choices.get("recipe", ""), folders=composition.folders)
    if file is None:
        return {}
    recipe = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    pairs = (pair for entry in recipe.get("defaults", []) if isinstance(entry, dict) for pair in entry.items())
    own = {group.removeprefix("override ").lstrip("/"): option for group, option in pairs}
    chosen = composition.choices
    return {f"{group}={chosen[group]}": own[group] for group in own if chosen.get(group, own[group]) != own[group]}


def _run(request: Request) -> int:
    job = importlib.import_module(f"framework.jobs.{request.config.job}")
    result: JobResult = job.main(request)
    return result.status


# Composing


class UserConfigFirst(SearchPathPlugin):
    """Hydra looks in the folder `conf` of the working directory before the framework's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        place = user_config_dir(Path.cwd())
        if place is not None:
            search_path.prepend(provider="user", path=f"file://{place}", anchor="main")


def _compose(arguments: list[str], *, run_at_once: Callable[[_Composition], float | None]) -> list[_Composition]:
    """Let `@hydra.main` read the arguments. Gives no composition where it answered them itself (`--help`).

    run_at_once: called for each job of a sweeper that wants to know a job's result before it chooses the next.
    Raises ConfigError for whatever can't be composed.
    """
    found: list[_Composition] = []
    run: list[Place] = []
    failures: list[Exception] = []
    sweep_name, stderr = new_name(), sys.stderr

    def collect(config: Any) -> float | None:
        # An exception that Hydra sees here is announced on stderr by Hydra.
        try:
            composition = _composition(config, sweep_name=sweep_name)
        except Exception as error:
            failures.append(error)
            return None
        if composition.place is not None and _needs_results(HydraConfig.get().sweeper):
            run.append(composition.place)
            with redirect_stderr(stderr):
                return run_at_once(composition)
        found.append(composition)
        return None

    Plugins.instance().register(UserConfigFirst)
    command = hydra.main(config_path=str(config_dir()), config_name="config", version_base="1.3")(collect)
    try:
        if all(map(_is_override, arguments)) and (config := _one_run(arguments)) is not None:
            return [_composition(config, sweep_name=sweep_name)]
        with TemporaryDirectory() as scratch:
            try:
                with (
                    _plugins_logged(Path(scratch, "sweep.log")),
                    _as_command_line(_for_hydra(arguments, scratch=scratch)),
                ):
                    command()
            finally:
                if run:
                    _move_files(Path(scratch), run[0].folder)
        if failures:
            raise failures[0]
    except BrokenPipeError:  # whoever read what is shown has gone; that says nothing about the configuration
        raise
    except Exception as error:
        if os.environ.get(_FULL_ERROR) != "1":
            _explain(error, arguments)
        raise
    return found


def _one_run(overrides: list[str]) -> DictConfig | None:
    """Compose the configuration of one run; None if it is a sweep's or has a mistake, which `@hydra.main` finds.

    `@hydra.main` composes twice, first to learn whether the configuration asks for a sweep, which costs 0.2 s.
    """
    with suppress(HydraException, OmegaConfBaseException):
        with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
            config = hydra.compose("config", overrides=overrides, return_hydra_config=True)
        if config.hydra.mode is not RunMode.MULTIRUN:
            HydraConfig.instance().set_config(config)
            with open_dict(config):
                del config["hydra"]
            return config
    return None


class RefuseOtherLaunchers(Callback):
    """Refuse sweeps with a Hydra launcher other than the basic one, as others pickle jobs for their own processes."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        if not str(config.hydra.launcher._target_).endswith(".BasicLauncher"):
            launcher = config.hydra.runtime.choices["hydra/launcher"]
            sys.exit(  # Hydra turns exceptions of callbacks into warnings
                f"hydra/launcher={launcher} can't be used: a sweep runs its jobs one after another. "
                "Use hydra/launcher=basic; to run jobs at the same time, start a command for each."
            )


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


def _move_files(source: Path, folder: Path) -> None:
    """Move what a sweeper has written to the sweep's folder, if a job was started in it."""
    if folder.is_dir():
        for file in source.iterdir():
            shutil.move(file, folder)


def _composition(config: Any, *, sweep_name: str) -> _Composition:
    """The plain, resolved form of what Hydra composed; called while Hydra's own values can be interpolated."""
    from framework.jobs.request import Place

    raw: Any = OmegaConf.to_container(config, resolve=True)
    settings = HydraConfig.get()
    chosen = settings.runtime.choices.items()
    choices = {group: option for group, option in chosen if option is not None and not group.startswith("hydra/")}
    place = None
    if settings.mode is RunMode.MULTIRUN:
        place = Place(Path(raw["path"]["outputs"], "multirun", sweep_name), number=settings.job.num)
    folders = tuple(Path(source.path) for source in settings.runtime.config_sources if source.schema == "file")
    overrides = tuple(settings.overrides.task)
    return _Composition(raw=raw, overrides=overrides, choices=choices, place=place, folders=folders)


def _needs_results(sweeper: Any) -> bool:
    """Whether a sweeper chooses by results. Hydra's own grid doesn't: it is composed whole before anything runs."""
    return not str(sweeper["_target_"]).endswith(".BasicSweeper")


def _explain(error: Exception, arguments: Sequence[str]) -> None:
    """Raise ConfigError in our words; return where `error` isn't about a configuration."""
    if isinstance(error, FrameworkError):
        return
    from framework.config.explain import explain

    typed = [text for text in arguments if _is_override(text) or text == getattr(error, "override", None)]
    explain(error, config_dir=config_dir(), typed=typed, sweep=_is_sweep(arguments))


@contextmanager
def _as_command_line(arguments: list[str]) -> Iterator[None]:
    """While this is entered, Hydra finds `arguments` in `sys.argv` and raises its errors instead of printing them.

    Hydra ends the process where it has answered (status 0), and where arguments make no sense: a ConfigError here.
    """
    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    printed = io.StringIO()
    sys.argv, os.environ[_FULL_ERROR] = ["framework", *arguments], "1"
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as end:
        if end.code == EXIT_WRONG_REQUEST:  # argparse's; it has printed its usage and a line with the mistake
            raise ConfigError(_flag_mistake(printed.getvalue(), arguments)) from None
        if end.code not in (0, None):
            raise ConfigError(end.code if isinstance(end.code, str) else printed.getvalue().strip()) from None
        sys.stderr.write(printed.getvalue())
    else:
        sys.stderr.write(printed.getvalue())
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = full_error


def _flag_mistake(printed: str, arguments: Sequence[str]) -> str:
    mistake = printed.strip().rpartition("error: ")[2]
    dashed = [text for text in arguments if text.startswith("--") and "=" in text]
    advice = "`--hydra-help` lists the options."
    if dashed:
        advice = f"Keys are written without dashes: {dashed[0].lstrip('-')}"
    return f"{mistake}\n{advice}"


def _no_sweep(leader: Leader) -> ConfigError:
    return ConfigError(
        f"-m makes several runs, and {leader.place.starter} has started these processes for one.\n"
        "Leave -m out, or type launcher=local and start the command once."
    )


def _is_sweep(arguments: Sequence[str]) -> bool:
    return bool({*_SWEEP_FLAGS, "hydra.mode=MULTIRUN"} & set(arguments))


def _for_hydra(arguments: Sequence[str], *, scratch: str) -> list[str]:
    """What is set, then the options, as argparse refuses `a=1 -m b=2`; any files of Hydra's go to `scratch`."""
    overrides = [text for text in arguments if _is_override(text)]
    if _is_sweep(arguments):
        # Sweepers write files even if nothing can be composed; those of a sweep that ran are moved to its folder.
        overrides.append(f"hydra.sweep.dir={scratch}")
        overrides.append(f"+hydra.callbacks.framework._target_={__name__}.RefuseOtherLaunchers")
    if _own_config() is not None:
        overrides += [f"hydra.run.dir={scratch}", *_QUIET]
    return [*overrides, *(text for text in arguments if not _is_override(text))]


def _own_config() -> Path | None:
    """The user's own `conf/config.yaml`, which hides the framework's and its settings for Hydra; None without one."""
    place = user_config_dir(Path.cwd())
    return place / "config.yaml" if place is not None and (place / "config.yaml").is_file() else None


def _is_override(text: str) -> bool:
    return not text.startswith("-") and ("=" in text or text.startswith("~"))
