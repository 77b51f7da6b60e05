"""Rules between keys: names that must exist, and values that exclude each other.

Rules that depend on the machine are in `command.launcher`, a strategy's own ones beside it (`strategies.fsdp_rules`).
Each message says what was set, what it conflicts with, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from framework.config.observers import observer_mistakes
from framework.config.optimizers import closure_mistakes, optimizer_configs, refused_by_torch, schedules
from framework.config.schema import CUDA_GRAPH_MODES, Config, DataConfig
from framework.config.suggest import did_you_mean
from framework.config.targets import SourceSignatures, check_node, import_target, target_mistakes
from framework.errors import ConfigError


def rule_mistakes(config: Config) -> Iterator[str]:
    """Yield what is wrong between the keys of `config`."""
    for rule in (
        _limits,
        _trainer,
        _processes,
        _launcher,
        _data,
        _optimizer,
        _scheduler,
        _metrics,
        _init,
    ):
        yield from rule(config)


def _limits(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.max_epochs is None and trainer.max_steps is None and not trainer.fast_dev_run:
        yield "trainer.max_epochs and trainer.max_steps are both null, so training would never end. Set one of them."
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
        value = getattr(trainer, name)
        if isinstance(value, float) and value > 1:
            yield f"trainer.{name}={value}: a fraction of the batches is at most 1.0; a number of batches is whole."
    interval = trainer.val_check_interval
    if isinstance(interval, float):
        if interval > 1:
            yield (
                f"trainer.val_check_interval={interval}: a share of the epoch is at most 1.0; a number of optimizer "
                "steps is whole."
            )
        if trainer.check_val_every_n_epoch is None:
            yield (
                f"trainer.val_check_interval={interval} is a share of the epochs that are validated, and "
                "trainer.check_val_every_n_epoch=null validates none. Set it to 1, or use a number of optimizer steps."
            )
    if trainer.overfit_batches is not None:
        for name in ("limit_train_batches", "limit_val_batches", "fast_dev_run"):
            if getattr(trainer, name) not in (None, False):
                yield (
                    f"trainer.overfit_batches can't go with trainer.{name}: each decides the batches. Set one of them."
                )


def _trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    mode = trainer.compile
    accumulate = trainer.accumulate_grad_batches
    if trainer.activation_checkpointing is not None and mode is not None:
        yield (
            f"trainer.activation_checkpointing can't go with trainer.compile={mode}: compiled BatchNorm would count "
            "each batch twice. Set one of them to null."
        )
    if mode in CUDA_GRAPH_MODES and accumulate > 1:
        yield (
            f"trainer.compile={mode} can't go with trainer.accumulate_grad_batches={accumulate}: in a CUDA graph's "
            "memory each micro-batch would overwrite the gradients of the one before. Use "
            "trainer.compile=default or max-autotune-no-cudagraphs, or trainer.accumulate_grad_batches=1."
        )
    if trainer.deterministic and trainer.benchmark:
        yield (
            "trainer.benchmark=true can't go with trainer.deterministic=true: it picks kernels by their speed, "
            "differently each time. Set trainer.benchmark=null."
        )


def _processes(config: Config) -> Iterator[str]:
    topology = config.topology
    nnodes = topology.nnodes
    if topology.node_rank >= nnodes:
        yield (
            f"topology.node_rank={topology.node_rank} is out of range: it must be less than topology.nnodes={nnodes}."
        )
    if topology.rdzv_endpoint is not None and not _is_endpoint(topology.rdzv_endpoint):
        yield (
            f"topology.rdzv_endpoint={topology.rdzv_endpoint}: must be HOST:PORT, a name or address of node 0 and a "
            "port from 1 to 65535 that is free there, such as node0:29400."
        )
    if topology.rdzv_secret is not None:
        yield (
            "topology.rdzv_secret is set in a file, so the run would save it in plain text. Set the environment "
            "variable FRAMEWORK_RDZV_SECRET instead, or type it as topology.rdzv_secret=SECRET."
        )
    if topology.share_gpus and config.backend.name == "nccl":
        yield (
            "topology.share_gpus=true can't go with backend=nccl, which needs a GPU of its own for each process. "
            "Use backend=gloo, or backend=auto, which uses gloo if GPUs are shared."
        )


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _launcher(config: Config) -> Iterator[str]:
    settings = config.launcher
    mistakes = list(check_node({"_target_": settings._target_, **settings.args}, "launcher"))
    if mistakes:
        yield from mistakes
        return
    launcher = import_target(settings._target_)
    if not hasattr(launcher, "spans_nodes"):
        yield f"launcher._target_={settings._target_}: must be a subclass of framework.launch.base.Launcher."
        return

    nodes = config.topology.nnodes
    if nodes > 1 and not launcher.spans_nodes:
        yield (
            f"launcher={launcher.name} is for one machine; topology.nnodes={nodes} needs launcher=elastic. Change one."
        )
    if settings.max_restarts > 0 and not launcher.restarts:
        yield (
            f"launcher.max_restarts={settings.max_restarts}: launcher={launcher.name} doesn't restart after a failure. "
            "Use launcher=elastic, or launcher.max_restarts=0."
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for name in ("root", "mirrors"):
        if getattr(data, name) is not None and name not in data.datasets:
            yield f"data.{name} is set, but data.datasets ({data.datasets['_target_']}) doesn't take it."
    if data.loader == "resident" and data.num_workers:
        yield (
            f"data.num_workers={data.num_workers} can't go with data.loader=resident, which has nothing to load. "
            "Set data.num_workers=auto, or data.loader=dataloader."
        )
    twice = sorted({*data.skip_steps} & {*data.defer_steps})
    if twice:
        yield f"data.skip_steps and data.defer_steps both have {', '.join(map(str, twice))}. Leave each in one of them."
    yield from _folds(data)


def _folds(data: DataConfig) -> Iterator[str]:
    folds = data.folds
    fold = data.fold
    if folds is None and fold is not None:
        yield f"data.fold={fold} needs data.folds, the number of folds: data.folds=5"
    elif folds is not None and fold is None:
        yield (
            f"data.folds={folds} needs data.fold, the number of the fold to hold out, from 0 to {folds - 1}. "
            f"To hold out each in turn: -m data.folds={folds} 'data.fold=range({folds})'"
        )
    elif folds is not None and fold is not None and fold >= folds:
        yield f"data.fold={fold}: the folds of data.folds={folds} have the numbers 0 to {folds - 1}."


def _optimizer(config: Config) -> Iterator[str]:
    try:
        optimizers = optimizer_configs(config.optimizer)
    except ConfigError as error:
        yield str(error)
    else:
        yield from closure_mistakes(optimizers, config.trainer.precision)


def _scheduler(config: Config) -> Iterator[str]:
    # If the section `optimizer` has mistakes, its schedules aren't known.
    if any(_optimizer(config)):
        return
    for key, schedule in schedules(config):
        if schedule is None or not schedule["_target_"].endswith(".ReduceLROnPlateau"):
            continue
        if config.scheduler.monitor is None:
            yield f"{key}: ReduceLROnPlateau needs a metric. Set scheduler.monitor, to val/loss for instance."
        if config.scheduler.interval == "step":
            yield f"{key}: ReduceLROnPlateau can't go with scheduler.interval=step. Use scheduler.interval=epoch."


def _metrics(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    trainer = config.trainer
    if checkpoint.enabled and checkpoint.monitor is None and checkpoint.save_top_k > 1:
        yield (
            f"checkpoint.save_top_k={checkpoint.save_top_k} keeps the best ones, which needs a metric. "
            "Set checkpoint.monitor, to val/loss for instance, or save_top_k=1 or -1."
        )

    has_no_interval = trainer.val_check_interval is None and trainer.check_val_every_n_epoch is None
    is_never_validated = has_no_interval or trainer.limit_val_batches == 0
    monitors = {"scheduler.monitor": config.scheduler.monitor}
    if checkpoint.enabled:
        monitors["checkpoint.monitor"] = checkpoint.monitor
    for key, metric in monitors.items():
        if metric is None:
            continue
        part, _, name = metric.partition("/")
        if part != "val" or not name:
            plain = re.sub(r"^(val|valid|validation)_", "", name or metric.strip("/"))
            guess = f"{key}=val/{plain}"
            yield f"{key}={metric}: must be a validation metric, named val/….{did_you_mean(guess)}"
        elif is_never_validated:
            yield (
                f"{key}={metric} is never computed, because validation is off. Set {key}=null, or "
                "trainer.limit_val_batches=null and one of trainer.check_val_every_n_epoch and val_check_interval."
            )


def source_mistakes(config: Config) -> Iterator[str]:
    """Yield what source files show to be wrong with targets. The ranks import them, and check the rest."""
    # If the section `optimizer` has mistakes, its targets aren't known.
    if any(_optimizer(config)):
        return
    if config.trainer.fast_dev_run:
        # Neither of them is built.
        config = replace(config, logger={}, callbacks={})
    yield from target_mistakes(config, SourceSignatures())
    yield from refused_by_torch(config.optimizer)
    yield from observer_mistakes(config.callbacks, config.logger)


def validation_mistakes(config: Config) -> Iterator[str]:
    """Yield what is wrong with when a training validates, as far as it is known without the data.

    The engine checks the rest, which depends on the steps of an epoch.
    """
    trainer = config.trainer
    if trainer.fast_dev_run or trainer.limit_val_batches == 0:
        return
    # The interval and the length of the run, in the same unit.
    interval = "check_val_every_n_epoch"
    end = "max_epochs"
    if isinstance(trainer.val_check_interval, int):
        interval = "val_check_interval"
        end = "max_steps"
    every = getattr(trainer, interval)
    last = getattr(trainer, end)
    if every is not None and last is not None and every > last:
        yield (
            f"trainer.{interval}={every} is above trainer.{end}={last}, so nothing would be validated. "
            f"Use {last} or less, or trainer.limit_val_batches=0 to train without validation."
        )


def _init(config: Config) -> Iterator[str]:
    if config.init.training and config.init_from is None:
        yield "init.training=true needs init_from=FILE.ckpt, a checkpoint of Lightning. Set both or neither."
    for key, patterns in (("rename", config.init.rename), ("skip", config.init.skip)):
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"init.{key}: {pattern!r} isn't a regular expression: {error}."
