"""What the framework uses of Hydra: its flags, composing, its grammar, applying an override, splitting a sweep.

Hydra offers most of this only in private modules (`hydra._internal`) and in those for its plugins (`hydra.core`). They
are imported here and nowhere else. Hydra 1.3 and 1.4 are supported; a comment says where they differ.
"""

from __future__ import annotations

import copy
import pickle
import re
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from hydra import __version__ as hydra_version
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra as Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader as ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import GroupDefault as GroupDefault
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser as OverridesParser
from hydra.core.override_parser.types import ChoiceSweep as ChoiceSweep
from hydra.core.override_parser.types import Glob as Glob
from hydra.core.override_parser.types import IntervalSweep as IntervalSweep
from hydra.core.override_parser.types import Override as Override
from hydra.core.override_parser.types import QuotedString as QuotedString
from hydra.core.override_parser.types import RangeSweep as RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from framework.config.assets import config_dir, user_config_dir
from framework.config.other_names import advice
from framework.config.parse import flatten, raise_mistakes, read_text
from framework.config.saved import key_of
from framework.errors import ConfigError

# The override that makes a command a sweep, as -m does.
MULTIRUN = "hydra.mode=MULTIRUN"

VERSION_BASE: dict[str, str] = {}
"""Keywords of `initialize_config_dir`: 1.3 needs the version whose defaults it has, and 1.4 warns of the keyword."""
if hydra_version.startswith("1.3."):
    VERSION_BASE["version_base"] = "1.3"

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
            with initialize_config_dir(str(folder), job_name="framework", **VERSION_BASE):
                loader = current_hydra().config_loader
                current_hydra().config_loader = _ConfigLoader(loader.get_search_path())
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


_Options = tuple[str | None, RunMode, tuple[str, ...]]
"""What decides which files a configuration is composed from: the primary one, and the overrides that choose others."""


class _ConfigLoader(ConfigLoaderImpl):
    """Hydra's own, for the many configurations of one command, which change none of the files in between.

    Each file is read once. A sweep's trials differ mostly in values (`optimizer.lr=0.1`), which choose no files: what
    the files make is composed once, and the values are set in a copy, in a tenth of the time. The first configuration,
    in most commands the only one, is composed as Hydra does, without a copy.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._parsed: dict[str, Override] = {}
        # The files that have been read, by the primary one and `hydra.searchpath`.
        self._repositories: dict[tuple[str | None, tuple[str, ...]], CachingConfigRepository] = {}
        self._is_first = True
        # What files make, without values. As bytes it takes a twentieth of the memory, and a copy a third of the time.
        self._composed: dict[_Options, bytes] = {}

    # 1.4 passes further settings by name.
    def _load_configuration_impl(  # type: ignore[override]
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, **settings: Any
    ) -> DictConfig:
        self.ensure_main_config_source_available()
        parsed, repository = self._parse_overrides_and_create_caching_repo(config_name, overrides)
        values = []
        options = []
        for override, text in zip(parsed, overrides, strict=True):
            if _chooses_no_file(override, repository):
                values.append(override)
            else:
                options.append(text)
        # Of a range, Hydra says that it needs -m.
        has_ranges = any(override.is_sweep_override() for override in parsed)
        if self._is_first or has_ranges:
            self._is_first = False
            return super()._load_configuration_impl(config_name, overrides, run_mode, **settings)

        key = (config_name, run_mode, tuple(options))
        if key not in self._composed:
            # Those that 1.4 has parsed before this call have the values, too.
            settings.pop("parsed_overrides", None)
            composed = super()._load_configuration_impl(config_name, options, run_mode, **settings)
            self._composed[key] = pickle.dumps(composed)
        config: DictConfig = pickle.loads(self._composed[key])
        self._apply_overrides_to_config(values, config)
        _note_overrides(config, parsed)
        return config

    def parse_overrides(self, config_name: str | None, overrides: list[str], alias_start: int = 0) -> list[Override]:
        """Return the parsed overrides. 1.4 calls it, to replace the aliases that a primary file may define."""
        parser = OverridesParser.create()
        for text in overrides:
            if text not in self._parsed:
                (self._parsed[text],) = parser.parse_overrides([text])
        return [self._parsed[text] for text in overrides]

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str], parsed_overrides: list[Override] | None = None
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed = self.parse_overrides(config_name, overrides)
        places = []
        for override, text in zip(parsed, overrides, strict=True):
            if override.get_key_element() == "hydra.searchpath":
                places.append(text)
        key = (config_name, tuple(places))
        if key not in self._repositories:
            _, repository = super()._parse_overrides_and_create_caching_repo(config_name, places)
            self._repositories[key] = repository
        return parsed, self._repositories[key]

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        loaded = super()._load_single_config(default, repo)
        assert default.config_path is not None
        read = repo.load_config(default.config_path)
        if read is not None and loaded.config is read.config:
            # Hydra builds the composed configuration out of the nodes themselves of a file without a package.
            loaded = copy.copy(loaded)
            loaded.config = copy.deepcopy(read.config)
        return loaded


def _chooses_no_file(override: Override, repository: IConfigRepository) -> bool:
    """Return True for an override that sets or removes a value after all files are merged."""
    if override.is_hydra_override():
        # Others decide where Hydra looks for files, or what it writes about the composition.
        return override.key_or_group == "hydra.job.num"
    return isinstance(override.value(), dict) or not repository.group_exists(override.key_or_group)


def _note_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Write the overrides into Hydra's own section, as Hydra does: files may refer to them."""
    settings = config.hydra
    of_hydra = [override for override in overrides if override.is_hydra_override()]
    others = [override for override in overrides if not override.is_hydra_override()]
    settings.overrides.hydra = [override.input_line for override in of_hydra]
    settings.overrides.task = [override.input_line for override in others]
    # In 1.4 it is an interpolation.
    if not OmegaConf.is_interpolation(settings.job, "override_dirname"):
        form = settings.job.config.override_dirname
        texts = [str(override.input_line) for override in others if override.key_or_group not in form.exclude_keys]
        settings.job.override_dirname = form.item_sep.join(sorted(texts)).replace("=", form.kv_sep)


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


def value_of(override: str) -> Any:
    """Return the value of `key=value` as Hydra parses it, or unparsed if Hydra can't."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException:
        # A path with characters that Hydra would want quoted.
        return override.partition("=")[2].strip("'\"")


def without_swept(overrides: Sequence[str], hydra: Hydra) -> list[str]:
    """Return the overrides that have one value."""
    parsed = OverridesParser.create(hydra.config_loader).parse_overrides(list(overrides))
    return [str(override.input_line) for override in parsed if not override.is_sweep_override()]


def is_swept(override: str) -> bool:
    """Return True if an override has several values, one for each run of a sweep."""
    # `recipe=glob(*)` looks its options up.
    parsed = OverridesParser.create(current_hydra().config_loader).parse_override(override)
    return bool(parsed.is_sweep_override())


def with_cast_ends(sweep: RangeSweep) -> RangeSweep:
    """Return a range whose ends and step are cast, as `float(range(1,3))` has it in 1.3; in 1.4 each number is cast."""
    for cast in getattr(sweep, "transformers", ()):
        sweep = RangeSweep(start=cast(sweep.start), stop=cast(sweep.stop), step=cast(sweep.step), tags=sweep.tags)
    return sweep


def is_interval(override: str) -> bool:
    """Return True if an override has a range of values that can't be listed."""
    return bool(OverridesParser.create().parse_override(override).is_interval_sweep())


def split_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep over all combinations of values, without Hydra's own overrides."""
    # `recipe=glob(*)` looks its options up.
    parsed = OverridesParser.create(current_hydra().config_loader).parse_overrides(list(overrides))
    others = [override for override in parsed if not override.is_hydra_override()]
    (combinations,) = BasicSweeper.split_arguments(others, max_batch_size=None)
    return [list(combination) for combination in combinations]


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


# What an option without keys chooses.
_NOTHING = "nothing"


def refuse_replaced(typed: Sequence[str], config: DictConfig) -> None:
    """Raise ConfigError for typed options that a recipe, which is applied last, leaves without an effect.

    Args:
        typed: the overrides of one run.
        config: what they compose, unresolved.
    """
    mistakes = []
    for text in typed:
        group, _, option = text.partition("=")
        if group not in config or OmegaConf.is_interpolation(config, group) or not OmegaConf.is_dict(config[group]):
            continue
        section: Any = OmegaConf.to_container(config[group], resolve=False)
        others = tuple(key_of(other) for other in typed if other != text)
        for name, chosen in _choices_of(group, option, section).items():
            key = f"{group}.{name}"
            present = _target_in(section[name])
            is_typed = any(other in (key, group) or other.startswith(f"{key}.") for other in others)
            if present == chosen or is_typed:
                continue
            remedy = "Remove it there."
            if chosen == _NOTHING:
                remedy = f"Type ~{key}"
            elif chosen is None:
                remedy = f"Type {key}=null"
            mistakes.append(f"{text} has no effect: the recipe sets {key} itself, to {present}. {remedy}")
    raise_mistakes(mistakes)


def _choices_of(group: str, option: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an option is about: targets by their names in the section; none if it only sets values.

    That is `_target_`, or its first key if that has a target or is null. An option without keys, such as
    `callbacks=none`, is about all that the section has.
    """
    loader: Any = current_hydra().config_loader
    repository = loader.repository
    if not group.isidentifier() or not repository.config_exists(f"{group}/{option}"):
        return {}
    read = repository.load_config(f"{group}/{option}")
    content: Any = OmegaConf.to_container(read.config, resolve=False)
    if not content:
        # One that only has a defaults list chooses other options.
        return {} if read.defaults_list else dict.fromkeys(section, _NOTHING)
    name = "_target_" if "_target_" in content else next(iter(content))
    # A file with another package writes to several sections.
    if name not in section:
        return {}
    value = content[name]
    if name == "_target_" or value is None or (isinstance(value, dict) and "_target_" in value):
        return {name: _target_in(value)}
    return {}


def _target_in(value: Any) -> Any:
    """Return the target of a node, and any other value as it is."""
    if isinstance(value, dict):
        return value.get("_target_")
    return value


# Composing


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the composed configuration, with Hydra's own section."""
    return compose(config_name, list(overrides), return_hydra_config=True)


def resolved(config: DictConfig) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the resolved, plain values of what Hydra composed, and its overrides."""
    # A sweeper passes its jobs without it, after Hydra has set it.
    if "hydra" in config:
        # `${hydra:...}` is looked up there. Hydra's own `set_config` does the same with a copy, which takes a third of
        # the time of a sweep's trial.
        section = config.hydra
        OmegaConf.set_readonly(section, True)
        HydraConfig.instance().cfg = SimpleNamespace(hydra=section)  # type: ignore[assignment]
        with open_dict(config):
            del config["hydra"]
    _read_texts(config)
    raw: Any = OmegaConf.to_container(config, resolve=True)
    return raw, tuple(HydraConfig.get().overrides.task)


def shown_config(config: DictConfig, *, section: str | None, resolve: bool) -> Any:
    """Return what `--cfg job` shows, as plain values. section: the dotted key of `-p`, if it is typed."""
    shown: Any
    if resolve:
        shown, _ = resolved(config)
    else:
        with open_dict(config):
            del config["hydra"]
        shown = OmegaConf.to_container(config, resolve=False)
    if section is None or section == "_global_":
        return shown
    for name in section.split("."):
        if not isinstance(shown, Mapping) or name not in shown:
            raise ConfigError(f"-p {section}: there is no such section.")
        shown = shown[name]
    return shown


def _read_texts(node: DictConfig, path: str = "") -> None:
    """Give keys of numbers and truth values a value of their type where an interpolation gives a text.

    Before everything else is resolved, so that what refers to such a key gets a number, too.
    """
    for name, unresolved in node.items_ex(resolve=False):
        # Most values are plain numbers, and looking at each takes time.
        if not isinstance(name, str) or not isinstance(unresolved, (str, DictConfig)):
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


def groups_of(loader: Any) -> dict[str, list[str]]:
    """Return the options of each group, without Hydra's own groups."""
    return {group: loader.get_group_options(group) for group in loader.list_groups("") if group != "hydra"}


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
