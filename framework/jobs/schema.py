"""`job=schema`: write `conf/schema.json`, by which editors complete and check recipes. No torch here."""

from __future__ import annotations

from pathlib import Path

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.assets import config_dir, user_config_dir
from framework.config.json_schema import SCHEMA_NAME, json_schema
from framework.system.files import atomic_output
from framework.system.formatting import display_path

_MODELINE = f"# yaml-language-server: $schema=../{SCHEMA_NAME}"


class Schema(Job):
    """Write the JSON Schema of recipes, with the options and targets of the user's own YAML files."""

    needs_ranks = False
    sweepable = False

    def run(self, request: Request) -> JobResult:
        """Write it into `conf` of the working directory. Raises RunError if that can't be written."""
        folders = [config_dir()]
        own = user_config_dir(Path.cwd())
        if own is not None:
            folders.append(own)
        folder = Path.cwd() / "conf"
        folder.mkdir(exist_ok=True)
        with atomic_output(folder / SCHEMA_NAME, key="job=schema") as path:
            path.write_text(json_schema(folders), encoding="utf-8")
        print(f"Wrote {display_path(folder / SCHEMA_NAME)}. Second line of each recipe: {_MODELINE}", flush=True)
        return JobResult(0, results={"output": display_path(folder / SCHEMA_NAME)})
