"""`job=eval`, `job=predict` and a user's function on one rank: what is done with a trained model.

Every sample of a part is evaluated or predicted once; rank 0 writes the predictions in the order of the dataset.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint import read_manifest
from framework.config.schema import Part
from framework.config.targets import check_node, import_target, takes
from framework.data.loader import EvalLoader
from framework.distributed.collectives import gather_to_first
from framework.distributed.process_group import process_group
from framework.engine.assemble import Assembled
from framework.engine.data_checks import streams_of
from framework.engine.loaders import build_data, make_eval_loaders
from framework.engine.setup import RankSetup, setup_rank
from framework.engine.work import joined, trained_model
from framework.errors import ConfigError, DataError, TargetError
from framework.launch.plan import MonitorLink, RankArguments
from framework.media import markdown_texts
from framework.monitoring.rank_status import RankPhase
from framework.system.files import atomic_output
from framework.training.broadcasting import refused_broadcasting
from framework.training.evaluation import Evaluator

Columns = dict[str, Tensor]
"""Name → values of some samples: shape (n,) or (n, k) or more, on the CPU."""


def evaluate_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Evaluate the weights of `checkpoint.path` on `eval.part`; rank 0 writes the metrics to `run.json`."""
    with setup_rank(arguments, link) as setup:
        part = setup.config.eval.part
        with _ready(setup, arguments, part=part) as (assembled, loaders), refused_broadcasting():
            evaluator = Evaluator(
                model=assembled.model,
                task=assembled.task,
                precision=assembled.precision,
                context=setup.context,
                inference_mode=setup.config.trainer.inference_mode,
            )
            found = evaluator.evaluate(loaders)
        if setup.context.is_main:
            setup.run_dir.update_run({"results": {"metrics": found.metrics, "texts": markdown_texts(found.texts)}})


def predict_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Write the model's predictions for `predict.part` to `predict.output`, in the order of the dataset."""
    with setup_rank(arguments, link) as setup:
        part = setup.config.predict.part
        with _ready(setup, arguments, part=part) as (assembled, loaders):
            task: Any = assembled.task
            if not callable(getattr(task, "predict_step", None)):
                raise ConfigError(
                    f"job=predict needs a task with predict_step(model, batch); {type(task).__name__} has none.\n"
                    "Give it one that returns a tensor, or a dict of tensors, with a row for each sample."
                )
            if len(loaders) > 1:
                raise ConfigError(
                    f"job=predict writes the predictions of one set, and the {part} part has {', '.join(loaders)}.\n"
                    "Choose one by a keyword of data.datasets, or give a Datasets with one."
                )
            (loader,) = loaders.values()
            predictions = _predictions(assembled, loader, inference_mode=setup.config.trainer.inference_mode)
            own = concatenated(list(predictions))
            shares = gather_to_first(own, setup.context)
            if setup.context.is_main:
                output = Path(setup.config.predict.output).expanduser()
                count = write_predictions(shares, output, turns=loader.turns)
                setup.run_dir.update_run({"results": {"samples": count}})


def call_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Call the function that `job` names, `function(model, **args)`, with the weights of `checkpoint.path`.

    It also gets `config`, `run_dir` and `context`, those that its signature has. The model is in evaluation mode.
    """
    with setup_rank(arguments, link) as setup:
        config = setup.config
        offered = {"config": config, "run_dir": setup.run_dir, "context": setup.context}
        node = {"_target_": config.job, **config.args}
        try:
            function = import_target(config.job)
        except TargetError as error:
            raise TargetError(f"job={config.job}: {error}") from error
        if mistakes := list(check_node(node, "args", positional=1, supplied=offered)):
            raise TargetError("\n".join(mistakes))
        keywords = {name: value for name, value in offered.items() if name not in config.args and takes(node, name)}
        with joined(setup, arguments, needs_weights=True) as model:
            function(model, **keywords, **config.args)


def _predictions(assembled: Assembled, loader: EvalLoader, *, inference_mode: bool) -> Iterator[Columns]:
    task: Any = assembled.task
    precision = assembled.precision
    assembled.model.eval()
    with torch.inference_mode() if inference_mode else torch.no_grad():
        for micro in loader:
            with precision.autocast():
                prediction = task.predict_step(assembled.model, precision.convert_batch(micro.batch))
            yield columns_of(prediction, num_samples=micro.num_samples)


@contextmanager
def _ready(
    setup: RankSetup, arguments: RankArguments, *, part: Part
) -> Iterator[tuple[Assembled, dict[str, EvalLoader]]]:
    """Yield the model with its weights, and this rank's loaders, inside the process group."""
    datasets, setup = build_data(setup)
    loaders = make_eval_loaders(setup, datasets, part=part)
    if not loaders:
        raise DataError(
            f"data.datasets gives no {part} part, or trainer.limit_{part}_batches=0 leaves nothing of it. "
            f"There is: {', '.join(datasets.parts)}."
        )
    setup.link.rank_status.set_phase(RankPhase.MEETING)
    with ExitStack() as stack:
        stack.enter_context(process_group(setup.context, setup.config.backend, rendezvous=arguments.rendezvous))
        for loader in loaders.values():
            stack.enter_context(closing(loader))
        if streams_of(datasets):
            setup.exchange.open()
        stack.enter_context(setup.link.recording())
        assembled = trained_model(setup)
        assert assembled.checkpoint is not None
        epoch = read_manifest(assembled.checkpoint).epoch
        for loader in loaders.values():
            loader.set_epoch(epoch)
        yield assembled, loaders
        setup.link.rank_status.set_phase(RankPhase.CLOSING)


# The file of predictions


def columns_of(prediction: Tensor | Mapping[str, Tensor], *, num_samples: int) -> Columns:
    """Return what a task's `predict_step` returned as columns. Raises ConfigError for all but a row for each sample."""
    named: dict[str, Any] = dict(prediction) if isinstance(prediction, Mapping) else {"output": prediction}
    for name, values in named.items():
        if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != num_samples:
            seen = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(
                f"The task's predict_step returned {name!r} as {seen} for a batch of {num_samples} samples.\n"
                "It must return a tensor, or a dict of tensors, whose first dimension is the sample."
            )
    return {name: values.detach().cpu() for name, values in named.items()}


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Return the samples of all parts, one part after another; no columns without parts."""
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def write_predictions(shares: Sequence[Columns], output: Path, *, turns: int | None = None) -> int:
    """Write the shares of all ranks to `output`, and return the number of samples.

    Args:
        shares: of each rank, in the order of ranks; a rank without samples has no columns.
        output: `.csv` (a header, one row for each sample, an index first) or `.pt` (a dict of tensors).
        turns: how many samples each rank has in turn; None if one share follows another (each rank read a shard of a
            stream).

    Raises:
        RunError: the disk refuses.
    """
    sizes = [len(next(iter(share.values()), ())) for share in shares]
    columns = concatenated([share for share in shares if share])
    if turns is not None and len(shares) > 1:
        rounds = torch.cat([torch.arange(size) // turns for size in sizes])
        order = rounds.argsort(stable=True)  # stable: within a round, samples stay in the order of ranks
        for name in columns:
            columns[name] = columns[name][order]
    with atomic_output(output, key="predict.output") as path:
        if output.suffix == ".csv":
            _write_csv(columns, path)
        else:
            torch.save(columns, path)
    return sum(sizes)


def _write_csv(columns: Columns, path: Path) -> None:
    """Write a column for each number of a sample: `output` of shape (n, 3) is `output_0`, `output_1`, `output_2`."""
    names = ["index"]
    cells = []
    for name, values in columns.items():
        flat = values[:, None].flatten(start_dim=1)
        names += [name] if values.ndim == 1 else [f"{name}_{i}" for i in range(flat.shape[1])]
        cells += [list(map(_number, column)) for column in flat.T.tolist()]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([index, *row] for index, row in enumerate(zip(*cells, strict=True)))


def _number(value: Any) -> Any:
    return f"{value:.9g}" if isinstance(value, float) else value  # nine digits give the same float32 back
