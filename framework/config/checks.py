"""What no single key can say: names that must exist, and values that don't go together. Needs no torch.

Each check says what was set, what it can't go with, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from framework.config.assets import job_names, launcher_names
from framework.config.parse import raise_mistakes
from framework.config.schema import BackendName, Config, Interval, LoaderKind, Precision
from framework.config.suggest import did_you_mean, nearest

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches")
_ONE_NODE = ("in_place", "local")
_SHOWN_BACKENDS = (BackendName.GLOO.value, BackendName.NCCL.value)


def check(config: Config) -> None:
    """Raises ConfigError with everything in `config` that doesn't fit together."""
    raise_mistakes([mistake for one in _CHECKS for mistake in one(config)])


def _names(config: Config) -> Iterator[str]:
    given = {"job": (config.job, job_names()), "launcher.name": (config.launcher.name, launcher_names())}
    for key, (name, allowed) in given.items():
        if name not in allowed:
            guess = nearest(name, allowed)
            yield f"{key}={name}: must be one of {', '.join(allowed)}.{did_you_mean(guess and f'{key}={guess}')}"


def _length(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.max_epochs is None and trainer.max_steps is None and not trainer.fast_dev_run:
        yield "trainer.max_epochs and trainer.max_steps are both null, so training would never end. Set one of them."


def _shares(config: Config) -> Iterator[str]:
    for name in _LIMITS:
        value = getattr(config.trainer, name)
        if isinstance(value, float) and value > 1:
            yield (
                f"trainer.{name}={value}: a fraction is a share of the batches, so it is at most 1.0. "
                f"Write a whole number for that many batches."
            )


def _few_batches(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.overfit_batches is None:
        return
    for name in ("limit_train_batches", "limit_val_batches"):
        if getattr(trainer, name) is not None:
            yield f"trainer.overfit_batches can't go with trainer.{name}: it decides both. Set one of them to null."
    if trainer.fast_dev_run:
        yield "trainer.overfit_batches can't go with trainer.fast_dev_run: each decides the batches. Set one of them."


def _recomputed(config: Config) -> Iterator[str]:
    key, given = "trainer.activation_checkpointing", config.trainer.activation_checkpointing
    if isinstance(given, str) and given != "auto":
        yield f"{key}={given}: must be auto, or a list of class names: {key}=[{given}]"
    if given == ():
        yield f"{key}=[]: must be auto, null, or a list of class names, such as {key}=[Block]."
    if given is not None and config.trainer.compile is not None:
        yield (
            f"{key} can't go with trainer.compile={config.trainer.compile.value}: in compiled code statistics of "
            f"BatchNorm would count each batch twice. Set one of them to null."
        )


def _graphs(config: Config) -> Iterator[str]:
    mode, accumulate = config.trainer.compile, config.trainer.accumulate_grad_batches
    if mode is not None and mode.uses_cuda_graphs and accumulate > 1:
        yield (
            f"trainer.compile={mode.value} can't go with trainer.accumulate_grad_batches={accumulate}: gradients are "
            "in the memory of a CUDA graph, where each micro-batch would overwrite those of the one before. Use "
            "trainer.compile=default or max-autotune-no-cudagraphs, or trainer.accumulate_grad_batches=1."
        )


def _fast_dev_run(config: Config) -> Iterator[str]:
    if config.trainer.fast_dev_run and config.resume is not None:
        yield (
            "trainer.fast_dev_run can't go with resume: it writes no checkpoints, so the run would not go on. "
            "Use trainer.max_steps for a short continuation."
        )


def _processes(config: Config) -> Iterator[str]:
    procs = config.topology.procs_per_node
    if config.launcher.name == "in_place" and procs is not None and procs > 1:
        yield (
            f"launcher=in_place runs one process, this one; topology.procs_per_node={procs} needs launcher=local. "
            f"Change one of them."
        )
    if config.backend.name is BackendName.NCCL and config.trainer.gpus == 0:
        yield "backend=nccl needs GPUs, and trainer.gpus=0 uses none. Use backend=gloo or backend=auto."


def _nodes(config: Config) -> Iterator[str]:
    nodes, rank, launcher = config.topology.nnodes, config.topology.node_rank, config.launcher.name
    if rank >= nodes:
        allowed = "0" if nodes == 1 else f"0 to {nodes - 1}"
        yield f"topology.node_rank={rank} is out of range: with topology.nnodes={nodes} it is {allowed}."
    if nodes > 1 and launcher in _ONE_NODE:
        yield (
            f"launcher={launcher} starts processes on one machine; topology.nnodes={nodes} needs launcher=elastic. "
            f"Change one of them."
        )


def _meeting_place(config: Config) -> Iterator[str]:
    topology = config.topology
    endpoint = topology.rdzv_endpoint
    if endpoint is not None:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            yield (
                f"topology.rdzv_endpoint={endpoint}: must be HOST:PORT, a name or address of node 0 and a port from "
                f"1 to 65535 that is free there, such as node0:29400."
            )


def _sharing(config: Config) -> Iterator[str]:
    if not config.topology.share_gpus:
        return
    if config.topology.gpus_per_process is None:
        yield (
            "topology.share_gpus=true needs topology.gpus_per_process, the number of GPUs that each process uses. "
            "Use topology.gpus_per_process=1, or more for a model that takes `devices`."
        )
    if config.backend.name is BackendName.NCCL:
        yield (
            "topology.share_gpus=true can't go with backend=nccl, which wants a GPU of its own for each process. "
            "Use backend=gloo, or backend=auto, which takes gloo where GPUs are shared."
        )


def _restarts(config: Config) -> Iterator[str]:
    restarts, launcher = config.launcher.max_restarts, config.launcher.name
    if restarts > 0 and launcher not in ("auto", "elastic"):
        yield (
            f"launcher.max_restarts={restarts}: launcher={launcher} starts nothing anew after a failure. "
            f"Use launcher=elastic, or launcher.max_restarts=0."
        )


def _ignored(config: Config) -> Iterator[str]:
    for name in ("root", "mirrors"):
        target = config.data.datasets["_target_"]
        if getattr(config.data, name) is not None and name not in config.data.datasets:
            yield f"data.{name} is set, but data.datasets ({target}) isn't given it: this data has no use for it."


def _batches(config: Config) -> Iterator[str]:
    if _is_pipeline(config):  # whose processes don't all have samples of their own
        return
    size = config.data.global_batch_size
    procs = config.topology.procs_per_node or 1
    parts = config.trainer.accumulate_grad_batches * procs
    if size is not None and size < parts:
        yield (
            f"data.global_batch_size={size} can't be dealt: trainer.accumulate_grad_batches="
            f"{config.trainer.accumulate_grad_batches} over {procs} process(es) makes {parts} parts. "
            f"Use at least {parts}."
        )


def _loader(config: Config) -> Iterator[str]:
    data = config.data
    if data.loader is LoaderKind.RESIDENT and data.num_workers:
        yield (
            f"data.num_workers={data.num_workers} can't go with data.loader=resident, which has nothing to load. "
            "Set data.num_workers=auto, or data.loader=dataloader."
        )


def _deterministic(config: Config) -> Iterator[str]:
    if config.trainer.deterministic and config.trainer.benchmark:
        yield (
            "trainer.benchmark=true can't go with trainer.deterministic=true: it picks kernels by their speed, "
            "differently each time. Set trainer.benchmark=null."
        )


def _scheduler(config: Config) -> Iterator[str]:
    scheduler = config.scheduler
    if scheduler.schedule is None:
        if scheduler.monitor is not None:
            yield f"scheduler.monitor={scheduler.monitor} is watched by nothing: there is no scheduler.schedule."
        if scheduler.total_steps is not None:
            yield f"scheduler.total_steps={scheduler.total_steps} has no effect: there is no scheduler.schedule."
        return
    if scheduler.schedule["_target_"].rpartition(".")[2] != "ReduceLROnPlateau":
        return
    if scheduler.monitor is None:
        yield "ReduceLROnPlateau needs a metric to watch. Set scheduler.monitor, to val/loss for instance."
    if scheduler.interval is Interval.STEP:
        yield (
            "scheduler.interval=step can't go with ReduceLROnPlateau: its metric is new only after a validation. "
            "Use scheduler.interval=epoch."
        )


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.enabled and checkpoint.monitor is None and checkpoint.save_top_k > 1:
        yield (
            f"checkpoint.save_top_k={checkpoint.save_top_k} keeps the best ones, but checkpoint.monitor=null says "
            f"nothing about what is better. Set checkpoint.monitor, to val/loss for instance, or save_top_k=1 or -1."
        )


def _validation(config: Config) -> Iterator[str]:
    """Check what is known without the data; the engine checks the rest, which depends on the steps of an epoch."""
    trainer = config.trainer
    if config.job not in ("train", "plan") or trainer.fast_dev_run or trainer.limit_val_batches == 0:
        return
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch
    way_out = "or trainer.limit_val_batches=0 to train without validation."
    if interval is not None and trainer.max_steps is not None and interval > trainer.max_steps:
        yield (
            f"trainer.val_check_interval={interval} is above trainer.max_steps={trainer.max_steps}, so nothing would "
            f"be validated. Use {trainer.max_steps} or less, {way_out}"
        )
    if interval is None and every is not None and trainer.max_epochs is not None and every > trainer.max_epochs:
        yield (
            f"trainer.check_val_every_n_epoch={every} is above trainer.max_epochs={trainer.max_epochs}, so nothing "
            f"would be validated. Use {trainer.max_epochs} or less, {way_out}"
        )


def _monitors(config: Config) -> Iterator[str]:
    monitors = {"scheduler.monitor": config.scheduler.monitor}
    if config.checkpoint.enabled:
        monitors["checkpoint.monitor"] = config.checkpoint.monitor
    trainer = config.trainer
    never = trainer.val_check_interval is None and trainer.check_val_every_n_epoch is None
    for key, metric in monitors.items():
        if metric is None:
            continue
        part, slash, name = metric.partition("/")
        if part != "val" or not name:
            reason = " The test part is looked at once, at the end." if part == "test" else ""
            guess = f"{key}=val/{name if slash and name else metric.strip('/')}"
            yield f"{key}={metric}: must be a validation metric, named val/….{reason}{did_you_mean(guess)}"
        elif trainer.limit_val_batches == 0 or never:
            cause = "trainer.val_check_interval=null with trainer.check_val_every_n_epoch=null switch"
            if trainer.limit_val_batches == 0:
                cause = "trainer.limit_val_batches=0 switches"
            yield f"{key}={metric} is never known: {cause} validation off. Set {key}=null, or validate."


def _weights_to_use(config: Config) -> Iterator[str]:
    path = config.checkpoint.path
    if config.job in ("eval", "predict", "export"):
        if path is None:
            yield f"job={config.job} needs weights: checkpoint.path=outputs/RECIPE/RUN, or one of its checkpoints."
    elif path is not None:
        yield (
            f"checkpoint.path={path} is for job=eval, predict and export. To train, use resume=RUN to go on with a "
            f"run, or init_from={path} to begin with its weights."
        )
    if config.resume is not None and config.job != "train":
        instead = "Leave it out"
        if config.job == "parity":
            instead = f"To begin with its weights use init_from={config.resume}"
        elif config.job == "tune":
            instead = (
                "Tuning keeps nothing to go on from, so begin anew: leave it out. To begin with the weights of a "
                f"training use init_from={config.resume}"
            )
        elif config.job not in ("plan", "preflight", "collectives"):
            instead = f"Use checkpoint.path={config.resume}"
        yield f"resume can't go with job={config.job}: it goes on with training. {instead}."


def _pipeline(config: Config) -> Iterator[str]:
    if not _is_pipeline(config):
        return
    if config.trainer.precision is Precision.FP16_MIXED:
        yield (
            "strategy=pipeline can't go with trainer.precision=16-mixed: each stage would see by itself whether a "
            "step overflows, and leave it out alone. Use trainer.precision=bf16-mixed."
        )
    if config.job == "parity":
        yield (
            "strategy=pipeline can't go with job=parity: it compares what whole models compute for each sample, and no "
            "process has one. Use strategy=ddp, whose weights a pipeline's are equal to."
        )


def _collectives(config: Config) -> Iterator[str]:
    settings = config.collectives
    for name in settings.backends or ():
        if name not in _SHOWN_BACKENDS:
            guess = nearest(name, _SHOWN_BACKENDS)
            yield (
                f"collectives.backends names {name}: each must be one of {', '.join(_SHOWN_BACKENDS)}."
                f"{did_you_mean(guess)}"
            )
    if settings.backends == ():
        yield "collectives.backends=[] shows nothing. Use null for the run's backend, or [gloo] for instance."
    if config.job != "collectives":
        return
    if settings.delay >= config.backend.timeout:
        yield (
            f"collectives.delay={settings.delay:g} s must be less than backend.timeout={config.backend.timeout:g} s, "
            "after which the receiver gives up."
        )


def _tuned(config: Config) -> Iterator[str]:
    tune, trainer = config.tune, config.trainer
    if config.job != "tune":
        return
    if not tune.find_batch_size and not tune.find_lr:
        yield (
            "tune.find_batch_size and tune.find_lr are both false, so there is nothing to look for. "
            "Set one of them to true."
        )
    if tune.min_lr >= tune.max_lr:
        yield f"tune.min_lr={tune.min_lr:g} must be less than tune.max_lr={tune.max_lr:g}."
    for name in ("fast_dev_run", "overfit_batches"):
        if getattr(trainer, name):
            yield (
                f"trainer.{name} can't go with job=tune: what suits a few samples doesn't suit all of them. "
                "Leave it out."
            )


def _is_pipeline(config: Config) -> bool:
    return bool(config.strategy["_target_"].rpartition(".")[2] == "Pipeline")


_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _names,
    _length,
    _shares,
    _few_batches,
    _recomputed,
    _graphs,
    _fast_dev_run,
    _processes,
    _nodes,
    _meeting_place,
    _sharing,
    _restarts,
    _ignored,
    _batches,
    _loader,
    _deterministic,
    _scheduler,
    _checkpoint,
    _validation,
    _monitors,
    _weights_to_use,
    _pipeline,
    _collectives,
    _tuned,
)
