"""What is submitted, and the base class of those that a job can be submitted to. No torch here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from framework.config.overrides import path_value, quoted
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import ConfigError, RunError
from framework.launch.base import launcher_class
from framework.launch.cluster_environment import ClusterEnvironment
from framework.launch.external import external_topology
from framework.remote.place import is_url
from framework.strategies.rules import refusals

# Lines are broken nowhere.
_WIDTH = 1_000_000


@dataclass(frozen=True)
class Submission:
    """A command that trains, and the processes that it needs."""

    config: Config
    topology: Topology
    # True: the command is a worker of a sweep, which starts the ranks of its trials itself.
    is_worker: bool
    # The words that follow `python -m framework`: those that were typed, without what is about the submission.
    words: tuple[str, ...]
    # The folder of the job's own folder of runs. None: the words name the run or the sweep that every start continues.
    outputs: str | None
    # What is typed for this engine.
    options: Mapping[str, Any]


class Engine:
    """Where a job is submitted to."""

    # The program that submits it.
    program: ClassVar[str]
    # What it makes of a submission, for messages.
    kind: ClassVar[str]

    def __init__(self, submission: Submission) -> None:
        self.submission = submission

    def mistakes(self) -> Iterator[str]:
        """Yield why the request can't be met. Nothing is written or submitted then."""
        return iter(())

    def text(self) -> str:
        """Return the file that is submitted."""
        raise NotImplementedError

    def submit(self, text: str) -> str:
        """Submit the file and return the job's name or number. Raises RunError if it is refused."""
        raise NotImplementedError

    def find_program(self) -> str:
        """Return the path of the program. Raises ConfigError if it isn't on PATH."""
        path = shutil.which(self.program)
        if path is None:
            raise ConfigError(
                f"submit.format={self.submission.config.submit.format} needs {self.program}, which isn't on PATH.\n"
                "Submit from a machine of the cluster that has it, or print the job with submit.dry_run=true."
            )
        return path

    def call(self, *arguments: str, given: str | None = None, prints: bool) -> str:
        """Run the program and return what it printed on stdout, if it doesn't print itself. Raises RunError.

        Args:
            given: the text of its stdin.
            prints: what it prints goes to the terminal.
        """
        command = [self.find_program(), *arguments]
        output = None if prints else subprocess.PIPE
        result = subprocess.run(command, input=given, stdout=output, stderr=output, text=True, check=False)
        if result.returncode != 0:
            reason = "see what it printed."
            if not prints:
                reason = result.stderr.strip()
            raise RunError(f"{self.program} has failed with status {result.returncode}: {reason}")
        return result.stdout or ""


def outputs_word(outputs: str, name: str) -> str:
    """Return the override that lets a job have the folder `name` of `outputs` for its runs."""
    return f"path.outputs={path_value(f'{outputs}/{name}')}"


def shell_outputs(outputs: str, name: str) -> str:
    """Return the same override as a word of the shell. name: in double quotes, with the shell's variables."""
    folder = f"{outputs}/"
    value = path_value(folder)
    if value == folder:
        return f'path.outputs={folder}"{name}"'
    begin = quoted(folder).removesuffix("'")
    return shlex.quote(f"path.outputs={begin}") + f'"{name}' + "'\""


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with what the user sets in place of what the framework writes; null removes a field."""
    result = dict(ours)
    for key, value in theirs.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def nested(fields: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value at a path of keys; None if there is none."""
    value: Any = fields
    for key in keys:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def yaml_text(fields: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in which texts of several lines are blocks."""
    text: str = yaml.dump(fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def lost_outputs(submission: Submission) -> Iterator[str]:
    """Yield a mistake if runs would be written to a disk that ends with the job's machine."""
    outputs = submission.outputs
    if outputs is not None and not Path(outputs).is_absolute() and not is_url(outputs):
        yield (
            f"path.outputs={outputs} would be lost with the machines of the job. Name a bucket, as "
            "path.outputs=s3://BUCKET/FOLDER, or the absolute path of a volume that all of them mount."
        )


def started_mistakes(submission: Submission, *, starter: str) -> Iterator[str]:
    """Yield what ranks that `starter` has started would refuse."""
    config = submission.config
    launcher = launcher_class(config.launcher)
    if not launcher.joins_started_ranks:
        yield f"launcher={launcher.name} can't be used here: {starter} starts the ranks. Leave it out."
        return
    cluster = ClusterEnvironment(
        starter=starter,
        rank=0,
        local_rank=0,
        nnodes=submission.topology.nnodes,
        procs_per_node=submission.topology.procs_per_node,
        host="HOST",
        port=0,
    )
    yield from refusals(lambda: external_topology(config, cluster, visible_gpus=submission.topology.gpus_per_node))


def worker_mistakes(submission: Submission) -> Iterator[str]:
    """Yield a mistake if the workers of a sweep are to be submitted where only SLURM can take them."""
    if submission.is_worker:
        yield (
            f"submit.format={submission.config.submit.format} takes no sweep (-m), whose workers share the files of "
            "its folder. Use submit.format=slurm, or submit each run without -m."
        )
