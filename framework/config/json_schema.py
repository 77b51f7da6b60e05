"""The JSON Schema of the YAML files, by which editors complete keys and mark mistakes.

Its keys, ranges and descriptions are those of `framework.config.schema`; the options of groups, and the targets with
their keywords, are those of the folders of YAML files that it is made for. The root is a recipe; the file of another
group is `#/definitions/GROUP`.
"""

from __future__ import annotations

import inspect
import io
import json
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from framework.config import schema, source
from framework.config.jobs import JOBS
from framework.config.keys import Key, keys_of
from framework.config.nested import walk
from framework.config.optimizers import OWN_KEYS
from framework.config.schema import Config, Duration, FunctionName, JobName, Node, Steps, Texts
from framework.config.targets import NODE_KEYS
from framework.config.yaml_files import load_yaml
from framework.errors import TargetError

SCHEMA_NAME = "schema.json"

# What a node may have beside its target's keywords: `freeze` is for models, the others are for optimizers.
_OTHER_KEYS = f"^({'|'.join((*NODE_KEYS, 'freeze', *OWN_KEYS))})$"
# Or `???`, for a value that another file has to set.
_INTERPOLATION = {"type": "string", "pattern": r"^(\$\{|\?\?\?$)"}
_DURATION = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\d+(\.\d+)?[smhd]$"}]}
_DEFAULTS = {"$ref": "#/definitions/defaults"}
# A keyword of a target: a node, what has nodes inside, or anything else.
_VALUE: dict[str, Any] = {
    "if": {"type": "object", "required": ["_target_"]},
    "then": {"$ref": "#/definitions/node"},
    "else": {"items": {"$ref": "#/definitions/value"}, "additionalProperties": {"$ref": "#/definitions/value"}},
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BOUNDS = {"at_least": "minimum", "at_most": "maximum", "above": "exclusiveMinimum"}


def json_schema(folders: Sequence[Path]) -> str:
    """Return the schema of recipes, as JSON. folders: those that hold the groups' folders."""
    options = options_of(folders)
    properties = {key.name: _of_key(key, section=Config) for key in keys_of(Config)}
    definitions = {"node": _node(targets_of(folders)), "value": _VALUE, "defaults": _defaults(options)}
    for group in options:
        if group in properties:
            definitions[group] = _of_option(properties[group])
    properties["defaults"] = _DEFAULTS
    properties["hydra"] = {"type": "object", "description": "Settings of Hydra, such as hydra.searchpath."}
    content = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of framework",
        # A recipe that only has comments is empty.
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
        "definitions": definitions,
    }
    return json.dumps(content, indent=1) + "\n"


# What the folders have


def options_of(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the options of each group."""
    options: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            options.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def targets_of(folders: Sequence[Path]) -> list[str]:
    """Return every `_target_` that the files name, sorted."""
    targets = set()
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            for key, value in walk(load_yaml(file)):
                if key.rpartition(".")[2] == "_target_" and isinstance(value, str):
                    targets.add(value)
    return sorted(targets)


# Its parts


def _defaults(options: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the schema of the defaults list, whose entries choose options of groups."""
    properties = {}
    for group, names in options.items():
        one = {"enum": [*names, None]}
        chosen = {"anyOf": [one, {"type": "array", "items": one}]}
        for name in (group, f"override /{group}", f"/{group}"):
            properties[name] = chosen
    entry = {"type": "object", "properties": properties, "minProperties": 1, "maxProperties": 1}
    return {
        "type": "array",
        "description": "Options of groups: `override /optimizer: adam`.",
        "items": {"anyOf": [{"type": "string"}, entry]},
    }


def _of_option(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a file that is an option of a group, given that of the group's key in a recipe."""
    # An empty file, or one that only has comments, is null. An editor that loads a part of a schema takes the keywords
    # that the part lacks from the root, so it has all of these.
    option = {"title": "An option of a group", "type": ["object", "null"], "properties": {"defaults": _DEFAULTS}}
    if "properties" in described:
        option["properties"] |= described["properties"]
        return {**option, "additionalProperties": False}
    # One with a defaults list is completed by other files.
    is_whole = {"type": "object", "not": {"required": ["defaults"]}}
    own = {"if": is_whole, "then": {"anyOf": described["anyOf"]}}
    return {**option, "additionalProperties": True, "allOf": [own]}


def _of_section(section: type) -> dict[str, Any]:
    properties = {key.name: _of_key(key, section=section) for key in keys_of(section)}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _of_key(key: Key, *, section: type) -> dict[str, Any]:
    """Return the schema of a key: a section, or the values that the key takes."""
    if key.section is not None:
        described = _of_section(key.section)
    else:
        described = {"anyOf": [*_values(key), _INTERPOLATION]}
    comment = comments().get((section.__name__, key.name))
    if comment:
        described = {"description": comment, **described}
    return described


def _values(key: Key) -> Iterator[dict[str, Any]]:
    kinds = _kinds()
    for kind in key.kinds:
        # A Literal's values are options.
        if kind not in kinds:
            continue
        described = dict(kinds[kind])
        if kind in (int, float):
            for word, bound in key.bounds.items():
                described[_BOUNDS[word]] = bound
        yield described
    names = []
    if JobName not in key.kinds:
        names += key.options
    if key.auto:
        names.append("auto")
    if names:
        yield {"enum": names}
    if key.nullable or key.auto:
        yield {"type": "null"}


@cache
def _kinds() -> Mapping[Any, dict[str, Any]]:
    node = {"$ref": "#/definitions/node"}
    return {
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": "number"},
        str: {"type": "string"},
        Duration: _DURATION,
        Texts: {"type": "array", "items": {"type": "string"}},
        Steps: {"type": "array", "items": {"type": "integer", "minimum": 1}},
        Node: node,
        FunctionName: {"type": "string"},
        JobName: {"anyOf": [{"enum": list(JOBS)}, {"type": "string", "pattern": r"\."}]},
        dict[str, Any]: {"type": "object"},
        dict[str, Node]: {"type": "object", "additionalProperties": {"anyOf": [node, {"type": "null"}]}},
        dict[str, str]: {"type": "object", "additionalProperties": {"type": "string"}},
    }


def _node(targets: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an object of the user's: `_target_`, and the keywords of those that are known."""
    known = []
    for target in targets:
        keywords = _keywords(target)
        if keywords is not None:
            is_target = {"properties": {"_target_": {"const": target}}, "required": ["_target_"]}
            known.append({"if": is_target, "then": keywords})
    value = {"$ref": "#/definitions/value"}
    properties: dict[str, Any] = {name: {} for name in NODE_KEYS}
    properties["_args_"] = value
    properties["_target_"] = {
        "type": "string",
        "description": "What is imported and called.",
        "examples": list(targets),
    }
    node: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": value}
    if known:
        node["allOf"] = known
    return node


def _keywords(target: str) -> dict[str, Any] | None:
    """Return the schema of a target's keywords, as far as its source shows them; None if it shows nothing."""
    try:
        found = source.look_up(target)
        parameters = source.signature(found)
    except TargetError:
        return None
    if parameters is None:
        return None
    names = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    keywords: dict[str, Any] = {"properties": {name: {} for name in names}}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and source.is_ordinary(found):
        keywords |= {"patternProperties": {_OTHER_KEYS: {}}, "additionalProperties": False}
    return keywords


@cache
def comments() -> Mapping[tuple[str, str], str]:
    """Return the comment above each field of the schema's dataclasses, by class and field."""
    texts: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    section = ""
    for tokens in _statements(inspect.getsource(schema)):
        first = tokens[0]
        if first.type == tokenize.COMMENT:
            lines.append(first.string.removeprefix("#").strip())
            continue
        if first.string == "class":
            section = tokens[1].string
        elif len(tokens) > 1 and tokens[1].string == ":" and lines:
            texts[section, first.string] = " ".join(lines)
        lines = []
    return texts


def _statements(text: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Yield the tokens of each statement, and of each comment that has a line of its own."""
    tokens: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type in (tokenize.NEWLINE, tokenize.NL):
            if tokens:
                yield tokens
            tokens = []
        else:
            tokens.append(token)
