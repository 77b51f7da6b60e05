"""What the command uses of Hydra: its flags, composing, applying an override, splitting a sweep.

Hydra offers its flags, its splitting of sweeps and its application of overrides only in private modules. They are
imported here and nowhere else; Hydra's version is pinned.
"""

from __future__ import annotations

import re
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra as Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict

from framework.config.assets import config_dir, user_config_dir
from framework.config.other_names import advice
from framework.config.parse import flatten, raise_mistakes, read_text
from framework.config.saved import key_of
from framework.errors import ConfigError

# The override that makes a command a sweep, as -m does.
MULTIRUN = "hydra.mode=MULTIRUN"

_HYDRA = threading.Lock()


class UserConfigFirst(SearchPathPlugin):
    """Hydra looks in the folder `conf` of the working directory before the framework's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = user_config_dir(Path.cwd())
        if folder is not None:
            search_path.prepend(provider="user", path=f"file://{folder}", anchor="main")


@contextmanager
def hydra_for(config_path: str | None) -> Iterator[None]:
    """Have Hydra compose from a folder, or from the framework's own for None, in this thread alone.

    The global state of a program that is a Hydra application itself is restored.
    """
    Plugins.instance().register(UserConfigFirst)
    folder = config_dir()
    if config_path is not None:
        folder = Path(config_path).absolute()
    with _HYDRA:
        hydra = GlobalHydra.instance().hydra
        config = HydraConfig.instance().cfg
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(folder), job_name="framework", version_base="1.3"):
                yield
        finally:
            # Hydra may have replaced its instances.
            GlobalHydra.instance().hydra = hydra
            HydraConfig.instance().cfg = config


def current_hydra() -> Hydra:
    """Return what `hydra_for` has initialized."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    return hydra


# The command line


def flag_parser() -> ArgumentParser:
    """Return the parser of Hydra's flags."""
    return get_args_parser()


def parse_flags(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse the command line as Hydra does, in any order; return the flags and all other words as they were typed.

    The other words are overrides and, if there are mistakes, anything else. Raises ConfigError for a wrong flag.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}\n`--hydra-help` lists the options.")

    # It would print the usage and exit.
    parser.error = refuse  # type: ignore[method-assign]
    # `--config` is no short form of `--config-name`.
    parser.allow_abbrev = False
    # `-recipe=toy` is a key with a dash, not the flag `-r`. Flags have two letters at most.
    arguments = [re.sub(r"^-(?=\w[\w.]{2,}=)", "--", text) for text in arguments]
    # Overrides first: `--info` would take one that follows it.
    ordered = sorted(arguments, key=lambda text: text.startswith("-") or "=" not in text)
    flags, unknown = parser.parse_known_intermixed_args(ordered)
    others = {*flags.overrides, *unknown}
    return flags, [text for text in arguments if text in others]


def without_swept(overrides: Sequence[str], hydra: Hydra) -> list[str]:
    """Return the overrides that have one value."""
    parsed = OverridesParser.create(hydra.config_loader).parse_overrides(list(overrides))
    return [str(override.input_line) for override in parsed if not override.is_sweep_override()]


def is_swept(override: str) -> bool:
    """Return True if an override has several values, one for each run of a sweep."""
    # `recipe=glob(*)` looks its options up.
    parsed = OverridesParser.create(current_hydra().config_loader).parse_override(override)
    return bool(parsed.is_sweep_override())


def split_sweep(overrides: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return Hydra's own overrides, and the others of each run of a sweep over all combinations of values."""
    # `recipe=glob(*)` looks its options up.
    parsed = OverridesParser.create(current_hydra().config_loader).parse_overrides(list(overrides))
    of_hydra = [str(override.input_line) for override in parsed if override.is_hydra_override()]
    others = [override for override in parsed if not override.is_hydra_override()]
    (combinations,) = BasicSweeper.split_arguments(others, max_batch_size=None)
    return of_hydra, [list(combination) for combination in combinations]


# Settings without an effect

# What a command may type of Hydra's own configuration.
_USED = (
    "hydra.mode",
    "hydra.searchpath",
    "hydra.sweeper",
    "hydra/sweeper",
    "hydra/launcher",
    "hydra.help",
    "hydra/help",
)
# What files set, with the values of the framework's config.yaml and of Hydra itself.
_UNUSED = {
    "hydra.run.dir": (".", "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}"),
    "hydra.sweep.dir": ("multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}",),
    "hydra.job.chdir": (False, None),
}


def refuse_unused(typed: Sequence[str], config: DictConfig, *, compose: Callable[[Sequence[str]], DictConfig]) -> None:
    """Raise ConfigError for settings of Hydra that change nothing, typed or in a file.

    Args:
        typed: the overrides of one run.
        config: what they compose.
        compose: composes from overrides. It is called only if there are such settings: a file may refer to them.
    """
    unused = [text for text in typed if key_of(text).startswith("hydra") and not key_of(text).startswith(_USED)]
    resets = []
    settings = [(key_of(text), text.partition("=")[2]) for text in unused]
    of_hydra: Any = OmegaConf.to_container(config.hydra, resolve=False)
    values = flatten(of_hydra, "hydra.")
    for key, defaults in _UNUSED.items():
        value = values[key]
        if value not in defaults and key not in dict(settings):
            settings.append((key, str(value)))
            resets.append(f"{key}='{defaults[0]}'")
    if not settings:
        return
    others = [text for text in typed if text not in unused]
    without, _ = resolved(compose([*others, *resets]))
    present, _ = resolved(compose(typed))
    if without == present:
        raise_mistakes(
            [f"{key}={value} has no effect here. {advice(key.replace('/', '.'), value)}" for key, value in settings]
        )


# Composing


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the composed configuration, with Hydra's own section."""
    return compose(config_name, list(overrides), return_hydra_config=True)


def resolved(config: DictConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the resolved, plain values of what Hydra composed, and its overrides."""
    # A sweeper passes its jobs without it, after Hydra has set it.
    if "hydra" in config:
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
    _read_texts(config)
    raw: Any = OmegaConf.to_container(config, resolve=True)
    return raw, tuple(HydraConfig.get().overrides.task)


def _read_texts(node: DictConfig, path: str = "") -> None:
    """Give keys of numbers and truth values a value of their type where an interpolation gives a text.

    Before everything else is resolved, so that what refers to such a key gets a number, too.
    """
    for name in node:
        if not isinstance(name, str):
            continue
        key = f"{path}{name}"
        if OmegaConf.is_interpolation(node, name):
            value = node[name]
            if isinstance(value, str) and read_text(key, value) != value:
                node[name] = read_text(key, value)
        elif not OmegaConf.is_missing(node, name) and OmegaConf.is_dict(node[name]):
            _read_texts(node[name], f"{key}.")


def with_override(raw: Mapping[str, Any], override: str) -> dict[str, Any]:
    """Return a configuration with an override applied, as Hydra does. Raises ConfigError for a key that isn't there."""
    config = OmegaConf.create(dict(raw))
    OmegaConf.set_struct(config, True)
    try:
        parsed = OverridesParser.create().parse_overrides([override])
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    except HydraException as error:
        raise ConfigError(f"{override}: {' '.join(str(error).split())}") from error
    changed: Any = OmegaConf.to_container(config, resolve=True)
    return changed  # type: ignore[no-any-return]


def search_path(entries: Sequence[str] | None, *, must_exist: bool = True) -> tuple[str, ...]:
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
        else:
            if must_exist and not _is_source(scheme, entry):
                raise ConfigError(f"hydra.searchpath has {entry}, which isn't there.")
            places.append(entry)
    return tuple(places)


def _is_source(scheme: str, entry: str) -> bool:
    """Return True if Hydra finds an entry such as `pkg://package.conf`."""
    sources = SourcesRegistry.instance()
    return scheme in sources.types and sources.resolve(scheme)("searchpath", entry).available()
