"""Explain why Hydra could not compose a configuration.

Runs only after composing has failed. Checks each override of the command line again and reports every mistake; if all
of them are right, the mistake is in a file, and `file_mistakes` says which.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NoReturn

import yaml
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.command.file_mistakes import file_mistake
from framework.command.words import NOT_OF_FORM, Phrase, is_override, phrases
from framework.config.hints import unknown_key_hint
from framework.config.hydra_compose import ConfigLoader, Override, OverridesParser, compose_config, groups_of, resolved
from framework.config.jobs import JOBS
from framework.config.keys import is_section, known_keys, takes_node, takes_several
from framework.config.mistakes import as_text, raise_mistakes
from framework.config.nested import walk
from framework.config.other_names import value_advice
from framework.config.parse import value_mistakes
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError

# What composing raises.
_COMPOSING = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)


def explain(error: Exception, *, loader: ConfigLoader, typed: Sequence[str], is_sweep: bool) -> None:
    """Raise a ConfigError that explains `error`; return if `error` isn't about the configuration.

    Args:
        loader: that of Hydra, which raised `error`.
        typed: the overrides that were composed.
        is_sweep: True with -m, which allows several values for a key.
    """
    if not isinstance(error, _COMPOSING):
        return
    raise_mistakes(_mistakes_in([Phrase(text, text) for text in typed], loader, is_sweep=is_sweep))
    raise ConfigError(file_mistake(error, loader=loader)) from error


def refuse_words(words: Sequence[str], *, loader: ConfigLoader, is_sweep: bool) -> NoReturn:
    """Raise a ConfigError for a command of which some words are no overrides, with all mistakes of the others."""
    groups = groups_of(loader)
    keys = {*groups, *known_keys()}
    keys |= {key.rpartition(".")[2] for key in keys}
    typed = list(phrases(words, keys=keys))
    mistakes = _mistakes_in(typed, loader, is_sweep=is_sweep)
    if not mistakes:
        # A file is wrong, too, so the keys aren't known.
        mistakes = [f"{phrase.text}: {phrase.mistake}" for phrase in typed if phrase.mistake]
    raise ConfigError(as_text(mistakes))


def _mistakes_in(typed: Sequence[Phrase], loader: Any, *, is_sweep: bool) -> list[str]:
    groups = groups_of(loader)
    overrides: list[tuple[Phrase, Override]] = []
    mistakes: list[str] = []
    for phrase in typed:
        if not is_override(phrase.override):
            mistakes.append(f"{phrase.text}: {phrase.mistake or NOT_OF_FORM}{_meant_by(phrase.text, groups)}")
            continue
        try:
            overrides.append((phrase, OverridesParser.create(loader).parse_override(phrase.override)))
        except HydraException:
            mistakes.append(_unreadable(phrase.text))
    # If the right choices alone can't be composed either, the mistake is in a file, and Hydra's error names it.
    with suppress(*_COMPOSING):
        mistakes.extend(_override_mistakes(overrides, loader, groups=groups, is_sweep=is_sweep))
    return mistakes


def _meant_by(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return, after a space, what to type for a word without `=`; empty if unknown."""
    if word in JOBS:
        return " Leave it out, or type job=train" if word == "train" else f" Type job={word}"
    advice = value_advice("job", word)
    if advice is not None:
        return f" {advice}"
    key, colon, value = word.partition(":")
    if colon and key in {*groups, *known_keys()}:
        return f" Type {key}={value or 'VALUE'}"
    # `conf/recipe/toy.yaml`
    name = PurePath(word).name.removesuffix(".yaml").removesuffix(".py")
    for group in ["recipe", *groups]:
        if name in groups.get(group, ()):
            return f" Type {group}={name}"
    if word in {*groups, *known_keys()}:
        return f" Type {word}=VALUE"
    guess = nearest(name, [*groups.get("recipe", ()), *JOBS])
    if guess is None:
        return ""
    return did_you_mean(f"job={guess}" if guess in JOBS else f"recipe={guess}")


def _unreadable(text: str) -> str:
    key, _, value = text.partition("=")
    advice = f"Text with special characters needs two kinds of quotes: {key}=\"'…'\""
    plain = value.strip("=, ")
    words = text.split()
    # What Python makes of bytes that aren't UTF-8.
    if re.search("[\udc80-\udcff]", text):
        advice = "It isn't UTF-8 text."
    elif key != key.strip() and re.fullmatch(r"[\w./-]+", value.strip()):
        advice = f"Type {key.strip()}={value.strip()}"
    elif len(words) > 1 and all(is_override(word) for word in words):
        advice = f"Each override is a word of its own: {shlex.join(words)}"
    elif re.search("[“”‘’]", text):
        advice = f"Quotes are straight: {re.sub('[“”‘’]', '', text)}"
    elif re.fullmatch(r"\(.*\)", value):
        advice = f"A list has square brackets: '{key}=[{value[1:-1]}]'"
    elif plain != value and re.fullmatch(r"[\w./-]+", plain):
        advice = f"Type {key}={plain}"
    return f"{text}: this value can't be read. {advice}"


def _override_mistakes(
    overrides: Sequence[tuple[Phrase, Override]], loader: Any, *, groups: Mapping[str, Sequence[str]], is_sweep: bool
) -> Iterator[str]:
    """Yield the mistakes of overrides that can be read: of choices of options first, then of keys, then of values."""
    # Choices without a mistake: they are composed below, so that the keys are known.
    choices: list[str] = []
    key_overrides: list[tuple[Phrase, Override]] = []
    is_search = any(override.key_or_group in ("sweep", "sweep.sampler") for _, override in overrides)
    for phrase, override in overrides:
        yield from _mistakes_of_several_values(phrase.override, override, is_sweep=is_sweep, is_search=is_search)
        group = override.key_or_group
        is_swept = override.is_sweep_override()
        if group.startswith("hydra") or (override.is_delete() and group in groups):
            continue
        if group not in groups or (not is_swept and isinstance(override.value(), dict)):
            key_overrides.append((phrase, override))
            continue

        unknown = [name for name in _options(override) if not loader.repository.config_exists(f"{group}/{name}")]
        for name in unknown:
            yield _no_such_option(name, group, groups[group])
        if unknown or is_swept:
            continue
        if phrase.mistake:
            yield f"{phrase.text}: {phrase.mistake} Type {phrase.override}"
        if _is_chosen_twice(override):
            yield f"{phrase.override}: an option of {group} is chosen already.{_in_its_place(override)}"
            continue
        choices.append(phrase.override)

    composed = loader.load_configuration("config", choices, RunMode.RUN)
    raw: Any = OmegaConf.to_container(composed, resolve=False)
    # Its keys are those of the command, not of the experiment.
    del raw["hydra"]

    # Overrides whose keys are right.
    right: list[Override] = []
    for phrase, override in key_overrides:
        mistakes = list(_key_mistakes(phrase, override, raw, groups=groups))
        yield from mistakes
        if phrase.mistake and not mistakes:
            _, _, value = phrase.override.partition("=")
            advice = value_advice(override.key_or_group, value)
            yield f"{phrase.text}: {phrase.mistake} {advice or f'Type {phrase.override}'}"
        elif not mistakes and not override.is_sweep_override():
            right.append(override)
    yield from _value_mistakes(choices, right)


def _mistakes_of_several_values(text: str, override: Override, *, is_sweep: bool, is_search: bool) -> Iterator[str]:
    """Yield why an override can't have several values, or a range, in this command."""
    if override.is_interval_sweep():
        if not is_search:
            yield f"{text}: {_needs_search(override.key_or_group)}"
    elif override.is_sweep_override() and not is_sweep:
        yield f"{text}: several values start several runs, which needs -m.{_one_value(override)}"


def _value_mistakes(choices: Sequence[str], right: Sequence[Override]) -> Iterator[str]:
    """Yield what is wrong with the values of overrides whose keys are right."""
    typed = [str(override.input_line) for override in right]
    raw, _ = resolved(compose_config("config", [*choices, *typed]))
    keys = tuple(f"{override.key_or_group}{end}" for override in right for end in ("=", ".", " ", ":"))
    for mistake in value_mistakes(raw):
        # The values of files may depend on what has been left out.
        if mistake.startswith(keys):
            yield mistake


def _is_chosen_twice(override: Override) -> bool:
    """Return True for `+callbacks=ema`, which Hydra refuses; it takes `+callbacks=[ema]`."""
    is_added = override.is_add() or override.is_force_add()
    return is_added and not isinstance(override.value(), list)


def _in_its_place(override: Override) -> str:
    """Return, after a space, what to type in place of `+group=option`."""
    group = override.key_or_group
    option = override.value()
    if takes_several(group):
        return f" Type {group}={option} in its place, or +{group}=[{option}] to add one."
    return f" Type {group}={option} in its place."


def _one_value(override: Override) -> str:
    """Return, after a space, what to type for one run in place of `a,b`."""
    key, _, text = str(override.input_line).partition("=")
    if takes_several(key) and override.is_choice_sweep():
        return f" Add -m, or type '{key}=[{text}]' for all of them in one run."
    if re.fullmatch(r"0,\d\d+", text):
        return f" Add -m, or type {key}={text.replace(',', '.')}"
    return f" Give one value, or a list '{key}=[{text}]', or add -m."


def _needs_search(key: str) -> str:
    return (
        "a range needs a search that chooses values from it. Add -m sweep=optuna sweep.n_trials=20 "
        f"(pip install 'framework[sweep]'), or give values: -m {key}=0.1,0.01"
    )


def _no_such_option(name: str, group: str, options: Sequence[str]) -> str:
    advice = value_advice(group, name)
    if advice is not None:
        return f"{group}={name}: {group} has no such option. {advice}"
    # `conf/recipe/toy.yaml`
    stem = PurePath(name).name.removesuffix(".yaml")
    guess = stem if stem in options else nearest(name, options)
    hint = did_you_mean(guess and f"{group}={guess}")
    is_class = re.fullmatch(r"\w+(\.\w+)+", name) is not None
    if " " in name and takes_several(group):
        hint = f" Type {group}=[{','.join(re.split(r'[ ,]+', name))}]"
    elif is_class and takes_node(group):
        hint = f" A class is named by its node: type ~{group} '+{group}={{_target_:{name}}}'"
    elif guess is None and name.isidentifier():
        hint = f" One of your own is a file conf/{group}/{name}.yaml in this folder."
    return f"{group}={name}: {group} has no such option.{hint}\n    Options: {', '.join(options)}"


def _options(override: Override) -> list[str]:
    """Return the options of a group that an override chooses."""
    if override.is_sweep_override():
        # Those of a range or an interval aren't names.
        if not override.is_choice_sweep():
            return []
        return list(override.sweep_string_iterator())
    value = override.value()
    names = []
    for name in value if isinstance(value, list) else [value]:
        # `GROUP=` has the value None.
        names.append("" if name is None else str(name))
    return names


def _key_mistakes(
    phrase: Phrase, override: Override, raw: Mapping[str, Any], *, groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    key = override.key_or_group
    text = phrase.override
    known = dict(walk(raw))
    if override.is_add() or override.is_force_add():
        return
    is_of_section = is_section(key) and not override.is_delete() and not override.is_sweep_override()
    value = override.value()
    if is_of_section and isinstance(value, dict):
        for name, item in value.items():
            if f"{key}.{name}" not in known:
                hint = unknown_key_hint(f"{key}.{name}", item, [*known, *groups])
                yield f"{text}: there is no key {name} in {key}.{hint}"
    if isinstance(value, dict) and f"{key}._target_" in known:
        unknown = [name for name in value if f"{key}.{name}" not in known]
        if unknown:
            yield (
                f"{text}: this changes keys of the {key} that is chosen, which has no {', '.join(unknown)}. To replace "
                f"it, type ~{key} '+{text}'"
            )
    if key in known:
        return

    section, _, below = key.partition(".")
    option, is_below_option, _ = below.partition(".")
    if option in groups.get(section, ()) and is_below_option and f"{section}.{option}" not in known:
        yield (
            f"{text}: {section}.{option} isn't chosen. Choose it with {section}={option}, or several with "
            f"{section}=[…,{option}]."
        )
    elif section in groups and section in known and known[section] is None:
        yield f"{text}: no option of {section} is chosen. Choose one first: {section}={'|'.join(groups[section])}"
    elif isinstance(known.get(section, {}), dict):
        _, equals, typed_value = text.partition("=")
        hint = unknown_key_hint(key, typed_value if equals else None, [*known, *groups])
        node = _node_around(key, known)
        is_guess = not hint or hint.endswith("?")
        if node and is_guess and not override.is_delete():
            hint += f" To pass {node} another keyword, write +{text}."
        yield f"{phrase.text}: there is no such key.{hint or ' `--cfg job` shows every key, `--help` every group.'}"


def _node_around(key: str, known: Mapping[str, Any]) -> str:
    """Return the key of the innermost `_target_` node that a key is in; empty if it is in none."""
    node = key.rpartition(".")[0]
    while node and f"{node}._target_" not in known:
        node = node.rpartition(".")[0]
    return node
