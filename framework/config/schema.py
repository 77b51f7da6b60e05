"""Every key the framework reads: its type, range and meaning, as frozen dataclasses.

Hydra composes the YAML in `conf/`, and `framework.config.parse` turns it into these; nothing else reads a `DictConfig`.
A user's own part (`_target_` and keywords) is a `Node`; `framework.config.instantiate` builds it.

Types that the parser knows: `bool int float str`, `X | None`, `Literal`, `Duration`, `Texts`, `Steps`, `Node`,
`dict[str, Node]`, `dict[str, str]`, dataclasses. `None` is written `null`, and also `auto` where `auto()` is used. A
bound is inclusive unless `above`.

Metadata: the `shorthand` of a section is the key that `SECTION=VALUE` sets; a `verbatim` text needs no quotes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, NewType

Duration = NewType("Duration", float)
"""Seconds. Written as a number of seconds, `90s`, `30m`, `2h` or `1d`; above 0, at most a year."""

Texts = NewType("Texts", tuple[str, ...])
"""Written as a list of strings."""

Steps = NewType("Steps", tuple[int, ...])
"""Written as a list of optimizer steps, which are counted from 1."""

Node = Mapping[str, Any]
"""A mapping with `_target_`: a callable to import, called with the other keys as keywords."""


def bounded(*, default: Any = MISSING, **bounds: float) -> Any:
    """Declare a number with the bounds `at_least`, `at_most` or `above`.

    One with a default may be missing, as in files older than the key.
    """
    return field(default=default, metadata={"bounds": bounds})


def auto(*, at_least: float, default: Any = MISSING) -> Any:
    """Declare a number or `auto` (also `null`), which the framework decides; `None` in the dataclass.

    One with a default may be missing, as in files older than the key.
    """
    return field(default=default, metadata={"auto": True, "bounds": {"at_least": at_least}})


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
SubmitFormat = Literal["slurm", "trainjob", "skypilot"]
ExportFormat = Literal["state_dict", "safetensors", "pretrained", "onnx", "torch_export", "lightning"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    # Returns framework.Datasets(train, val, test).
    datasets: Node
    # Makes a batch of a list of samples. null: torch's default_collate.
    collate_fn: Node | None = None
    # The order of the train part, one of framework.samplers. null: `shuffle` decides.
    sampler: Node | None = None
    # K-fold cross-validation: the folds that the train part is split into. null: it isn't.
    folds: int | None = bounded(at_least=2, default=None)
    # The number of the fold that is the val part, counted from 0; the others are the train part.
    fold: int | None = bounded(at_least=0, default=None)
    # Samples of a process in one batch, as in PyTorch. auto: as in the DataLoader that is given as the train part,
    # else 32.
    batch_size: int | Literal["auto"] = bounded(at_least=1)
    # Samples of an optimizer step, over all processes and accumulation steps. It replaces batch_size.
    global_batch_size: int | None = bounded(at_least=1)
    # Samples of a process in one evaluation batch. auto: as in the DataLoader that is given, else 256.
    # null: batch_size.
    eval_batch_size: int | Literal["auto"] | None = bounded(at_least=1)
    # resident: decode every sample once and keep it in memory. dataloader: torch's DataLoader. auto: resident for
    # tensors.
    loader: LoaderKind = "auto"
    # DataLoader processes of each rank and part. auto: the rank's share of the cores minus one, at most 8.
    num_workers: int | None = auto(at_least=0)
    # Drop an incomplete global batch at the end of an epoch. null: as in the DataLoader that is given as the train
    # part, else false.
    drop_last: bool | None = None
    # How processes share a part that is an IterableDataset. shared: all read it and keep their samples. join, stop:
    # each reads its shard, until all shards end or until the first one does.
    stream: Literal["shared", "join", "stop"] = "shared"
    # Draw a new order of the training samples in every epoch.
    shuffle: bool
    # Steps whose samples are left out, each by the number that it would have if none was skipped.
    skip_steps: Steps = Steps(())
    # Steps whose samples are trained at the end of their epoch.
    defer_steps: Steps = Steps(())
    # The folder of the data set's files. null: it has none.
    root: str | None
    # Addresses to download missing files from. null: the data set's own.
    mirrors: Texts | None

    @property
    def train_batch_size(self) -> int:
        """The batch size of a process, as far as it is known without the data."""
        if self.batch_size == "auto":
            return 32
        return self.batch_size

    @property
    def evaluated_batch_size(self) -> int:
        """The batch size of a process in evaluations, as far as it is known without the data."""
        if self.eval_batch_size == "auto":
            return 256
        return self.eval_batch_size or self.train_batch_size


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    name: BackendName
    init_method: InitMethod
    # The time-out of the set-up, until the first step is done.
    init_timeout: Duration
    # The time-out of every collective after the first step.
    timeout: Duration


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    # Number of machines.
    nnodes: int = bounded(at_least=1)
    # The number of the node that the command runs on.
    node_rank: int = bounded(at_least=0)
    # Processes on each node. auto: as many as the GPUs allow, one on the CPU.
    procs_per_node: int | None = auto(at_least=1)
    # GPUs of each process. auto: the node's GPUs are split evenly.
    gpus_per_process: int | None = auto(at_least=1)
    # GPUs that the model needs; the default of gpus_per_process.
    min_gpus_per_process: int = bounded(at_least=1)
    # Let several processes use one GPU. It needs gpus_per_process and another backend than nccl.
    share_gpus: bool
    # HOST:PORT of node 0, where the nodes meet. null: there is one node.
    rdzv_endpoint: str | None
    # Always null here: `launch.environment.without_secret` takes the secret from the command, so that it isn't saved.
    rdzv_secret: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The names are Lightning's, if it has one."""

    # GPUs used on each node; 0 is the CPU. auto: all.
    gpus: int | None = auto(at_least=0)
    # Passes over the training samples. null: max_steps decides.
    max_epochs: int | None = bounded(at_least=1)
    # Optimizer steps. null: max_epochs decides.
    max_steps: int | None = bounded(at_least=1)
    precision: Precision
    # Batches of a process in one optimizer step.
    accumulate_grad_batches: int = bounded(at_least=1)
    # The largest norm, or value, of the gradients. null: they aren't clipped.
    gradient_clip_val: float | None = bounded(above=0)
    gradient_clip_algorithm: ClipAlgorithm
    # Optimizer steps between two logs.
    log_every_n_steps: int = bounded(at_least=1)
    # How progress is shown on the terminal.
    progress: ProgressMode = "auto"
    # Optimizer steps between two validations, or a share of the epoch's steps. null: validate at the end of epochs.
    val_check_interval: int | float | None = bounded(above=0)
    # Epochs between two validations. null: don't validate at the end of epochs.
    check_val_every_n_epoch: int | None = bounded(at_least=1)
    # Validation batches of each process before training, to find mistakes early.
    num_sanity_val_steps: int = bounded(at_least=0, default=1)
    # Test, evaluate and predict in torch.inference_mode instead of torch.no_grad.
    inference_mode: bool = False
    # A whole number of batches, or a share of them from 0 to 1. null: all. 0 leaves the part out of the training; a job
    # that evaluates it takes all of it.
    limit_train_batches: int | float | None = bounded(above=0)
    limit_val_batches: int | float | None = bounded(at_least=0)
    limit_test_batches: int | float | None = bounded(at_least=0)
    # Run this many batches of everything and write no checkpoints. true: 1.
    fast_dev_run: bool | int = bounded(at_least=0)
    # Train and validate on the same few batches, in order. A number or a share, as in limit_train_batches.
    overfit_batches: int | float | None = bounded(above=0)
    # Use deterministic algorithms only.
    deterministic: bool
    # cudnn.benchmark. null: off in deterministic mode, else on.
    benchmark: bool | None
    # null: as torch or the user's code sets it.
    matmul_precision: MatmulPrecision | None = None
    # Intra-op threads of a process. auto: its share of the cores.
    num_threads: int | None = auto(at_least=1)
    # Store images and the weights of convolutions as NHWC.
    channels_last: bool = False
    # The mode of torch.compile. null: the model isn't compiled.
    compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    # Modules whose activations are recomputed in the backward: names of classes. auto: what the model repeats.
    activation_checkpointing: Literal["auto"] | Texts | None = None
    # Record some steps with torch's profiler; `callbacks=[profiler]` says which. summary: where their time went.
    # pytorch: with traces.
    profiler: Literal["summary", "pytorch"] | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    # Is given the optimizer, and the length as `total_steps` or `num_training_steps` if it takes one of these and the
    # node doesn't set it.
    schedule: Node | None
    # The length of the schedule, counted in `interval`s. null: the length of the run.
    total_steps: int | None = bounded(at_least=1, default=None)
    # When the schedule takes a step.
    interval: Interval
    # The metric that ReduceLROnPlateau watches.
    monitor: str | None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    # For job=eval, predict and export: a checkpoint or a run directory.
    path: str | None
    # Write checkpoints.
    enabled: bool
    # The validation metric that decides which checkpoints are the best, such as val/accuracy. null: none is.
    monitor: str | None
    # Whether a small or a large value of `monitor` is better.
    mode: Mode
    # Number of the best checkpoints that are kept. -1 keeps every checkpoint.
    save_top_k: int = bounded(at_least=-1)
    # Number of the newest checkpoints that are kept, in case the last one is damaged.
    save_last_k: int = bounded(at_least=1, default=2)
    # Optimizer steps between two checkpoints.
    every_n_steps: int | None = bounded(at_least=1)
    # Epochs between two checkpoints.
    every_n_epochs: int | None = bounded(at_least=1)
    # Minutes since the last checkpoint; checked at each log.
    every_n_minutes: float | None = bounded(above=0)
    # Write while training continues.
    asynchronous: bool = True
    # Leave out parameters that are frozen, and as the model was built: they are built again.
    only_trained: bool = False


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    # The class of the launcher, a subclass of framework.launch.base.Launcher.
    _target_: FunctionName
    # Its keywords.
    args: dict[str, Any] = field(default_factory=dict)
    # How often the whole run is restarted after failures. launcher=elastic only.
    max_restarts: int = bounded(at_least=0)
    # How long ranks wait for another one before it is reported as late.
    late_after: Duration


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """How the weights of `init_from` fit the model. Patterns are regular expressions, found anywhere in a name."""

    # Pattern → replacement, applied in this order to the names in the file.
    rename: dict[str, str] | None = None
    # Patterns of the names, after renaming, that aren't loaded.
    skip: Texts | None = None
    # Refuse a name that is only in the file or only in the model.
    strict: bool = True
    # Of a checkpoint of Lightning, also load the optimizer's and the schedule's state, and how far training is.
    training: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    # The part of the data that is evaluated.
    part: Part


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    # The part of the data that is predicted.
    part: Part
    # A .csv or .pt file that doesn't exist yet.
    output: str


DeviceName = Literal[
    "any",
    "this",
    "b200",
    "h200",
    "h100",
    "a100",
    "a100-40gb",
    "l40s",
    "l4",
    "a10",
    "t4",
    "v100",
    "rtx4090",
    "rtx3090",
]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    format: Literal["text", "json"]
    # The device to forecast memory for; any: the smallest GPU that is enough; this: of this machine. null: no forecast.
    device: DeviceName | None = None
    # The number of training samples, if the data set isn't there to be counted.
    train_samples: int | None = bounded(at_least=1)
    # Make some training steps here, in a temporary directory, to see how long they take.
    measure: bool = False
    # The run of a job=preflight, or its preflight.json, whose times the exchange between nodes takes.
    preflight: str | None = None
    # Of a node, in any currency.
    price_per_hour: float | None = bounded(default=None, at_least=0.0)


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    # Number of processes that are compared with one process. null: the run's, at least 2.
    processes: int | None = bounded(at_least=2)
    # Optimizer steps.
    steps: int = bounded(at_least=1)


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """job=preflight, and the same checks before training if `enabled`. A limit of null isn't checked."""

    # Check before training, too. `preflight=true` sets this key.
    enabled: bool = False
    # Time spent measuring. null: 20 seconds, or 2 before training.
    seconds: Duration | None = None
    # The largest message, in bytes.
    max_bytes: int = bounded(at_least=4, default=2**28)
    # The largest difference of a clock from rank 0's.
    max_clock_offset: Duration | None = Duration(1.0)
    # The latency of a link, one way.
    max_latency: Duration | None = None
    # The bandwidth of a link, in MB/s (10^6 bytes).
    min_link_bandwidth: float | None = bounded(above=0, default=None)
    # The bus bandwidth of all_reduce at its best size, in MB/s.
    min_bus_bandwidth: float | None = bounded(above=0, default=None)
    # The speed of a device, in GFLOP/s.
    min_matmul: float | None = bounded(above=0, default=None)
    # Free space for the run directory, in GB (10^9 bytes).
    min_free_disk: float | None = bounded(above=0, default=None)
    # Free space in /dev/shm, in GB.
    min_shm: float | None = bounded(above=0, default=None)


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """job=tune. The names are those of Lightning's Tuner, if it has one."""

    # Find the largest batch that fits.
    find_batch_size: bool = True
    # Find a learning rate, with that batch.
    find_lr: bool = True
    # The largest batch of a process that is tried. null: the size of the data set.
    max_batch_size: int | None = bounded(at_least=1, default=None)
    # Optimizer steps of each trial. The first one allocates the optimizer's state, so two are the least.
    steps_per_trial: int = bounded(at_least=2, default=3)
    # The fraction of the free memory to keep free.
    margin: float = bounded(at_least=0, at_most=0.9, default=0.1)
    # The first and the last learning rate of the range test.
    min_lr: float = bounded(at_least=1e-30, at_most=1e6, default=1e-7)
    max_lr: float = bounded(at_least=1e-30, at_most=1e6, default=10.0)
    # Optimizer steps of the range test.
    num_training: int = bounded(at_least=20, default=100)
    # Stop the range test at this multiple of the lowest loss. null: never.
    early_stop_threshold: float | None = bounded(above=1, default=4.0)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    format: ExportFormat
    # A file, or folder, that doesn't exist yet. null: <recipe>_<step> with the format's suffix, in this folder.
    output: str | None
    # For onnx and torch_export: allow any batch size. false: only the example's.
    dynamic_batch: bool
    # Merge the adapters of `peft` into the weights; the model is then as it was before they were added.
    merge: bool = False


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """job=submit. A mapping sets or replaces what the framework writes, with the names of the cluster's own engine."""

    # What the job is written for.
    format: SubmitFormat | None = None
    # Print the job and submit nothing.
    dry_run: bool = False
    # Options of sbatch, such as {partition: gpu, time: "4:00:00"}. `setup` is a list of shell lines that come first.
    slurm: dict[str, Any] = field(default_factory=dict)
    # Fields of Kubeflow's TrainJob, such as {spec: {trainer: {image: IMAGE}}}.
    trainjob: dict[str, Any] = field(default_factory=dict)
    # Fields of SkyPilot's task, such as {resources: {accelerators: H100}}.
    skypilot: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """job=runs, compare, report and upload."""

    # Run directories, or folders of them. `runs=[a,b]` sets this key. null: path.outputs.
    paths: Texts | None = None
    # A column, a metric or a key. -NAME sorts the largest first.
    sort: str = "started"
    # Conditions such as `status=failed val/accuracy>0.9`, typed without quotes.
    filter: str | None = field(default=None, metadata={"verbatim": True})
    format: Literal["text", "csv", "json"] = "text"


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    # A file that doesn't exist yet.
    output: str = "report.html"


@dataclass(frozen=True, kw_only=True)
class BranchConfig:
    """job=branch, with `skip`."""

    # When the samples of the skipped steps are trained. later: at the end of their epoch.
    skipped: Literal["never", "later"] = "never"


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """job=replay, of the `step` of a `run`."""

    # How many steps are shown, `step` being the last.
    steps: int = bounded(at_least=1, default=1)
    # Name the forward operation whose backward gives NaN, with torch.autograd.detect_anomaly.
    detect_anomaly: bool = False
    # A .pt file that doesn't exist yet: batch, weights and generators of the step. null: none.
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class WhyConfig:
    """job=why, of one run."""

    # The optimizer step to look into, counted from 1.
    step: int | None = bounded(at_least=1, default=None)
    # Look into the step in which this logged metric leaps most, as train/loss.
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Several runs by one command (-m). It isn't part of the configuration that a trial saves."""

    # Trials at a time. auto: as many as there are GPUs or cores for.
    jobs: int | None = auto(at_least=1, default=None)
    # Trials that may use the same GPU.
    share_gpus: int = bounded(at_least=1, default=1)
    # Trials that differ in nothing but these keys are one row of the table.
    over: Texts = Texts(("seed",))
    # Which trials are evaluated on the test part: the best one after the sweep, all after their training, or none.
    test: Literal["best", "all", "none"] = "best"
    # How often a failed trial is restarted at once.
    retries: int = bounded(at_least=0, default=0)
    # With resume=SWEEP: restart the failed trials, too.
    retry: Literal["none", "failed"] = "none"
    # Stop the sweep when a trial fails.
    fail_fast: bool = False
    # The directory of a sweep of which this command is one more worker.
    worker: str | None = None
    # Trials of a search, in total.
    n_trials: int | None = bounded(at_least=1, default=None)
    # How a search chooses its trials, a sampler of Optuna. null: a grid, all combinations of values.
    sampler: Node | None = None
    # Which trials a search stops early, a pruner of Optuna. null: none.
    pruner: Node | None = None


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    # The folder of all run directories, or a URL such as s3://BUCKET/FOLDER.
    outputs: str
    # The folder of the local sides of URLs. null: framework/outputs in XDG_CACHE_HOME, or in ~/.cache.
    cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    # The name of the recipe, which is also the folder of its runs in path.outputs.
    recipe: str
    # What the command does: one of the framework's jobs, or a function of the user's.
    job: JobName
    # json: the answer is one JSON document on stdout, and all else that is printed goes to stderr. It is typed, and
    # not part of the configuration that a run saves.
    format: Literal["text", "json"] = "text"
    # Keywords of the function that `job` names.
    args: dict[str, Any] = field(default_factory=dict)
    seed: int = bounded(at_least=0, at_most=2**32 - 1)
    # Labels of the run, in run.json and in trackers.
    tags: Texts = Texts(())
    # The run directory to resume.
    resume: str | None
    # The run directory whose configuration a new run uses.
    rerun: str | None = None
    # The run that a job looks into, an optimizer step of it, counted from 1, and one of its ranks: for job=replay
    # and branch; the run alone for job=why.
    run: str | None = None
    step: int | None = bounded(at_least=1, default=None)
    rank: int | None = bounded(at_least=0, default=None)
    # Steps of that run whose samples job=branch leaves out.
    skip: Steps = Steps(())
    # Run the code of a saved run that isn't known to be the user's. It is always false in config.yaml.
    trust: bool = False
    # Where to take the weights from: a checkpoint, a file of weights, or a folder of transformers.
    init_from: str | None
    init: InitConfig = InitConfig()
    # Files of pickled objects, which framework.train writes; see framework.config.objects.
    objects: Texts | None = None
    eval: EvalConfig
    predict: PredictConfig
    plan: PlanConfig
    parity: ParityConfig
    preflight: PreflightConfig = field(default=PreflightConfig(), metadata={"shorthand": "enabled"})
    tune: TuneConfig = TuneConfig()
    export: ExportConfig
    submit: SubmitConfig = SubmitConfig()
    runs: RunsConfig = field(default=RunsConfig(), metadata={"shorthand": "paths"})
    report: ReportConfig = ReportConfig()
    replay: ReplayConfig = ReplayConfig()
    branch: BranchConfig = BranchConfig()
    why: WhyConfig = WhyConfig()
    sweep: SweepConfig = SweepConfig()
    path: PathConfig
    model: Node
    # A configuration of the package peft, such as peft.LoraConfig: train adapters only. null: train the model.
    peft: Node | None = None
    data: DataConfig
    task: Node
    backend: BackendConfig
    topology: TopologyConfig
    trainer: TrainerConfig
    strategy: Node
    # One optimizer, or several by name; see framework.config.optimizers.
    optimizer: Node | dict[str, Node]
    scheduler: SchedulerConfig
    checkpoint: CheckpointConfig
    logger: dict[str, Node]
    callbacks: dict[str, Node]
    launcher: LauncherConfig
