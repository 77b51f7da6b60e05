"""Write a checkpoint's model as one plain file, or a folder of transformers, on the CPU, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.config.parse import parse
from framework.jobs.export.graph import write_graph
from framework.jobs.export.source import load_source
from framework.jobs.export.weights import write_weights


def export(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Write the model with the weights of `checkpoint.path` in `export.format`.

    Args:
        arguments: `config` (as in config.yaml), `span` (how many devices the model is built for; each is the CPU) and
            `path` (of the file). If this raises, the caller removes what is left at `path`.

    Returns:
        `step`, `model` (its class) and `facts` to print.

    Raises:
        FrameworkError: the checkpoint doesn't fit, the model can't be exported, or the file differs from the model.
    """
    config = parse(arguments["config"])
    path = Path(arguments["path"])
    source = load_source(config, span=arguments["span"])
    if config.export.format in ("onnx", "torch_export"):
        facts = write_graph(source, path)
    elif config.export.format == "lightning":
        # Takes long to import.
        from framework.jobs.export.lightning_file import write_lightning

        facts = write_lightning(source, path)
    else:
        facts = write_weights(source, path)
    return {"step": source.step, "model": source.name, "facts": facts}
