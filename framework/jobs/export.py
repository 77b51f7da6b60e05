"""`job=export checkpoint.path=CHECKPOINT`: a trained model as one plain file. No run directory; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from framework.checkpoint import read_manifest
from framework.config.schema import Config, ExportFormat
from framework.errors import ConfigError
from framework.jobs.request import JobResult, Request
from framework.jobs.summary import short
from framework.launch.errand import ask
from framework.output_file import checked_output, written_aside
from framework.topology import resolve_topology

_SUFFIXES = {
    ExportFormat.STATE_DICT: ".pt",
    ExportFormat.SAFETENSORS: ".safetensors",
    ExportFormat.ONNX: ".onnx",
    ExportFormat.TORCH_EXPORT: ".pt2",
}
_PACKAGES: Mapping[ExportFormat, tuple[str, ...]] = {
    ExportFormat.SAFETENSORS: ("safetensors",),
    ExportFormat.ONNX: ("onnx", "onnxscript"),
}
_KEY = "export.output"


def main(request: Request) -> JobResult:
    """Write the file, and say what is in it. Raises FrameworkError for what can't be done as asked.

    The work is that of a child of the fork server. Nothing is left at the file's place unless all went well.
    """
    output, config = check(request), request.config
    with written_aside(output, key=_KEY) as path:
        facts = ask(
            request.warm,
            "framework.exporting:answer",
            {"config": dict(request.raw), "span": _span(config), "path": str(path)},
            timeout_s=config.backend.init_timeout,
            purpose="export the model",
        )
    print(_said(config, facts, output), flush=True)
    return JobResult(0)


def check(request: Request) -> Path:
    """The file to write, absolute, once all is checked that can be without torch. Raises ConfigError."""
    config = request.config
    missing = [name for name in _PACKAGES.get(config.export.format, ()) if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"export.format={config.export.format.value} needs {' and '.join(missing)}, which isn't installed: "
            f"pip install {' '.join(missing)}"
        )
    if request.place is not None:
        raise ConfigError("job=export writes one file, so it can't go with a sweep (-m). Export one after another.")
    suffix = _SUFFIXES[config.export.format]
    if config.export.output is not None:
        return checked_output(config.export.output, key=_KEY, suffixes=[suffix])
    step = read_manifest(Path(str(config.checkpoint.path))).step
    return checked_output(f"{config.recipe.replace('/', '_')}_{step}{suffix}", key=_KEY, suffixes=[suffix])


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name where one is has none


def _span(config: Config) -> int:
    """How many devices the model is made for: those of one process of the run, whatever there is here."""
    return resolve_topology(config.topology, gpus=config.trainer.gpus or 0).span


def _said(config: Config, facts: Mapping[str, Any], output: Path) -> str:
    rows = [
        ("checkpoint", short(Path(str(config.checkpoint.path)))),
        *facts["lines"],
        ("file", f"{short(output)}, {output.stat().st_size:,} bytes"),
    ]
    title = f"Exported {facts['model']} of {config.recipe} after step {facts['step']:,} as {config.export.format.value}"
    return "\n".join([title, *(f"  {word:<12} {text}" for word, text in rows)])
