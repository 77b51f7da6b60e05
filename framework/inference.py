"""`job=eval` and `job=predict` on one rank: a trained model over one part of the data, every sample once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from framework import build
from framework.config.schema import Part
from framework.data.loader import EvalLoader
from framework.data.stream_loader import StreamEvalLoader
from framework.distributed.collectives import barrier
from framework.distributed.group import process_group
from framework.errors import ConfigError, DataError
from framework.evaluator import evaluate
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.precision import PrecisionPlugin
from framework.predictions import columns_of, join_parts, save_part
from framework.pulse import Phase
from framework.session import Rank, entered, eval_loader, load_model, open_for_streams
from framework.streams import check_streams
from framework.types import Datasets


def evaluate_rank(arguments: RankArguments, link: Link) -> None:
    """Metrics of `eval.part` with the weights of `checkpoint.path`, left in `run.json`. Raises FrameworkError."""
    with entered(arguments, link) as rank:
        part = rank.config.eval.part
        with _ready(rank, arguments, part=part) as (model, loader, precision):
            metrics = evaluate(
                model,
                loader,
                task=precision.convert_task(build.build_task(rank.config.task)),
                precision=precision,
                context=rank.context,
                prefix=part.value,
            )
        if rank.context.is_main:
            rank.run_dir.update_run({"results": {"metrics": metrics}})


def predict_rank(arguments: RankArguments, link: Link) -> None:
    """What the model says of `predict.part`, in the dataset's order, to `predict.output`. Raises FrameworkError."""
    with entered(arguments, link) as rank:
        task: Any = build.build_task(rank.config.task)
        if not callable(getattr(task, "predict_step", None)):
            raise ConfigError(
                f"job=predict needs a task with predict_step(model, batch); {type(task).__name__} has none.\n"
                "Give it one that returns a tensor, or a dict of tensors, with a row for each sample."
            )
        part = rank.config.predict.part
        with _ready(rank, arguments, part=part) as (model, loader, precision):
            precision.convert_task(task)
            turns = loader.turns if isinstance(loader, StreamEvalLoader) else None
            mine = _part_file(rank, rank.context.rank)
            save_part(list(_predictions(model, loader, task=task, precision=precision)), mine)
            barrier(rank.context)
            if rank.context.is_main:
                parts = [_part_file(rank, number) for number in range(rank.context.world_size)]
                count = join_parts(parts, Path(rank.config.predict.output), turns=turns)
                rank.run_dir.update_run({"results": {"samples": count}})


def _predictions(
    model: nn.Module, loader: EvalLoader | StreamEvalLoader, *, task: Any, precision: PrecisionPlugin
) -> Iterator[dict[str, torch.Tensor]]:
    model.eval()
    with torch.inference_mode():
        for micro in loader:
            with precision.autocast():
                prediction = task.predict_step(model, precision.convert_batch(micro.batch))
            yield columns_of(prediction, num_samples=micro.num_samples)


@contextmanager
def _ready(
    rank: Rank, arguments: RankArguments, *, part: Part
) -> Iterator[tuple[nn.Module, EvalLoader | StreamEvalLoader, PrecisionPlugin]]:
    """The model with its weights, this rank's share of the part, and the precision, inside the process group."""
    config, context = rank.config, rank.context
    datasets = build.build_datasets(config.data.datasets)
    dataset = _part(datasets, part)
    check_streams(config, datasets, rank.strategy)
    trainer = config.trainer
    limits = {
        Part.TRAIN: trainer.limit_train_batches,
        Part.VAL: trainer.limit_val_batches,
        Part.TEST: trainer.limit_test_batches,
    }
    loader = eval_loader(rank, dataset, part=part.value, limit=limits[part])
    if loader is None:
        key = f"trainer.limit_{part.value}_batches"
        raise DataError(f"{key}=0 leaves nothing of the {part.value} part. Set {key}=null.")
    rank.link.pulse.at(Phase.MEETING)
    with process_group(context, config.backend, rendezvous=arguments.rendezvous):
        rank.link.pulse.at(Phase.BUILDING)
        open_for_streams(rank, datasets)
        try:
            settings = config.trainer
            precision = PrecisionPlugin(settings.precision, device=context.device, channels_last=settings.channels_last)
            model = precision.convert_model(build.build_model(config.model, context=context))
            load_model(rank, model, Path(str(config.checkpoint.path)))
            rank.link.pulse.at(Phase.EVALUATE)
            yield model, loader, precision
            rank.link.pulse.at(Phase.CLOSING)
        finally:
            loader.close()


def _part(datasets: Datasets, part: Part) -> Any:
    there = [name for name, dataset in datasets._asdict().items() if dataset is not None]
    if part.value not in there:
        raise DataError(f"data.datasets gives no {part.value} part. There is: {', '.join(there)}.")
    return getattr(datasets, part.value)


def _part_file(rank: Rank, number: int) -> Path:
    return rank.run_dir.path / f"predictions_{number:05d}.part"
