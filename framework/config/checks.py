"""Rules between keys: names that must exist, and values that exclude each other.

Rules that depend on the GPUs of the machine are in `config.topology` and `jobs.launcher_choice`. Each message says what
was set, what it conflicts with, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from framework.config.assets import job_names, launcher_names
from framework.config.parse import raise_mistakes
from framework.config.schema import BackendName, Config, Interval, LoaderKind, Precision
from framework.config.suggest import did_you_mean, nearest


def check(config: Config) -> None:
    """Raise one ConfigError with all rules that `config` breaks."""
    raise_mistakes([mistake for rules in _RULES for mistake in rules(config)])


def _names(config: Config) -> Iterator[str]:
    for key, name, allowed in (
        ("job", config.job, job_names()),
        ("launcher.name", config.launcher.name, launcher_names()),
    ):
        if name not in allowed:
            guess = nearest(name, allowed)
            yield f"{key}={name}: must be one of {', '.join(allowed)}.{did_you_mean(guess and f'{key}={guess}')}"


def _batch_limits(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.max_epochs is None and trainer.max_steps is None and not trainer.fast_dev_run:
        yield "trainer.max_epochs and trainer.max_steps are both null, so training would never end. Set one of them."
    for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "overfit_batches"):
        value = getattr(trainer, name)
        if isinstance(value, float) and value > 1:
            yield f"trainer.{name}={value}: a fraction of the batches is at most 1.0; a number of batches is whole."
    for name in ("limit_train_batches", "limit_val_batches", "fast_dev_run"):
        if trainer.overfit_batches is not None and getattr(trainer, name) not in (None, False):
            yield f"trainer.overfit_batches can't go with trainer.{name}: each decides the batches. Set one of them."
    if trainer.fast_dev_run and config.resume is not None:
        yield (
            "trainer.fast_dev_run can't go with resume: it writes no checkpoints, so nothing would be continued. "
            "Use trainer.max_steps for a short continuation."
        )


def _trainer(config: Config) -> Iterator[str]:
    trainer, mode, accumulate = config.trainer, config.trainer.compile, config.trainer.accumulate_grad_batches
    key, recomputed = "trainer.activation_checkpointing", trainer.activation_checkpointing
    if isinstance(recomputed, str) and recomputed != "auto":
        yield f"{key}={recomputed}: must be auto, or a list of class names: {key}=[{recomputed}]"
    if recomputed == ():
        yield f"{key}=[]: must be auto, null, or a list of class names, such as {key}=[Block]."
    if recomputed is not None and mode is not None:
        yield (
            f"{key} can't go with trainer.compile={mode.value}: compiled BatchNorm would count each batch twice. "
            "Set one of them to null."
        )
    if mode is not None and mode.uses_cuda_graphs and accumulate > 1:
        yield (
            f"trainer.compile={mode.value} can't go with trainer.accumulate_grad_batches={accumulate}: in a CUDA "
            "graph's memory each micro-batch would overwrite the gradients of the one before. Use "
            "trainer.compile=default or max-autotune-no-cudagraphs, or trainer.accumulate_grad_batches=1."
        )
    if trainer.deterministic and trainer.benchmark:
        yield (
            "trainer.benchmark=true can't go with trainer.deterministic=true: it picks kernels by their speed, "
            "differently each time. Set trainer.benchmark=null."
        )


def _processes(config: Config) -> Iterator[str]:
    topology, launcher, restarts = config.topology, config.launcher.name, config.launcher.max_restarts
    nodes, rank = topology.nnodes, topology.node_rank
    if rank >= nodes:
        allowed = "0" if nodes == 1 else f"0 to {nodes - 1}"
        yield f"topology.node_rank={rank} is out of range: with topology.nnodes={nodes} it is {allowed}."
    if nodes > 1 and launcher in ("in_place", "local"):
        yield f"launcher={launcher} is for one machine; topology.nnodes={nodes} needs launcher=elastic. Change one."
    host, _, port = (topology.rdzv_endpoint or "HOST:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        yield (
            f"topology.rdzv_endpoint={topology.rdzv_endpoint}: must be HOST:PORT, a name or address of node 0 and a "
            "port from 1 to 65535 that is free there, such as node0:29400."
        )
    if restarts > 0 and launcher not in ("auto", "elastic"):
        yield (
            f"launcher.max_restarts={restarts}: launcher={launcher} doesn't restart after a failure. "
            "Use launcher=elastic, or launcher.max_restarts=0."
        )
    if topology.share_gpus and config.backend.name is BackendName.NCCL:
        yield (
            "topology.share_gpus=true can't go with backend=nccl, which needs a GPU of its own for each process. "
            "Use backend=gloo, or backend=auto, which uses gloo if GPUs are shared."
        )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for name in ("root", "mirrors"):
        if getattr(data, name) is not None and name not in data.datasets:
            yield f"data.{name} is set, but data.datasets ({data.datasets['_target_']}) doesn't take it."
    accumulate, procs = config.trainer.accumulate_grad_batches, config.topology.procs_per_node or 1
    parts = accumulate * procs
    # The processes of a pipeline don't all have samples of their own.
    if data.global_batch_size is not None and data.global_batch_size < parts and not _is_pipeline(config):
        yield (
            f"data.global_batch_size={data.global_batch_size} can't be split: trainer.accumulate_grad_batches="
            f"{accumulate} times {procs} process(es) makes {parts} micro-batches. Use at least {parts}."
        )
    if data.loader is LoaderKind.RESIDENT and data.num_workers:
        yield (
            f"data.num_workers={data.num_workers} can't go with data.loader=resident, which has nothing to load. "
            "Set data.num_workers=auto, or data.loader=dataloader."
        )


def _scheduler(config: Config) -> Iterator[str]:
    scheduler = config.scheduler
    if scheduler.schedule is None:
        for name in ("monitor", "total_steps"):
            if (value := getattr(scheduler, name)) is not None:
                yield f"scheduler.{name}={value} has no effect: there is no scheduler.schedule."
    elif scheduler.schedule["_target_"].rpartition(".")[2] == "ReduceLROnPlateau":
        if scheduler.monitor is None:
            yield "ReduceLROnPlateau needs a metric to watch. Set scheduler.monitor, to val/loss for instance."
        if scheduler.interval is Interval.STEP:
            yield (
                "scheduler.interval=step can't go with ReduceLROnPlateau: its metric is new only after a validation. "
                "Use scheduler.interval=epoch."
            )


def _metrics(config: Config) -> Iterator[str]:
    checkpoint, trainer = config.checkpoint, config.trainer
    if checkpoint.enabled and checkpoint.monitor is None and checkpoint.save_top_k > 1:
        yield (
            f"checkpoint.save_top_k={checkpoint.save_top_k} keeps the best ones, which needs a metric. "
            "Set checkpoint.monitor, to val/loss for instance, or save_top_k=1 or -1."
        )
    monitors = {"scheduler.monitor": config.scheduler.monitor}
    if checkpoint.enabled:
        monitors["checkpoint.monitor"] = checkpoint.monitor
    off = None
    if trainer.limit_val_batches == 0:
        off = "trainer.limit_val_batches=0 switches"
    elif trainer.val_check_interval is None and trainer.check_val_every_n_epoch is None:
        off = "trainer.val_check_interval=null with trainer.check_val_every_n_epoch=null switch"
    for key, metric in monitors.items():
        if metric is None:
            continue
        part, _, name = metric.partition("/")
        if part != "val" or not name:
            reason = " The test part is evaluated once, at the end." if part == "test" else ""
            guess = f"{key}=val/{name or metric.strip('/')}"
            yield f"{key}={metric}: must be a validation metric, named val/….{reason}{did_you_mean(guess)}"
        elif off:
            yield f"{key}={metric} is never computed: {off} validation off. Set {key}=null, or validate."


def _validation(config: Config) -> Iterator[str]:
    """Check what is known without the data; the engine checks the rest, which depends on the steps of an epoch."""
    trainer = config.trainer
    if config.job not in ("train", "plan") or trainer.fast_dev_run or trainer.limit_val_batches == 0:
        return
    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch
    never, way_out = "so nothing would be validated", "or trainer.limit_val_batches=0 to train without validation."
    if interval is not None and trainer.max_steps is not None and interval > trainer.max_steps:
        given = f"trainer.val_check_interval={interval} is above trainer.max_steps={trainer.max_steps}"
        yield f"{given}, {never}. Use {trainer.max_steps} or less, {way_out}"
    if interval is None and every is not None and trainer.max_epochs is not None and every > trainer.max_epochs:
        given = f"trainer.check_val_every_n_epoch={every} is above trainer.max_epochs={trainer.max_epochs}"
        yield f"{given}, {never}. Use {trainer.max_epochs} or less, {way_out}"


def _weights_to_use(config: Config) -> Iterator[str]:
    job, path, resume = config.job, config.checkpoint.path, config.resume
    if job in ("eval", "predict", "export") and path is None:
        yield f"job={job} needs weights: checkpoint.path=outputs/RECIPE/RUN, or one of its checkpoints."
    elif job not in ("eval", "predict", "export") and path is not None:
        yield (
            f"checkpoint.path={path} is for job=eval, predict and export. To train, use resume=RUN to continue "
            f"a run, or init_from={path} to start from its weights."
        )
    if resume is not None and job != "train":
        instead = {
            "parity": f"To start from its weights, use init_from={resume}",
            "tune": f"Tuning can't be resumed; to start from a run's weights, use init_from={resume}",
            **dict.fromkeys(("eval", "predict", "export"), f"Use checkpoint.path={resume}"),
        }.get(job, "Leave it out")
        yield f"resume can't go with job={job}: it continues a training run. {instead}."


def _pipeline(config: Config) -> Iterator[str]:
    if _is_pipeline(config) and config.trainer.precision is Precision.FP16_MIXED:
        yield (
            "strategy=pipeline can't go with trainer.precision=16-mixed: each stage would decide by itself to skip "
            "a step that overflows. Use trainer.precision=bf16-mixed."
        )
    if _is_pipeline(config) and config.job == "parity":
        yield (
            "strategy=pipeline can't go with job=parity: it compares what whole models compute, and no "
            "process has one. Use strategy=ddp, which gives the same weights as a pipeline."
        )


def _collectives(config: Config) -> Iterator[str]:
    settings, backends = config.collectives, (BackendName.GLOO.value, BackendName.NCCL.value)
    for name in settings.backends or ():
        if name not in backends:
            guess = did_you_mean(nearest(name, backends))
            yield f"collectives.backends names {name}: each must be one of {', '.join(backends)}.{guess}"
    if settings.backends == ():
        yield "collectives.backends=[] shows nothing. Use null for the run's backend, or [gloo] for instance."
    if config.job == "collectives" and settings.delay >= config.backend.timeout:
        yield (
            f"collectives.delay={settings.delay:g} s must be less than backend.timeout={config.backend.timeout:g} s, "
            "after which the receiver gives up."
        )


def _tune(config: Config) -> Iterator[str]:
    tune = config.tune
    if config.job != "tune":
        return
    if not tune.find_batch_size and not tune.find_lr:
        yield "tune.find_batch_size and tune.find_lr are both false, so there is nothing to tune. Set one to true."
    if tune.min_lr >= tune.max_lr:
        yield f"tune.min_lr={tune.min_lr:g} must be less than tune.max_lr={tune.max_lr:g}."
    for name in ("fast_dev_run", "overfit_batches"):
        if getattr(config.trainer, name):
            yield f"trainer.{name} can't go with job=tune: what suits a few samples may not suit all. Leave it out."


def _is_pipeline(config: Config) -> bool:
    return bool(config.strategy["_target_"].rpartition(".")[2] == "Pipeline")


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _names,
    _batch_limits,
    _trainer,
    _processes,
    _data,
    _scheduler,
    _metrics,
    _validation,
    _weights_to_use,
    _pipeline,
    _collectives,
    _tune,
)
