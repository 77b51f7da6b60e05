"""Commands and files that the documentation shows, so that tests can hold it to them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.helpers.source import ROOT

PLACEHOLDER = re.compile(r"\.\.\.|…|\$\w+|\b(?:RUN|SWEEP|CHECKPOINT|FOLDER)\b")
"""What stands for a name that only the reader, or a script, knows: `resume=outputs/digits/...`, `init_from=RUN`."""

ONLY_ANSWERS = {"--help", "--hydra-help", "--version", "--cfg", "--info"}
"""Options with which nothing is run."""

_COMMAND = re.compile(r"(?:python -m framework|make train ARGS=|torchrun [^`\n]*?-m framework)[^`\n]*")
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)
_TEXT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE_NAME = re.compile(r"^(?:# @package \S+\n)?# ([\w/]+\.(?:yaml|py))\n")


MARKDOWN = MarkdownIt("commonmark").enable("table")


class Command(NamedTuple):
    """One command line: what is given to the command, and where it is written."""

    arguments: list[str]
    text: str
    place: str

    @property
    def concrete(self) -> list[str]:
        """The arguments without those that hold a placeholder."""
        return [argument for argument in self.arguments if not PLACEHOLDER.search(argument)]

    @property
    def placeholders(self) -> list[str]:
        return [argument for argument in self.arguments if PLACEHOLDER.search(argument)]


def documents() -> list[Path]:
    """The pages people read, and the YAML that holds the text of `--help`."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "conf/config.yaml",
    ]


def commands(text: str, *, place: str) -> Iterator[Command]:
    """Every `python -m framework …`, `torchrun … -m framework …`, `make train ARGS=…`, in blocks and in running text.

    A comment, two spaces or `&` end the command. Blocks marked as `text` show what a run prints and aren't looked at.
    """
    for match in _COMMAND.finditer(re.sub(r"\s*\\\n\s*", " ", _OUTPUT.sub("", text))):
        line = re.split(r"\s{2,}|\s#|\s&", match[0])[0]
        words = shlex.split(line)
        if words[0] == "make":
            yield Command(shlex.split(words[2].removeprefix("ARGS=")), line, place)
        else:
            yield Command(words[words.index("framework") + 1 :], line, place)
    for words in _pod_commands(text):
        yield Command(words[words.index("framework") + 1 :], " ".join(words), place)


def _pod_commands(text: str) -> Iterator[list[str]]:
    """The commands of the containers in every block that is a TrainJob or a PyTorchJob of Kubernetes."""
    for block in _YAML.findall(text):
        if "kind: TrainJob" in block:
            trainer = yaml.safe_load(block)["spec"]["trainer"]
            yield [*trainer["command"], *trainer["args"]]
        if "kind: PyTorchJob" in block:
            for replicas in yaml.safe_load(block)["spec"]["pytorchReplicaSpecs"].values():
                yield from (container["command"] for container in replicas["template"]["spec"]["containers"])


def all_commands() -> list[Command]:
    """Return every `python -m framework` in the documentation."""
    return list(chain.from_iterable(commands(file.read_text(), place=file.name) for file in documents()))


def _shown_by(argument: str, *, options: bool) -> str:
    """Return the key of an argument; with `options`, an option of a group with its value."""
    key = argument.partition("=")[0]
    is_option = "." not in key and not PLACEHOLDER.search(argument)
    return argument if options and is_option else key


def covering(given: Iterable[Command], *, options: bool) -> list[Command]:
    """Return the commands that show a key which none before shows: the README's first, the longest first.

    options: another option, as in `recipe=toy`, counts as another key.
    """
    seen: set[str] = set()
    found = []
    for command in sorted(given, key=lambda each: (each.place != "README.md", -len(each.arguments))):
        shown = {_shown_by(text, options=options) for text in command.arguments}
        if not shown <= seen:
            found.append(command)
        seen |= shown
    return found


def make_targets(text: str) -> set[str]:
    """Every `make TARGET` in a code block or between backticks."""
    in_code = [*_FENCE.findall(text), *re.findall(r"`([^`\n]+)`", text)]
    targets: set[str] = set()
    for code in in_code:
        targets.update(re.findall(r"^make (\w[\w-]*)", code, re.MULTILINE))
    return targets


def shown_script(text: str) -> str:
    """Return the only block that is a script: it begins with `#!`. Fail the test if there are several or none."""
    (script,) = (block for block in _FENCE.findall(text) if block.startswith("#!"))
    return str(script)


def shown_files(text: str) -> dict[str, str]:
    """Path → content, of code blocks that begin with a comment that is a path.

    Hydra wants its own comment, `# @package`, to be the very first.
    """
    return {match[1]: block for block in _FENCE.findall(text) if (match := _FILE_NAME.match(block))}


def write_shown_files(folder: Path, *, pages: Iterable[Path] | None = None) -> None:
    """Write the files that the documentation shows to a working directory, as a reader would make them.

    pages: None: all.
    """
    for file in pages or documents():
        for name, content in shown_files(file.read_text()).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)


def shown_text(file: Path, *, begins: str) -> str:
    """What a page shows of what is printed: the one block marked as `text` that begins so."""
    (text,) = (block for block in _TEXT.findall(file.read_text()) if block.startswith(begins))
    return str(text)


def _tokens(text: str) -> Iterator[Token]:
    """Every token, those inside paragraphs and cells too."""
    for token in MARKDOWN.parse(text):
        yield token
        yield from token.children or ()


def links(text: str) -> list[str]:
    """The addresses of all links and pictures."""
    found = []
    for token in _tokens(text):
        if token.type == "link_open":
            found.append(str(token.attrs["href"]))
        elif token.type == "image":
            found.append(str(token.attrs["src"]))
    return found
