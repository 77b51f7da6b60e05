"""Where the framework keeps what tests use beside its public names. A name is imported when a test first asks for it.

Moving a module or a function of the framework changes its line here, and no test. Modules, which tests import to
replace one of their functions, are called `…_module`. So that no test repeats a place, the imports below are the table:
type checkers read them, and `__getattr__` runs the one that a name needs, so torch isn't loaded for what needs none.
"""

# ruff: noqa: F401
# mypy: implicit-reexport
from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.api import call as call_module
    from framework.callbacks import timer as timer_module
    from framework.callbacks.first_fault import sample_of
    from framework.callbacks.profiler import TorchProfiler
    from framework.callbacks.spikes import Usual
    from framework.callbacks.time_shares import PARTS, PhaseMark, Span, time_shares
    from framework.checkpoint.layout import FORMAT_VERSION, MANIFEST_NAME, FileFacts, Manifest
    from framework.checkpoint.layout import decode as decode_manifest
    from framework.checkpoint.layout import encode as encode_manifest
    from framework.checkpoint.layout import encode as encode_part
    from framework.checkpoint.lookup import LastUndamaged, last_undamaged
    from framework.checkpoint.manager import CheckpointManager
    from framework.checkpoint.reader import load_weights
    from framework.checkpoint.sharded_state import NOTE, load_sharded, split_state
    from framework.checkpoint.snapshot import Snapshots
    from framework.checkpoint.weights_file import Loaded, load_what_fits, read_weights
    from framework.checkpoint.writer import check_plain
    from framework.checkpoint.writer import point as point_checkpoint
    from framework.checkpoint.writer import write as write_checkpoint
    from framework.command import check_trials as check_trials_module
    from framework.command import compose
    from framework.command import job as job_module
    from framework.command import slots as slots_module
    from framework.command import sweep as sweep_module
    from framework.command import trust as trust_module
    from framework.command.check_trials import check_trials
    from framework.command.completion import completions
    from framework.command.equivalents import commands, environment
    from framework.command.job import check_request
    from framework.command.launcher import Placement, place
    from framework.command.messages import (
        interrupted_message,
        start_message,
        stopped_message,
        training_summary,
        unused_variables,
    )
    from framework.command.request import JobResult, Request
    from framework.command.resume import BaseRun, find_auto_run, find_base, names_a_run, saved_run
    from framework.command.slots import make_slots
    from framework.config import assets as assets_module
    from framework.config import objects as objects_module
    from framework.config import source as source_module
    from framework.config.apply_typed import apply_typed
    from framework.config.assets import config_dir
    from framework.config.hydra_compose import (
        VERSION_BASE,
        compose_config,
        current_hydra,
        hydra_for,
        refuse_replaced,
        resolved,
        value_of,
    )
    from framework.config.instantiate import bind, instantiate
    from framework.config.jobs import FUNCTION, JOBS
    from framework.config.json_schema import json_schema
    from framework.config.keys import known_keys
    from framework.config.nested import walk as walk_nested
    from framework.config.optimizers import optimizer_configs
    from framework.config.other_names import ADVICE
    from framework.config.overrides import merge_overrides, normalize_override, quoted, resume_argument
    from framework.config.parse import parse
    from framework.config.renamed import present_overrides, without_removed
    from framework.config.saved import SavedRun, load_saved, save_config
    from framework.config.schema import (
        BackendConfig,
        CheckpointConfig,
        ClipAlgorithm,
        Config,
        DeviceName,
        Duration,
        InitConfig,
        Interval,
        JobName,
        LoaderKind,
        Mode,
        Precision,
        ProgressMode,
        SchedulerConfig,
        Texts,
        TopologyConfig,
        TrainerConfig,
    )
    from framework.config.secrets import Secrets, masked_arguments, masked_override, missing_secrets, restored_config
    from framework.config.suggest import nearest, nearest_key
    from framework.config.targets import (
        ImportedSignatures,
        SourceSignatures,
        check_node,
        check_targets,
        get_object,
        import_target,
        requires,
        takes,
    )
    from framework.config.topology import Topology, resolve_topology
    from framework.data import loader as loader_module
    from framework.data.batch_lists import UserBatches
    from framework.data.batch_tree import held_tensors, record_stream
    from framework.data.batching import BatchPlan, micro_batches, plan_batches, share
    from framework.data.draws import Draws
    from framework.data.epochs import EpochSizes, EpochSteps, apply_limit
    from framework.data.folds import class_numbers, fold_numbers
    from framework.data.identity import DataIdentity
    from framework.data.keyed_random import KeyedRandom
    from framework.data.loader import (
        DEVICE_SHARE,
        EvalLoader,
        LoadedBatches,
        LoaderOptions,
        MapLoader,
        batch_source,
        dataset_size,
    )
    from framework.data.object_graph import reachable
    from framework.data.order import GlobalOrder, WindowIndices, epoch_indices, windows
    from framework.data.permutation import Permutation, in_order, shuffled
    from framework.data.prefetch import pinned, prefetch, to_device
    from framework.data.skipping import SkippedSteps, number_of_step
    from framework.data.source import SourceLoader
    from framework.data.stream import StreamLoader
    from framework.data.stream_plan import StreamPlan
    from framework.data.stream_reader import first_batch
    from framework.data.workers import _FromWorker, _InWorker
    from framework.distributed.butterfly import butterfly_all_reduce_mean, rounds
    from framework.distributed.collectives import (
        SideChannel,
        any_over_ranks,
        barrier,
        broadcast_object,
        gather_to_all,
        gather_to_first,
        sum_over_ranks,
    )
    from framework.distributed.context import Context, make_context
    from framework.distributed.flight_recorder import compare_dumps
    from framework.distributed.metric_sync import sync_through
    from framework.distributed.process_group import (
        backends,
        group_timeout,
        new_subgroup,
        process_group,
        set_group_timeouts,
        set_timeout,
    )
    from framework.distributed.seed import fingerprint as seed_fingerprint
    from framework.distributed.seed import (
        generator_states,
        restore_generator_states,
        seed_everything,
        set_deterministic,
    )
    from framework.distributed.seed import mix as mix_seeds
    from framework.distributed.sharded import (
        full_tensor,
        has_output,
        is_dtensor,
        is_model_sharded,
        local_tensor,
        num_parameters,
    )
    from framework.distributed.store import SECRET, RunStore, UnverifiedError, listen
    from framework.engine import compile_cache as compile_cache_module
    from framework.engine import restore as restore_module
    from framework.engine import setup as rank_setup_module
    from framework.engine.builders.data import build_datasets
    from framework.engine.builders.model import build_model, build_task
    from framework.engine.builders.observers import build_callbacks, build_loggers
    from framework.engine.builders.optimizer import build_optimizer
    from framework.engine.builders.schedule import build_scheduler
    from framework.engine.builders.strategy import build_strategy, check_callbacks_fit
    from framework.engine.compile_cache import compile_cache_folder
    from framework.engine.data_checks import check_streams
    from framework.engine.limits import apply_fast_dev_run, apply_overfit_batches
    from framework.engine.module_table import module_table
    from framework.engine.out_of_memory import is_out_of_memory, memory_at_failure
    from framework.engine.own_checkpoint import own_checkpoint
    from framework.engine.restore import restore as restore_run
    from framework.engine.setup import procs_on_cores
    from framework.engine.state_bytes import checkpoint_bytes, optimizer_state_bytes, tensor_bytes
    from framework.jobs.export import graph_files as graph_files_module
    from framework.jobs.export import job as export_job_module
    from framework.jobs.export.graph import TOLERANCES, check_close
    from framework.jobs.export.job import Export, output_path
    from framework.jobs.export.model_file import export as export_model
    from framework.jobs.parity import job as parity_job_module
    from framework.jobs.parity.differences import tensor_difference
    from framework.jobs.parity.page import CAUSES
    from framework.jobs.parity.page import render as render_parity
    from framework.jobs.parity.recording import moments, move_weights, sketch, switch_off_dropout, tolerance
    from framework.jobs.plan import estimate as plan_estimate_module
    from framework.jobs.plan import job as plan_job_module
    from framework.jobs.plan import work as plan_work_module
    from framework.jobs.plan.device_time import RATES
    from framework.jobs.plan.devices import Device, find_device
    from framework.jobs.plan.page import rank_table
    from framework.jobs.plan.page import render as render_plan
    from framework.jobs.plan.step import prepared_step, trace_step
    from framework.jobs.plan.trace import Tracer
    from framework.jobs.plan.workspaces import with_workspaces
    from framework.jobs.prediction_file import Columns, columns_of, concatenated, write_predictions
    from framework.jobs.preflight.barriers import Barrier, clock_offsets, time_barriers
    from framework.jobs.preflight.links import link_rounds, measure_links
    from framework.jobs.preflight.machine import data_root
    from framework.jobs.preflight.peers import Peers, connect_peers, sent_values
    from framework.jobs.preflight.report import BETWEEN, WITHIN
    from framework.jobs.preflight.report import assess as assess_preflight
    from framework.jobs.preflight.report import render as render_preflight
    from framework.jobs.train import Train
    from framework.jobs.tune import memory as tune_memory_module
    from framework.jobs.tune.job import training_command
    from framework.jobs.tune.lr_range import assess as assess_lr_range
    from framework.jobs.tune.lr_range import plot
    from framework.jobs.tune.memory import DeviceMemory, HostMemory
    from framework.jobs.tune.sizes import BatchSizing, Forecast, largest_fitting, resolution
    from framework.jobs.why.samples import guilty_rows
    from framework.launch import base as launch_base_module
    from framework.launch.child import Child, Message, Tee, show_status
    from framework.launch.cluster_environment import (
        ClusterEnvironment,
        ReportedByRankZeroError,
        chooses_own_ranks,
        detect,
        first_host,
        split_endpoint,
        tasks_per_node,
        typed_value,
        without_secret,
    )
    from framework.launch.error_record import record_of
    from framework.launch.external import external_topology
    from framework.launch.external_ranks import ExternalRanks
    from framework.launch.fingerprint import Fingerprint, differences, fingerprint
    from framework.launch.fork_server import PRELOAD, ForkServer, OwnForkServer, call_in_child
    from framework.launch.meeting_point import MeetingPoint
    from framework.launch.plan import MonitorLink, RankArguments
    from framework.launch.rank_environment import network_environment
    from framework.launch.rendezvous import Rendezvous
    from framework.launch.run_server import RunServer
    from framework.launch.stopping import StopRequest
    from framework.launch.worker import run_entry
    from framework.loggers import console as console_module
    from framework.loggers.jsonl import JsonLines
    from framework.loggers.media import counts_of, file_stem, picture_from, pixels_of
    from framework.loggers.tracker import Tracker, Worker, check_installed
    from framework.monitoring import rank_status as rank_status_module
    from framework.monitoring import slow_ranks as slow_ranks_module
    from framework.monitoring.advice import advice
    from framework.monitoring.device_usage import DeviceUsage
    from framework.monitoring.failure import FailureKind, RankFailure, failure_facts
    from framework.monitoring.late_ranks import Progress, RankState, max_progress, ranks_behind, waited_for
    from framework.monitoring.node_monitor import Limits, NodeMonitor, RankInfo
    from framework.monitoring.oom_kills import count_oom_kills, killed_since
    from framework.monitoring.rank_status import STACKS_SIGNAL, RankPhase, RankStatus, heartbeat
    from framework.monitoring.report import FailureReport, late_line, list_ranks, make_report
    from framework.monitoring.report import render as render_failure
    from framework.monitoring.slow_ranks import (
        CURVES_OF_RANKS,
        KINDS,
        LAST_STRETCHES,
        SLOW_STRETCHES,
        STRETCH_S,
        RankTimes,
        SlowRank,
        SlowRanks,
        excesses,
    )
    from framework.monitoring.stacks import main_stack
    from framework.optim.optimizer import restore_optimizer, skip_profiler_mark
    from framework.optim.param_groups import ParamGroups
    from framework.optim.precision import PrecisionPlugin
    from framework.optim.schedule import Schedule
    from framework.optim.schedule_replay import Change, Rebuild
    from framework.remote import upload as upload_module
    from framework.remote.claims import newest_claim, note_claim
    from framework.remote.mirror import Pace, mirrored
    from framework.remote.place import RemotePlace
    from framework.remote.upload import Uploader
    from framework.runs import record as record_module
    from framework.runs.find import find_runs
    from framework.runs.record import RunStart, read_rows, read_run, record_end, record_start
    from framework.runs.report.curves import LEFT as CHART_LEFT
    from framework.runs.report.curves import MAX_POINTS, Scale, chart, format_tick, thinned, ticks
    from framework.runs.report.curves import RIGHT as CHART_RIGHT
    from framework.runs.report.curves import color as run_color
    from framework.runs.segments import checkpoint_before, segment_at
    from framework.strategies import ddp as ddp_module
    from framework.strategies.activation_checkpointing import apply_activation_checkpointing
    from framework.strategies.rules import StrategyRequest
    from framework.sweeps import claims as claims_module
    from framework.sweeps import search as search_module
    from framework.sweeps.claims import Claim, Claims, exclusive
    from framework.sweeps.find import find_sweep, newest_unfinished_sweep
    from framework.sweeps.folder import SearchPlan, SweepFolder, SweepPlan, Trial, config_hash
    from framework.sweeps.ranking import Row, best_trial, ranked_rows
    from framework.sweeps.results import TrialResult, read_results
    from framework.sweeps.search import Asked, OptunaSearch, SearchSettings, importances, is_over
    from framework.sweeps.space import Choice, Integers, Space, Steps, split_space, value_text
    from framework.sweeps.space import Interval as FloatInterval
    from framework.sweeps.student_t import two_sided_p, two_sided_quantile
    from framework.sweeps.table import best_text, csv_text, distinguishing, table_text
    from framework.system import hardware as hardware_module
    from framework.system import run_dir as run_dir_module
    from framework.system.allocator import tune_malloc
    from framework.system.files import (
        atomic_output,
        checked_output,
        open_regular,
        parse_json,
        read_bytes,
        read_json,
        read_text,
    )
    from framework.system.formatting import format_binary_bytes, format_bytes, format_seconds
    from framework.system.hardware import Gpu, available_memory, cpu_count, processes_on_cores
    from framework.system.json_lines import metrics_fault
    from framework.system.late_dynamo import import_dynamo_late
    from framework.system.loaded_modules import hashes_of_loaded_modules
    from framework.system.output import (
        OutputError,
        ReaderGoneError,
        TolerantStream,
        answer,
        json_text,
        only_answers_on_stdout,
        tolerant_output,
    )
    from framework.system.rank_log import logger as rank_logger
    from framework.system.rank_log import rank_log
    from framework.system.run_dir import RunDir, check_no_way_out, create_run_dir, locked, new_run_dir, write_atomically
    from framework.system.shown_text import is_secret_name, masked_text, printable
    from framework.tasks.lightning import data as lightning_data_module
    from framework.tasks.lightning import datamodule
    from framework.training import step_times as step_times_module
    from framework.training import trainer as trainer_module
    from framework.training.evaluation import Evaluator
    from framework.training.flops import peak_of_gpu, peak_of_run
    from framework.training.length import Start, epoch_steps, schedule_length, start_of, total_steps
    from framework.training.loss_weights import SummedWeights
    from framework.training.meter import Meter, bad_loss, bad_weights
    from framework.training.rank_states import fingerprints
    from framework.training.stateful_metrics import StatefulMetrics
    from framework.training.step_output import media_of
    from framework.training.step_times import Clock, StepTimer
    from framework.training.stop_control import StopControl, steps_to_meeting
    from framework.training.train_state import Progress as TrainProgress
    from framework.training.train_state import TrainState
    from framework.training.trainer import Trainer


SLOW_TO_IMPORT = (
    "framework.checkpoint.sharded_state",
    "framework.strategies.fsdp",
    "framework.strategies.pipeline",
    "framework.training.trainer",
    "torch.utils.tensorboard",
)
"""Modules that take seconds to import. What forks ranks loads them once."""


def _imports() -> dict[str, ast.ImportFrom]:
    """Return the statements above that import from the framework, by the names that they define."""
    statements: dict[str, ast.ImportFrom] = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("framework"):
            statements |= {alias.asname or alias.name: node for alias in node.names}
    return statements


NAMES = _imports()


def __getattr__(name: str) -> Any:
    """Run the import that defines a name."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    statement = ast.Module([NAMES[name]], type_ignores=[])
    exec(compile(statement, __file__, "exec"), globals())
    return globals()[name]
