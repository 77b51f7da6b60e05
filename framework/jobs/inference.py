"""`job=eval`, `job=predict` and a user's function on one rank: what is done with a trained model.

Every sample of a part is evaluated or predicted once; rank 0 writes the predictions in the order of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint import read_manifest
from framework.config.schema import Part
from framework.config.targets import check_node, import_target, takes
from framework.data.loader import EvalLoader
from framework.distributed.collectives import gather_to_first
from framework.distributed.process_group import process_group
from framework.engine.assemble import Assembled
from framework.engine.builders.model import check_validation_step
from framework.engine.data_checks import streams_of
from framework.engine.loaders import make_eval_loaders, prepare_data
from framework.engine.setup import RankSetup, setup_rank
from framework.engine.weights import is_task_of, load_task
from framework.engine.work import joined, trained_model
from framework.errors import ConfigError, DataError, TargetError
from framework.jobs.prediction_file import Columns, columns_of, concatenated, write_predictions
from framework.launch.plan import MonitorLink, RankArguments
from framework.media import markdown_texts
from framework.monitoring.rank_status import RankPhase
from framework.training.broadcasting import refused_broadcasting
from framework.training.evaluation import Evaluator


def evaluate_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Evaluate the weights of `checkpoint.path` on `eval.part`; rank 0 writes the metrics to `run.json`."""
    with setup_rank(arguments, link) as setup:
        part = setup.config.eval.part
        with _ready(setup, arguments, part=part) as (assembled, loaders), refused_broadcasting():
            check_validation_step(assembled.task, loaders)
            evaluator = Evaluator(
                model=assembled.model,
                task=assembled.task,
                precision=assembled.precision,
                context=setup.context,
                inference_mode=setup.config.trainer.inference_mode,
            )
            evaluation = evaluator.evaluate(loaders)
        if setup.context.is_main:
            texts = markdown_texts(evaluation.texts)
            setup.run_dir.update_run({"results": {"metrics": evaluation.metrics, "texts": texts}})


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
                setup.run_dir.update_run({"results": {"samples": count, "output": str(output)}})


def call_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Call the function that `job` names: `function(model, **args)`.

    The model has the weights of `checkpoint.path`, or those it is built with, and is in evaluation mode. The function
    also gets `config`, `run_dir` and `context`, those that its signature has.
    """
    with setup_rank(arguments, link) as setup:
        config = setup.config
        offered = {"config": config, "run_dir": setup.run_dir, "context": setup.context}
        node = {"_target_": config.job, **config.args}
        try:
            function = import_target(config.job)
        except TargetError as error:
            raise TargetError(f"job={config.job}: {error}") from error
        mistakes = list(check_node(node, "args", positional=1, supplied=offered))
        if mistakes:
            raise TargetError("\n".join(mistakes))

        # An argument of the user's own wins over what is offered.
        keywords = {}
        for name, value in offered.items():
            if name not in config.args and takes(node, name):
                keywords[name] = value
        with joined(setup, arguments, with_model=True) as model:
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
    datasets, setup = prepare_data(setup)
    setup = _without_zero_limit(setup, part)
    loaders = make_eval_loaders(setup, datasets, part=part)
    if not loaders:
        raise DataError(f"data.datasets gives no {part} part. There is: {', '.join(datasets.parts)}.")
    setup.link.rank_status.set_phase(RankPhase.MEETING)
    with process_group(setup.context, setup.config.backend, rendezvous=arguments.rendezvous), ExitStack() as stack:
        for loader in loaders.values():
            stack.enter_context(closing(loader))
        if streams_of(datasets):
            setup.exchange.open()
        stack.enter_context(setup.link.recording())
        assembled = trained_model(setup)
        assert assembled.checkpoint is not None
        # A task that is evaluated in place of the one that was trained keeps its own state.
        if is_task_of(assembled.checkpoint, setup.config):
            load_task(assembled.task, assembled.model, assembled.checkpoint)
        epoch = read_manifest(assembled.checkpoint).epoch
        for loader in loaders.values():
            loader.set_epoch(epoch)
        yield assembled, loaders
        setup.link.rank_status.set_phase(RankPhase.CLOSING)


def _without_zero_limit(setup: RankSetup, part: Part) -> RankSetup:
    """Return the set-up with the whole part if `limit_PART_batches=0` has left it out of the training."""
    key = f"limit_{part}_batches"
    if getattr(setup.config.trainer, key) != 0:
        return setup
    whole: dict[str, Any] = {key: None}
    trainer = replace(setup.config.trainer, **whole)
    return replace(setup, config=replace(setup.config, trainer=trainer))
