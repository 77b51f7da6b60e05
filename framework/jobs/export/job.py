"""`job=export checkpoint.path=CHECKPOINT`: a trained model as a plain file or folder. No run directory, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from framework.checkpoint import read_manifest
from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.schema import Config, ExportFormat
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
    "lightning": (".ckpt", ()),
}
_KEY = "export.output"


class Export(Job):
    """Write a trained model, in a child of the fork server. A failed export leaves nothing."""

    needs_ranks = False
    needs_weights = True
    sweepable = False
    sections = ("export",)

    def check(self, request: Request) -> None:
        output_path(request.config)

    def run(self, request: Request) -> JobResult:
        """Write the file or folder, and print what is in it."""
        config = request.config
        output = output_path(config)
        # The model is that of the run's processes, whatever this machine has.
        span = resolve_topology(config.topology, gpus=config.trainer.gpus or 0).span
        with atomic_output(output, key=_KEY) as path:
            model_facts = call_in_child(
                request.fork_server,
                "framework.jobs.export.model_file:export",
                {"config": dict(request.raw), "span": span, "path": str(path)},
                timeout_s=config.backend.init_timeout,
                purpose="export the model",
            )

        name = model_facts["model"]
        step = model_facts["step"]
        print(f"Exported {name} of {config.recipe} after step {step:,} as {config.export.format}")
        facts = [
            ("checkpoint", display_path(Path(str(config.checkpoint.path)))),
            *model_facts["facts"],
            _written(output),
        ]
        print(shown(format_facts(facts)), flush=True)
        results = {
            "output": display_path(output),
            "size_bytes": _size_bytes(output),
            "format": config.export.format,
            "model": name,
            "step": step,
        }
        return JobResult(0, results=results)


def output_path(config: Config) -> Path:
    """Return the absolute path of what to write. Raises ConfigError for a mistake that can be found now."""
    format_ = config.export.format
    if config.export.merge and config.peft is None:
        raise ConfigError(
            "export.merge=true merges the adapters of peft into the weights, and the model has none. Leave it out."
        )
    suffix, packages = _FORMATS[format_]
    versions = installed_versions(packages)
    missing = [name for name, version in versions.items() if version == "not installed"]
    if missing:
        raise ConfigError(
            f"export.format={format_} needs {' and '.join(missing)}, which isn't installed: "
            f"pip install {' '.join(missing)}"
        )

    output = config.export.output
    if output is None:
        step = read_manifest(Path(str(config.checkpoint.path))).step
        output = f"{config.recipe.replace('/', '_')}_{step}{suffix}"
    return checked_output(output, key=_KEY, suffixes=[suffix] if suffix else [])


def _written(output: Path) -> tuple[str, str]:
    """Return the line about the file or folder that was written, and its size."""
    kind = "folder" if output.is_dir() else "file"
    return kind, f"{display_path(output)}, {_size_bytes(output):,} bytes"


def _size_bytes(output: Path) -> int:
    files = list(output.iterdir()) if output.is_dir() else [output]
    return sum(file.stat().st_size for file in files)
