"""Completion of a command line in Bash, Zsh and Fish: groups and their options, keys and their values, runs, flags.

`-sc install=SHELL` prints the script that asks for completions, `-sc query=SHELL` with the line in `COMP_LINE`. Hydra
composes only for what files alone know, keys of models and other nodes: loading it takes most of the time. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.config.assets import config_dir, user_config_dir
from framework.config.keys import Key, find_key, known_keys, listed_values, named_keys
from framework.config.nested import walk
from framework.config.schema import Config
from framework.config.values import show
from framework.errors import ConfigError, FrameworkError

_SHELLS = ("bash", "zsh", "fish")
_UNINSTALL = {
    "bash": "complete -r framework python python3; unset -f _framework_completion",
    "zsh": "compdef -d framework; compdef _python python python3; unfunction _framework_completion",
    "fish": "complete -e -c framework; complete -e -c python; complete -e -c python3",
}
# Keys whose values are runs.
_OF_RUNS = ("resume", "rerun", "run", "runs", "runs.paths", "checkpoint.path", "init_from", "sweep.worker")
_FLAGS = {
    "--help": (),
    "--version": (),
    "--multirun": (),
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--package": (),
    "--resolve": (),
    "--config-dir": (),
    "--hydra-help": (),
}


def completion_answer(arguments: Sequence[str], line: str) -> str:
    """Return what `-sc` prints. Raises ConfigError for a shell that there is no completion for.

    Args:
        arguments: those of the command.
        line: the line up to the cursor, to complete its last word.
    """
    for text in arguments:
        action, _, shell = text.partition("=")
        if action not in ("install", "uninstall", "query"):
            continue
        if shell not in _SHELLS:
            raise ConfigError(f"-sc {text}: there is completion for {', '.join(_SHELLS)}. Type -sc {action}=bash")
        if action == "install":
            return Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
        if action == "uninstall":
            return _UNINSTALL[shell]
        return "\n".join(completions(line))
    raise ConfigError("-sc needs install=SHELL or uninstall=SHELL, such as -sc install=bash.")


def completions(line: str) -> list[str]:
    """Return what the last word of a line may be, sorted; the first word is the command."""
    *typed, word = line.split(" ")
    words = [text for text in typed[1:] if text]
    previous = words[-1] if words else ""
    choices = _FLAGS.get({"-c": "--cfg", "-i": "--info"}.get(previous, previous), ())
    if choices:
        candidates = list(choices)
    elif word.startswith("-"):
        candidates = list(_FLAGS)
    elif "=" in word:
        candidates = list(_with_values(word, words))
    else:
        plus = word[: len(word) - len(word.lstrip("+~"))]
        candidates = [f"{plus}{key}" for key in _keys(word.lstrip("+~"), words)]
    return sorted({text for text in candidates if text.startswith(word)})


# Keys


def _keys(word: str, words: Sequence[str]) -> Iterator[str]:
    """Yield what continues a word by one level: groups and keys of values end with `=`, keys of sections with `.`."""
    section, dot, _ = word.rpartition(".")
    if not dot:
        for group in _options(words):
            yield f"{group}="
        for key in named_keys(Config).values():
            yield _with_sign(key.name, key)
        return
    for dotted in known_keys():
        known = find_key(dotted)
        if known is not None and dotted.rpartition(".")[0] == section:
            yield _with_sign(dotted, known)
    within = find_key(section)
    if within is not None and within.section is not None:
        return
    # The keywords of a node, which the options that are typed bring.
    for dotted, value in walk(_composed(words)):
        if dotted.rpartition(".")[0] == section:
            yield f"{dotted}." if isinstance(value, Mapping) else f"{dotted}="


def _with_sign(dotted: str, key: Key) -> str:
    has_keys = key.section is not None or key.takes_node or key.takes_named_nodes
    return f"{dotted}." if has_keys else f"{dotted}="


# Values


def _with_values(word: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the word with each value that its key may have; the last one of several, as in `seed=1,2` and `[a,b]`."""
    typed_key, _, value = word.partition("=")
    before = value[: max(value.rfind(","), value.rfind("[")) + 1]
    start = value.removeprefix(before)
    key = typed_key.lstrip("+~")
    for completed in _values(key, start, words):
        yield f"{typed_key}={before}{completed}"


def _values(key: str, start: str, words: Sequence[str]) -> list[str]:
    options = _options(words).get(key.removesuffix("@").replace(".", "/"), [])
    values = [*options, *listed_values(key)]
    if key in _OF_RUNS:
        values += _runs(words)
    if key == "resume":
        values.append("auto")
    matching = [value for value in values if value.startswith(start)]
    if matching or (values and not start):
        return matching
    if start:
        return list(_paths(start))
    # Its present value, to be edited.
    for dotted, value in walk(_composed(words)):
        if dotted == key and value is not None and not isinstance(value, (Mapping, list)):
            return [show(value)]
    return []


def _runs(words: Sequence[str]) -> list[str]:
    """Return the run directories and sweeps in `path.outputs`, as it is typed."""
    outputs = "outputs"
    for text in words:
        if text.startswith("path.outputs="):
            outputs = text.partition("=")[2]
    folders = [file.parent for file in Path(outputs).glob("*/*/run.json")]
    folders += [file.parent for file in Path(outputs).glob("*/*/sweep.json")]
    return [str(folder) for folder in folders]


def _paths(start: str) -> Iterator[str]:
    """Yield the files and folders whose path begins so; folders with a slash."""
    folder, slash, name = start.rpartition("/")
    try:
        entries = sorted(Path(folder + slash).expanduser().iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"


# What files have


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of each group, in all folders that Hydra would look in."""
    folders = [config_dir()]
    own = user_config_dir(Path.cwd())
    if own is not None:
        folders.append(own)
    for number, text in enumerate(words):
        if text.startswith("--config-dir="):
            folders.append(Path(text.partition("=")[2]))
        elif text == "--config-dir" and number + 1 < len(words):
            folders.append(Path(words[number + 1]))
        elif text.startswith("hydra.searchpath="):
            places = text.partition("=")[2].strip("'\"[]").split(",")
            folders += [Path(place.removeprefix("file://")) for place in places if not place.startswith("pkg:")]
    options: dict[str, list[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            options.setdefault(group, []).append(file.stem)
    return options


def _composed(words: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of what is typed before, or without it if it can't be composed."""
    from hydra.errors import HydraException

    from framework.config.hydra_compose import compose_config, flag_parser, hydra_for, parse_flags, shown_config

    with hydra_for(None):
        try:
            flags, _ = parse_flags(flag_parser(), words)
            config = compose_config("config", flags.overrides)
        except (HydraException, FrameworkError):
            config = compose_config("config", [])
        shown: dict[str, Any] = shown_config(config, section=None, resolve=False)
    return shown
