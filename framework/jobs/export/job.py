"""`job=export checkpoint.path=CHECKPOINT`: a trained model as a plain file or folder. No run directory, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from framework.checkpoint import read_manifest
from framework.command.request import JobResult, Request
from framework.config.schema import ExportFormat
from framework.config.topology import resolve_topology
from framework.errors import ConfigError
from framework.launch.fork_server import call_in_child
from framework.system.files import atomic_output, checked_output
from framework.system.formatting import display_path, format_facts
from framework.system.shown_text import shown
from framework.system.versions import installed_versions

# By format: the file's suffix, empty for a folder, and the packages it needs besides torch.
_FORMATS: Mapping[ExportFormat, tuple[str, tuple[str, ...]]] = {
    "state_dict": (".pt", ()),
    "safetensors": (".safetensors", ("safetensors",)),
    "pretrained": ("", ()),
    "onnx": (".onnx", ("onnx", "onnxscript")),
    "torch_export": (".pt2", ()),
}
_KEY = "export.output"


def main(request: Request) -> JobResult:
    """Write it in a child of the fork server, and print what is in it. A failed export leaves nothing."""
    output, config = check(request), request.config
    # The model is that of the run's processes, whatever this machine has.
    span = resolve_topology(config.topology, gpus=config.trainer.gpus or 0).span
    with atomic_output(output, key=_KEY) as path:
        facts = call_in_child(
            request.fork_server,
            "framework.jobs.export.model_file:export",
            {"config": dict(request.raw), "span": span, "path": str(path)},
            timeout_s=config.backend.init_timeout,
            purpose="export the model",
        )
    print(f"Exported {facts['model']} of {config.recipe} after step {facts['step']:,} as {config.export.format}")
    checkpoint = ("checkpoint", display_path(Path(str(config.checkpoint.path))))
    kind, files = ("folder", [*output.iterdir()]) if output.is_dir() else ("file", [output])
    written = (kind, f"{display_path(output)}, {sum(each.stat().st_size for each in files):,} bytes")
    print(shown(format_facts([checkpoint, *facts["facts"], written])), flush=True)
    return JobResult(0)


def check(request: Request) -> Path:
    """Return the absolute path of what to write. Raises ConfigError for a mistake that can be found now."""
    config, output = request.config, request.config.export.output
    suffix, packages = _FORMATS[config.export.format]
    missing = [name for name, version in installed_versions(packages).items() if version == "not installed"]
    if missing:
        raise ConfigError(
            f"export.format={config.export.format} needs {' and '.join(missing)}, which isn't installed: "
            f"pip install {' '.join(missing)}"
        )
    if output is None:
        step = read_manifest(Path(str(config.checkpoint.path))).step
        output = f"{config.recipe.replace('/', '_')}_{step}{suffix}"
    return checked_output(output, key=_KEY, suffixes=[suffix] if suffix else [])
