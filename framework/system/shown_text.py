"""Text from elsewhere, made safe to show: control characters as text, passwords masked. No torch.

Records, metrics and messages of a run may come from somebody else. What they contain must neither steer the terminal
nor reorder what a reader sees.
"""

from __future__ import annotations

import re
import unicodedata

MASK = "***"
"""What is shown in place of a password or token."""

_ESCAPED_CATEGORIES = {
    "Cc",  # controls: ESC, carriage return, the C1 range
    "Cf",  # invisible formatting: directions, zero-width characters, tags
    "Cs",  # lone surrogates, which no encoding can write
    "Zl",  # the line separator
    "Zp",  # the paragraph separator
}

_JOINERS = "\u200c\u200d"
"""Invisible, but parts of emoji and of words in Persian and Indian scripts."""

_SECRET_NAME = re.compile(
    r"passw(or)?d|passphrase|secret|credential|api_?-?key|access_?-?key|private_?-?key|authorization"
    r"|(?<![a-z])(pwd|token)(?![a-z])",
    re.IGNORECASE,
)
_MODEL_TOKEN = re.compile(
    r"(bos|eos|unk|sep|pad|cls|class|dist|mask|masked|register|start|end|special|image|audio|video)_?token"
    r"|token_(type_)?ids?$|token_(type|mixer|mixing|embed|drop|merg|pool|prun|shift|reduc|classif|loss|dim|size|length)"
)
"""Names with `token` that hold no secret: those of language and vision models. (`tokens` doesn't match anyway.)"""

_ADDRESS_SECRETS = (
    # scheme://user:SECRET@host. The secret may contain an @, and a slash unless a port precedes it.
    re.compile(
        r"\b[a-z][a-z0-9+.-]*://[^\s/?#:@\"'<>]*:(?P<secret>[^\s/?#\"'<>]+(?=@)|(?!\d+[/?#])[^\s@\"'<>]+(?=@))",
        re.IGNORECASE,
    ),
    # https://SECRET@host, of the length of a token.
    re.compile(r"\bhttps?://(?P<secret>[^\s/?#:@\"'<>]{16,})(?=@)", re.IGNORECASE),
    # ?token=SECRET or #token=SECRET, if the name is one of a secret.
    re.compile(r"[?&;#](?P<name>[\w.-]+)=(?P<secret>[^\s&;#\"'<>]+)"),
)
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature")


def printable(text: str, *, multiline: bool = False) -> str:
    r"""Return the text with each control or invisible character as its escape, such as `\x1b`.

    multiline: line ends and tabs stay. Without it, a text can't look like two lines of a table.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character, multiline=multiline) for character in text)


def masked_text(text: str) -> str:
    """Return the text with passwords and tokens in addresses masked."""
    for start, end in reversed(_address_secrets(text)):
        text = f"{text[:start]}{MASK}{text[end:]}"
    return text


def secrets_in(text: str) -> list[str]:
    """Return the passwords and tokens in the addresses that the text contains."""
    return [text[start:end] for start, end in _address_secrets(text)]


def is_secret_name(name: str) -> bool:
    """Return True if a key of this name holds a password or token."""
    # apiKey → api_Key
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return _SECRET_NAME.search(words) is not None and _MODEL_TOKEN.search(words.lower()) is None


def shown(text: str) -> str:
    """Return lines for the terminal: control characters as text, passwords in addresses masked."""
    return printable(masked_text(text), multiline=True)


def _address_secrets(text: str) -> list[tuple[int, int]]:
    """Return where the secrets begin and end, in order."""
    if "://" not in text:
        return []
    places = []
    for pattern in _ADDRESS_SECRETS:
        for match in pattern.finditer(text):
            name = match.groupdict().get("name")
            if name is None or name.lower() in _SIGNATURES or is_secret_name(name):
                places.append(match.span("secret"))
    return sorted(set(places))


def _shown(character: str, *, multiline: bool) -> str:
    if unicodedata.category(character) not in _ESCAPED_CATEGORIES or character in _JOINERS:
        return character
    if multiline and character in "\n\t":
        return character
    return character.encode("unicode_escape").decode()
