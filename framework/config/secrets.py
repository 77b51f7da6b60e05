"""Passwords and tokens in a configuration: masked in every file but one, `secrets.yaml`, which only its owner can read.

What counts as a secret: a value whose key has a name such as `password`, `api_key` or `hf_token`, and the password or
token in an address (`https://user:PASSWORD@host`, `?token=TOKEN`). No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.errors import ConfigError
from framework.system.shown_text import MASK, is_secret_name, masked_text, secrets_in

Path = tuple[str | int, ...]
"""Where a value is: the keys of mappings and the positions in lists."""

_IN_BRACES = re.compile(r"(?P<name>[\w.-]+)\s*:\s*(?P<value>'[^']*'|\"[^\"]*\"|[^,{}\[\]'\"]+)")
_NO_SECRET = ("", "none", "null", "true", "false", "???")
_MASKED_IN_ADDRESS = (f":{MASK}@", f"//{MASK}@", f"={MASK}")
_MIN_REPEATED = 6
"""Characters of the shortest secret that is masked wherever else it occurs, as after an interpolation."""


class Secrets:
    """The secrets in one configuration."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        secrets: set[str] = set()
        for path, value in _leaves(config):
            if _is_secret(path, value):
                secrets.add(str(value))
            elif isinstance(value, str):
                secrets.update(secrets_in(value))
        # A short secret, or one without a digit, may be a plain word elsewhere.
        repeated = [secret for secret in secrets if len(secret) >= _MIN_REPEATED and re.search(r"\d", secret)]
        # The longest first, because one may contain another.
        self._repeated = sorted(repeated, key=len, reverse=True)

    def masked_config(self) -> dict[str, Any]:
        """Return the configuration with every secret masked."""
        masked: dict[str, Any] = self._masked(self._config, ())
        return masked

    def masked_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Return typed overrides with every secret masked."""
        return [self.masked_text(masked_override(text)) for text in overrides]

    def masked_text(self, text: str) -> str:
        """Return the text with the secrets masked that are in its addresses or in the configuration."""
        text = masked_text(text)
        for secret in self._repeated:
            text = text.replace(secret, MASK)
        return text

    def entries(self) -> list[dict[str, Any]]:
        """Return the masked values and where they belong: the content of secrets.yaml."""
        masked = dict(_leaves(self.masked_config()))
        entries = []
        for path, value in _leaves(self._config):
            if masked.get(path) != value:
                entries.append({"key": list(path), "value": value})
        return entries

    def _masked(self, node: Any, path: Path) -> Any:
        if isinstance(node, Mapping):
            return {name: self._masked(value, (*path, name)) for name, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [self._masked(value, (*path, number)) for number, value in enumerate(node)]
        if _is_secret(path, node):
            return MASK
        if isinstance(node, str):
            return self.masked_text(node)
        return node


def restored_config(config: Mapping[str, Any], entries: Any, *, file: str) -> dict[str, Any]:
    """Return a masked configuration with the values of `entries`, the content of the run's secrets.yaml.

    A value that isn't masked any more was edited, and stays. Raises ConfigError for entries that would change anything
    other than masked values.
    """
    changed = restored_values(config, entries)
    if Secrets(changed).masked_config() != Secrets(config).masked_config():
        raise ConfigError(f"{file} doesn't belong to the config.yaml beside it. Restore both, or remove {file}.")
    return changed


def restored_values(masked: Mapping[str, Any], entries: Any) -> dict[str, Any]:
    """Return mappings and lists with the values of `entries`, as `Secrets.entries` returns them, if they are masked."""
    changed: dict[str, Any] = _copied(masked)
    # The file may be damaged, or somebody else's.
    if not isinstance(entries, list):
        entries = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("key"), list) or "value" not in entry:
            continue
        place = _masked_place(changed, entry["key"])
        if place is not None:
            parent, name = place
            parent[name] = entry["value"]
    return changed


def missing_secrets(config: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of values that are still masked, because the run's secrets.yaml isn't there."""
    keys = []
    for path, value in _leaves(config):
        if _is_masked(value):
            keys.append(".".join(map(str, path)))
    return keys


def masked_override(text: str) -> str:
    """Return a typed `key=value`, or an argument such as `--api-key=VALUE`, with its secret masked."""
    name, sign, value = text.partition("=")
    # A reference holds no secret itself.
    if "${" in value:
        return text
    if sign and _is_secret(tuple(name.lstrip("+~-").split(".")), value):
        return f"{name}={MASK}"
    if value.lstrip().startswith("{"):
        value = _IN_BRACES.sub(_masked_in_braces, value)
    return masked_text(f"{name}{sign}{value}")


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with their secrets masked, also that of `--api-key VALUE`."""
    masked = []
    follows_secret_option = False
    for argument in arguments:
        if follows_secret_option:
            masked.append(MASK)
        else:
            masked.append(masked_override(argument))
        follows_secret_option = argument.startswith("--") and "=" not in argument and is_secret_name(argument)
    return masked


def _masked_in_braces(match: re.Match[str]) -> str:
    name = match["name"]
    if _is_secret((name,), match["value"].strip()):
        return f"{name}:{MASK}"
    return match[0]


def _is_secret(path: Path, value: Any) -> bool:
    """Return True if a value is a secret by the names that lead to it."""
    names = [name for name in path if isinstance(name, str) and is_secret_name(name)]
    if not names or isinstance(value, (bool, Mapping, list)):
        return False
    # `_target_` and the like, below a key such as `secrets`.
    if str(path[-1]).startswith("_"):
        return False
    text = str(value).lower()
    if text in _NO_SECRET:
        return False
    # A number may be a password, but no token: `drop_token: 0.1`.
    is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) is not None
    return not is_number or any("token" not in name.lower() for name in names)


def _is_masked(value: Any) -> bool:
    return isinstance(value, str) and (value == MASK or any(text in value for text in _MASKED_IN_ADDRESS))


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything but mappings and lists, with where it is."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _leaves(value, (*path, number))
    else:
        yield path, node


def _copied(node: Any) -> Any:
    """Return a copy whose sequences are lists, as they are in a file."""
    if isinstance(node, Mapping):
        return {name: _copied(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_copied(value) for value in node]
    return node


def _masked_place(config: Any, path: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the mapping or list that holds the masked value, and its key there; None if there is no masked value."""
    node = config
    for name in path[:-1]:
        node = _item(node, name)
    if not path or not _has_mask(_item(node, path[-1])):
        return None
    return node, path[-1]


def _item(node: Any, name: Any) -> Any:
    """Return an item of a mapping or list; None if there is no such item."""
    if isinstance(node, dict) and isinstance(name, (str, int)):
        return node.get(name)
    if isinstance(node, list) and type(name) is int and 0 <= name < len(node):
        return node[name]
    return None


def _has_mask(value: Any) -> bool:
    return isinstance(value, str) and MASK in value
