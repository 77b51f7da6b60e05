"""What every job does first on a rank: read the configuration, set up the process, build and check the strategy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from framework.config.mistakes import raise_mistakes
from framework.config.parse import parse
from framework.config.saved import load_config
from framework.config.schema import Config
from framework.config.targets import check_targets
from framework.data import batching
from framework.data.batching import BatchPlan
from framework.distributed.collectives import SideChannel
from framework.distributed.context import Context, make_context
from framework.distributed.flight_recorder import dump_before_abort, dump_collectives, record_collectives
from framework.distributed.seed import set_deterministic
from framework.engine.builders.strategy import build_strategy, check_callbacks_fit
from framework.engine.compile_cache import compile_cache
from framework.engine.limits import apply_fast_dev_run
from framework.launch.base import launcher_class
from framework.launch.plan import MonitorLink, RankArguments
from framework.strategies.base import Strategy
from framework.strategies.callback_rules import weight_mistakes
from framework.strategies.rules import strategy_request
from framework.system.allocator import tune_malloc
from framework.system.hardware import processes_on_cores, threads_per_process
from framework.system.late_dynamo import import_dynamo_late
from framework.system.rank_log import rank_log
from framework.system.run_dir import RunDir
from framework.types import DataShare


@dataclass(frozen=True)
class RankSetup:
    """What is known on a rank before the process group is created."""

    # As the user requested it.
    requested: Config
    # The requested one with `trainer.fast_dev_run` applied.
    config: Config
    context: Context
    run_dir: RunDir
    plan: BatchPlan
    strategy: Strategy
    link: MonitorLink
    # Restarts so far. A restart resumes from the run's own last checkpoint.
    attempt: int
    # True: the test part isn't evaluated at the end of a training.
    skips_test: bool = False

    @property
    def data_share(self) -> DataShare:
        """The samples this rank trains on and validates."""
        return self.strategy.data_share(self.context)

    @property
    def seed_rank(self) -> int:
        """The rank that seeds this rank's generators, together with the run's seed.

        Ranks that train on the same samples draw the same numbers, as for dropout, unless they have different stages.
        """
        if self.strategy.num_stages is not None:
            return self.context.rank
        return self.data_share.rank

    @cached_property
    def exchange(self) -> SideChannel:
        """What ranks that read streams exchange numbers over. If there is a stream, every rank must open it.

        It can be opened once there is a process group.
        """
        backend = self.config.backend
        return SideChannel(self.context, timeout_s=max(backend.init_timeout, backend.timeout))


@contextmanager
def setup_rank(arguments: RankArguments, link: MonitorLink) -> Iterator[RankSetup]:
    """Open the rank's log, set up the process and check the configuration; there is no process group yet.

    Raises FrameworkError for a wrong request.
    """
    run_dir = RunDir(Path(arguments.run_dir))
    requested = parse(load_config(run_dir))
    config = apply_fast_dev_run(requested)
    context = make_context(
        arguments.topology,
        node_rank=arguments.node_rank,
        local_rank=arguments.local_rank,
        backend_name=config.backend.name,
    )
    import_dynamo_late()
    with rank_log(run_dir.rank_log(context.rank), place=context.description):
        _set_up_process(config, context)
        strategy, plan = plan_training(config, context)
        setup = RankSetup(
            requested,
            config,
            context,
            run_dir,
            plan,
            strategy,
            link=link,
            attempt=arguments.attempt,
            skips_test=arguments.skips_test,
        )
        if context.world_size > 1:
            _record_collectives(setup)
        with compile_cache(config, context.device):
            yield setup


def _record_collectives(setup: RankSetup) -> None:
    """Record what this rank exchanges with the others, for the report of a time-out."""
    prefix = setup.run_dir.collectives_of(attempt=setup.attempt)
    record_collectives(prefix)
    file = prefix.with_name(f"{prefix.name}{setup.context.rank}")
    # Of an earlier start of this run.
    file.unlink(missing_ok=True)
    rank_status = setup.link.rank_status
    rank_status.set_dump(partial(dump_collectives, file, backend=setup.context.backend))
    if setup.context.backend == "gloo":
        dump_before_abort(rank_status.dump_collectives)


def _set_up_process(config: Config, context: Context) -> None:
    """Choose this process's device, threads and number formats."""
    settings = config.trainer
    if context.device.type == "cpu":
        tune_malloc()
    else:
        # Before the user's code is imported or built: it would open a context on GPU 0 in every rank.
        torch.accelerator.set_device_index(context.device)

    if settings.matmul_precision is not None:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_process(procs_on_cores(config, context)))
    set_deterministic(settings.deterministic, benchmark=settings.benchmark)


def plan_training(config: Config, context: Context) -> tuple[Strategy, BatchPlan]:
    """Check every `_target_`; return the strategy, and how samples are split into optimizer steps.

    Raises FrameworkError for a wrong request.
    """
    check_targets(config)
    strategy = build_strategy(config.strategy, context=context)
    if strategy.rules is not None:
        # The command has checked these rules already, unless it couldn't find them in the source of the strategy.
        request = strategy_request(config, context.topology, backend=context.backend)
        raise_mistakes(list(strategy.rules(request).mistakes()))
    check_callbacks_fit(config.callbacks, strategy)
    raise_mistakes(list(weight_mistakes(config, strategy, kind=type(strategy).__name__)))
    strategy.check_precision(config.trainer.precision)
    return strategy, plan_steps(config, context, strategy)


def plan_steps(config: Config, context: Context, strategy: Strategy) -> BatchPlan:
    """Return how samples are split into optimizer steps, ranks and micro-batches.

    Raises ConfigError for a batch that can't be split.
    """
    return batching.plan_steps(config, strategy.data_share(context))


def procs_on_cores(config: Config, context: Context) -> int:
    """Return how many processes share this one's cores: all of the node, unless srun has bound each to its own."""
    procs = context.topology.procs_per_node
    # Ranks that this command starts share its cores. Only those that srun has started may be bound.
    if not launcher_class(config.launcher).joins_started_ranks:
        return procs
    return processes_on_cores(local_rank=context.local_rank, procs=procs, environ=os.environ)
