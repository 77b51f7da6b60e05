"""What the site has beyond the Markdown: its navigation, the reference of all keys, and that of the public names."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer

import framework
from framework.config.json_schema import comments, options_of
from framework.config.keys import Key, keys_of
from framework.config.schema import Config

ROOT = Path(__file__).parents[2]


def add_generated(_: Sphinx, page: str, source: list[str]) -> None:
    """Append to three of the pages what is generated."""
    parts = {"README": navigation, "docs/keys": key_reference, "docs/api": api_reference}
    if page in parts:
        source[0] = "\n".join([source[0], *parts[page]()])


# The navigation


def navigation() -> Iterator[str]:
    """Yield the tables of contents: the pages that README's section "Documentation" links, under its headings."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Documentation\n")[2].partition("\n## ")[0]
    for part in section.split("\n### ")[1:]:
        caption = part.partition("\n")[0]
        rows = [line for line in part.splitlines() if line.startswith("|")]
        pages = re.findall(r"\]\(([\w/]+)\.md\)", "\n".join(rows))
        yield "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Let the site's own address lead to the README."""
    if exception is not None:
        return
    leads = '<meta http-equiv="refresh" content="0; url=README.html">'
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>framework</title>{leads}</html>\n'
    (app.outdir / "index.html").write_text(page, encoding="utf-8")


# Keys


def key_reference() -> Iterator[str]:
    """Yield all groups with their options, then every key: the schema's types and comments, and `conf/`'s defaults."""
    yield "## Groups and options\n"
    for group, options in options_of([ROOT / "conf"]).items():
        names = ", ".join(f"`{option}`" for option in options)
        yield f"- `{group}`: {names}"

    defaults = _defaults()
    sections = [key for key in keys_of(Config) if key.section is not None]
    yield "\n## Keys of the top\n"
    for key in keys_of(Config):
        if key.section is None:
            yield _entry(key, Config, name=key.name, default=defaults.get(key.name))
    for section in sections:
        yield f"\n## {section.name}\n"
        # A dataclass without a docstring gets its signature as one.
        about = inspect.getdoc(section.section) or ""
        if not about.startswith(f"{section.section.__name__}("):
            yield f"{_escaped(about)}\n"
        values = defaults.get(section.name) or {}
        for key in keys_of(section.section):
            yield _entry(key, section.section, name=f"{section.name}.{key.name}", default=values.get(key.name))


def _defaults() -> dict[str, Any]:
    """Return the configuration of a recipe that sets nothing."""
    command = [sys.executable, "-m", "framework", "recipe=blank", "--cfg", "job"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    composed: dict[str, Any] = yaml.safe_load(printed)
    return composed


def _entry(key: Key, section: type, *, name: str, default: Any) -> str:
    """Return the entry of a key, which links and the search find by its dotted name."""
    meaning = comments().get((section.__name__, key.name), "")
    shown = yaml.safe_dump(default, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    lines = [
        f"```{{confval}} {name}",
        f":type: {_escaped(key.allowed)}",
        f":default: `{shown}`",
        "",
        _escaped(meaning),
        "```",
    ]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a comment as Markdown: outside of its code, no character marks anything up."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*_\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


# Public names


def api_reference() -> Iterator[str]:
    """Yield the public names of `framework` by their kinds, for autodoc."""
    names: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": [], "Types": []}
    for name in framework.__all__:
        value = getattr(framework, name)
        if inspect.ismodule(value):
            names[f"framework.{name}"] = list(_classes(value, prefix=name))
        elif inspect.isfunction(value):
            names["Functions"].append(name)
        elif not (inspect.isclass(value) and value.__module__.startswith("framework.")):
            names["Types"].append(name)
        elif issubclass(value, Exception):
            names["Exceptions"].append(name)
        else:
            names["Classes"].append(name)

    for kind, members in names.items():
        yield f"\n## {kind}\n\n```{{eval-rst}}"
        for name in members:
            yield from _directive(name, kind)
        yield "```"


def _classes(module: ModuleType, *, prefix: str) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and not name.startswith("_"):
            yield f"{prefix}.{name}"


def _directive(name: str, kind: str) -> Iterator[str]:
    directives = {"Functions": "autofunction", "Exceptions": "autoexception"}
    if kind != "Types":
        yield f".. {directives.get(kind, 'autoclass')}:: framework.{name}\n"
        return
    # An alias knows nothing of its own docstring: the source does.
    yield f".. py:data:: framework.{name}\n"
    for module in ("framework.types", "framework.media"):
        texts = ModuleAnalyzer.for_module(module).find_attr_docs()
        yield from (f"   {line}" for line in texts.get(("", name), []))


def read_comments(_: Sphinx) -> None:
    """Let autodoc read the comments above attributes, which it does where they begin with `#:`."""
    for name, module in list(sys.modules.items()):
        if name.startswith("framework.") and module.__file__:
            text = re.sub(r"^( +)# ", r"\1#: ", inspect.getsource(module), flags=re.MULTILINE)
            ModuleAnalyzer.cache["module", name] = ModuleAnalyzer.for_string(text, name, module.__file__)


def read_sections(_: Sphinx, what: str, __: str, ___: Any, ____: Any, lines: list[str]) -> None:
    """Make lists of `Args:`, `Returns:` and `Raises:`.

    As an extension, napoleon would also take the text before a colon for the type of an attribute or property.
    """
    if what not in ("attribute", "property"):
        lines[:] = GoogleDocstring(lines).lines()
