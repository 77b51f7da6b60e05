"""Every key the framework reads: its type, range and meaning, as frozen dataclasses.

Hydra composes the YAML in `conf/`, and `framework.config.parse` turns it into these; nothing else reads a `DictConfig`.
A user's own part (`_target_` and keywords) is a `Node`; only `framework.engine.build` instantiates it.

Types that the parser knows: `bool int float str`, `X | None`, `Literal`, `Duration`, `Texts`, `Node`,
`dict[str, Node]`, `dict[str, str]`, dataclasses. `None` is written `null`, and also `auto` where `auto()` is used. A
bound is inclusive unless `above`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, NewType

Duration = NewType("Duration", float)
"""Seconds. Written as a number of seconds, `90s`, `30m`, `2h` or `1d`; above 0, at most a year."""

Texts = NewType("Texts", tuple[str, ...])
"""Written as a list of strings."""

Node = Mapping[str, Any]
"""A mapping with `_target_`: a callable to import, called with the other keys as keywords."""


def bounded(*, default: Any = MISSING, **bounds: float) -> Any:
    """Declare a number with the bounds `at_least`, `at_most` or `above`.

    One with a default may be missing, as in files older than the key.
    """
    return field(default=default, metadata={"bounds": bounds})


def auto(*, at_least: float) -> Any:
    """Declare a required number or `auto` (also `null`), which the framework decides; `None` in the dataclass."""
    return field(metadata={"auto": True, "bounds": {"at_least": at_least}})


FunctionName = NewType("FunctionName", str)
"""Written as a dotted name."""

JobName = NewType("JobName", str)
"""Written as a name in `framework.config.jobs`, or as the dotted name of a user's function or class."""

BackendName = Literal["auto", "gloo", "nccl", "mpi"]
InitMethod = Literal["env", "tcp", "file"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
"""Lightning's names."""

MatmulPrecision = Literal["highest", "high", "medium"]
"""Argument of `torch.set_float32_matmul_precision`: compute float32 products in float32, TF32 or bfloat16."""

Interval = Literal["step", "epoch"]
Mode = Literal["min", "max"]
LoaderKind = Literal["auto", "resident", "dataloader"]
Part = Literal["train", "val", "test"]
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The modes of `torch.compile` that capture CUDA graphs, whose outputs the next call overwrites."""

ClipAlgorithm = Literal["norm", "value"]
ProgressMode = Literal["auto", "rich", "plain", "off"]
ExportFormat = Literal["state_dict", "safetensors", "pretrained", "onnx", "torch_export"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    datasets: Node  # gives framework.Datasets(train, val, test)
    collate_fn: Node | None = None  # makes a batch of a list of samples; null: torch's default_collate
    sampler: Node | None = None  # the order of the train part, from framework.samplers; null: by `shuffle`
    # Per process, as in PyTorch; auto: that of a DataLoader that is given as the train part, else 32.
    batch_size: int | Literal["auto"] = bounded(at_least=1)
    global_batch_size: int | None = bounded(at_least=1)  # over ranks and accumulation; wins over batch_size
    # Per process; auto: that of a DataLoader, else 256; null: batch_size.
    eval_batch_size: int | Literal["auto"] | None = bounded(at_least=1)
    loader: LoaderKind = "auto"  # resident: kept in memory as tensors; auto: what are tensors already
    num_workers: int | None = auto(at_least=0)  # DataLoader processes per rank and part; auto: 8, or the cores left
    # Drop an incomplete global batch at an epoch's end; null: as a DataLoader given as the train part, else false.
    drop_last: bool | None = None
    stream: Literal["shared", "join", "stop"] = "shared"  # how processes share a part that is an IterableDataset
    shuffle: bool
    root: str | None  # folder of the data set's files; null if it has none
    mirrors: Texts | None  # addresses to download missing files from; null: the data set's own

    @property
    def train_batch_size(self) -> int:
        """The batch size of a process, as far as it is known without the data."""
        return 32 if self.batch_size == "auto" else self.batch_size

    @property
    def evaluated_batch_size(self) -> int:
        """The batch size of a process in evaluations, as far as it is known without the data."""
        return 256 if self.eval_batch_size == "auto" else self.eval_batch_size or self.train_batch_size


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    name: BackendName
    init_method: InitMethod
    init_timeout: Duration  # for set-up, until the first step is done
    timeout: Duration  # for every collective after it


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    nnodes: int = bounded(at_least=1)
    node_rank: int = bounded(at_least=0)  # of the node the command runs on
    procs_per_node: int | None = auto(at_least=1)
    gpus_per_process: int | None = auto(at_least=1)
    min_gpus_per_process: int = bounded(at_least=1)  # what the model needs; the default of gpus_per_process
    share_gpus: bool  # processes may share GPUs; needs gpus_per_process, and not nccl
    rdzv_endpoint: str | None  # HOST:PORT of node 0, where nodes meet; null on one node
    rdzv_secret: str | None = None  # always null: `launch.environment.without_secret` takes it from the command


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Lightning's names, if it has one."""

    gpus: int | None = auto(at_least=0)  # GPUs used per node
    max_epochs: int | None = bounded(at_least=1)
    max_steps: int | None = bounded(at_least=1)  # optimizer steps
    precision: Precision
    accumulate_grad_batches: int = bounded(at_least=1)
    gradient_clip_val: float | None = bounded(above=0)
    gradient_clip_algorithm: ClipAlgorithm
    log_every_n_steps: int = bounded(at_least=1)
    progress: ProgressMode = "auto"  # on the terminal
    val_check_interval: int | None = bounded(at_least=1)  # optimizer steps; null: at the end of epochs
    check_val_every_n_epoch: int | None = bounded(at_least=1)  # null: not at the end of epochs
    num_sanity_val_steps: int = bounded(at_least=0, default=1)  # validation batches of each process before training
    limit_train_batches: int | float | None = bounded(above=0)  # int: batches; float in (0, 1]: that share
    limit_val_batches: int | float | None = bounded(at_least=0)
    limit_test_batches: int | float | None = bounded(at_least=0)
    fast_dev_run: bool | int = bounded(at_least=0)  # n batches of everything, no checkpoints; true: 1
    overfit_batches: int | float | None = bounded(above=0)  # train and validate on the same few batches, in order
    deterministic: bool
    benchmark: bool | None  # cudnn.benchmark; null: off in deterministic mode, else on
    matmul_precision: MatmulPrecision | None = None  # null: as torch or the user's code sets it
    num_threads: int | None = auto(at_least=1)  # intra-op threads of a process; auto: its share of the cores
    channels_last: bool = False  # store images and convolution weights as NHWC
    # torch.compile's mode.
    compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    # Modules to recompute in the backward: auto, or class names.
    activation_checkpointing: Literal["auto"] | Texts | None = None
    profiler: Literal["pytorch"] | None = None  # records some steps; `callbacks=[profiler]` says which


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    schedule: Node | None  # gets the optimizer, and `total_steps` if it takes that keyword and wasn't given it
    total_steps: int | None = bounded(at_least=1, default=None)  # in `interval`s; null: those of the run
    interval: Interval
    monitor: str | None  # the metric ReduceLROnPlateau watches


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    path: str | None  # for job=eval, predict and export: a checkpoint or a run directory
    enabled: bool
    monitor: str | None  # a validation metric, such as val/accuracy; null: no `best`
    mode: Mode
    save_top_k: int = bounded(at_least=-1)  # number of best ones kept; -1 keeps every checkpoint
    save_last_k: int = bounded(at_least=1, default=2)  # number of newest ones kept, in case the last is damaged
    every_n_steps: int | None = bounded(at_least=1)
    every_n_epochs: int | None = bounded(at_least=1)
    every_n_minutes: float | None = bounded(above=0)  # since the last save; checked at each log
    asynchronous: bool = True  # write while training continues


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    # The class of the launcher, a subclass of framework.launch.base.Launcher.
    _target_: FunctionName
    # Its keywords.
    args: dict[str, Any] = field(default_factory=dict)
    max_restarts: int = bounded(at_least=0)  # of the whole run after failures; launcher=elastic only
    late_after: Duration  # how long ranks wait for another one before it is reported as late


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How the weights of `init_from` fit the model. Patterns are regular expressions, found anywhere in a name."""

    rename: dict[str, str] | None = None  # pattern → replacement, applied in order to the names in the file
    skip: Texts | None = None  # patterns of names, after renaming, that aren't loaded
    strict: bool = True  # every name is in both, the file and the model


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    part: Part


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    part: Part
    output: str  # a file that doesn't exist yet: .csv or .pt


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    format: Literal["text", "json"]
    train_samples: int | None = bounded(at_least=1)  # if the data set isn't there to be counted


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    processes: int | None = bounded(at_least=2)  # compared with one process; null: the run's, at least 2
    steps: int = bounded(at_least=1)  # optimizer steps


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """job=preflight, and the checks before training if `enabled`. A limit of null isn't checked."""

    enabled: bool = False  # before training, too; `preflight=true` sets this key
    seconds: Duration | None = None  # spent measuring; null: 20, or 2 before training
    max_bytes: int = bounded(at_least=4, default=2**28)  # largest message
    max_clock_offset: Duration | None = Duration(1.0)  # from rank 0's clock
    max_latency: Duration | None = None  # of a link, one way
    min_link_bandwidth: float | None = bounded(above=0, default=None)  # MB/s, 10^6 bytes, of a link
    min_bus_bandwidth: float | None = bounded(above=0, default=None)  # MB/s, of all_reduce at its best size
    min_matmul: float | None = bounded(above=0, default=None)  # GFLOP/s of a device
    min_free_disk: float | None = bounded(above=0, default=None)  # GB, 10^9 bytes, for the run directory
    min_shm: float | None = bounded(above=0, default=None)  # GB free in /dev/shm


@dataclass(frozen=True, kw_only=True)
class CollectivesConfig:
    """job=collectives."""

    backends: Texts | None = None  # gloo, nccl: shown side by side; null: the run's own backend
    delay: Duration = Duration(1.0)  # how late the sender of isend/irecv is


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """job=tune. Names are those of Lightning's Tuner, if it has one."""

    find_batch_size: bool = True  # find the largest batch that fits
    find_lr: bool = True  # find a learning rate, with that batch
    max_batch_size: int | None = bounded(at_least=1, default=None)  # per process; null: the size of the data set
    steps_per_trial: int = bounded(at_least=2, default=3)  # the first one allocates the optimizer's state
    margin: float = bounded(at_least=0, at_most=0.9, default=0.1)  # fraction of the free memory to keep free
    min_lr: float = bounded(at_least=1e-30, at_most=1e6, default=1e-7)
    max_lr: float = bounded(at_least=1e-30, at_most=1e6, default=10.0)
    num_training: int = bounded(at_least=20, default=100)  # optimizer steps of the range test
    # Stop at this multiple of the lowest loss; null: never.
    early_stop_threshold: float | None = bounded(above=1, default=4.0)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    format: ExportFormat
    output: str | None  # a file, or folder, that doesn't exist yet; null: <recipe>_<step> and the format's suffix, here
    dynamic_batch: bool  # onnx, torch_export: any batch size; false: the example's


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """job=runs, compare and report."""

    paths: Texts | None = None  # run directories, or folders of them; `runs=[a,b]` sets this key; null: path.outputs
    sort: str = "started"  # a column, a metric or a key; -NAME: the largest first
    filter: str | None = None  # conditions such as `status=failed val/accuracy>0.9`
    format: Literal["text", "csv", "json"] = "text"


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    output: str = "report.html"  # a file that doesn't exist yet


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    outputs: str


@dataclass(frozen=True, kw_only=True)
class Config:
    recipe: str
    job: JobName
    args: dict[str, Any] = field(default_factory=dict)  # keywords of the function that `job` names
    seed: int = bounded(at_least=0, at_most=2**32 - 1)
    tags: Texts = Texts(())  # labels of the run, in run.json and trackers
    resume: str | None  # the run directory to resume
    rerun: str | None = None  # the run directory whose configuration a new run uses
    trust: bool = False  # run the code of a saved run that isn't known to be the user's; always false in config.yaml
    init_from: str | None  # a checkpoint, a file of weights, or a folder of transformers, to take the weights from
    init: InitConfig = InitConfig()
    objects: Texts | None = None  # files of pickled objects, see framework.config.objects; set by framework.train
    eval: EvalConfig
    predict: PredictConfig
    plan: PlanConfig
    parity: ParityConfig
    preflight: PreflightConfig = PreflightConfig()
    collectives: CollectivesConfig = CollectivesConfig()
    tune: TuneConfig = TuneConfig()
    export: ExportConfig
    runs: RunsConfig = RunsConfig()
    report: ReportConfig = ReportConfig()
    path: PathConfig
    model: Node
    data: DataConfig
    task: Node
    backend: BackendConfig
    topology: TopologyConfig
    trainer: TrainerConfig
    strategy: Node
    optimizer: Node | dict[str, Node]  # see framework.config.optimizers
    scheduler: SchedulerConfig
    checkpoint: CheckpointConfig
    logger: dict[str, Node]
    callbacks: dict[str, Node]
    launcher: LauncherConfig
