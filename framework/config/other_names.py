"""What to type here for names of other tools and of earlier versions: the one table of such advice.

A name is looked up only once it has been refused, so an entry can't change what a right command does.
"""

from __future__ import annotations

# In these sections a name is a keyword of the user's own class, so only an entry with the section is meant.
_OWN_SECTIONS = ("model.", "task.", "callbacks.", "logger.", "data.datasets.")
# These names mean something else in each section, so their entries are for the name alone.
_ALONE = ("config", "loss", "mode", "name", "rank", "test", "weights")

_RESUME = "Type resume=RUN with the run's directory, or resume=auto; to evaluate, type job=eval checkpoint.path={value}"
_SUMMARY = "Leave it out: a run prints its model's summary."
_LOGGED = "Leave it out: it is always logged."
_STRATEGIES = (
    "Type strategy=ddp for whole models on each GPU, strategy=fsdp to shard a model that is too large for one."
)
_SHARDED = "Type strategy=fsdp, which shards weights, gradients and optimizer state as ZeRO 3 does."
_ENDPOINT = (
    "On one machine a free port is chosen. On several, type topology.rdzv_endpoint=HOST:PORT with the host of node 0."
)
_CHOSEN_GPUS = "GPUs are chosen before the command: CUDA_VISIBLE_DEVICES={values} python -m framework …"
_RUN_NAME = "A run is named by its recipe and time. Type 'tags=[{value}]' to label it."
_CHECKPOINTS = (
    "Checkpoints need no callback: type checkpoint.monitor=val/loss to keep the best, checkpoint.every_n_steps=N or "
    "checkpoint.every_n_epochs=N for when."
)
_CLASS = "Any class is an optimizer: type ~optimizer '+optimizer={{_target_:torch.optim.{},lr:0.001}}'"
_TEST = "Type job=eval checkpoint.path=RUN. A training evaluates its test part at its end."

ADVICE: dict[str, str] = {
    # Settings of Hydra, which only composes here
    "hydra.run.dir": "Type path.outputs={value}: runs go to <outputs>/<recipe>/<date>_<time>_<4 hex>.",
    "hydra.sweep.dir": "Type path.outputs={value}: sweeps go to <outputs>/multirun.",
    "hydra.sweep.subdir": "Type path.outputs=FOLDER: the jobs of a sweep are numbered in <outputs>/multirun.",
    "hydra.job.chdir": "Leave it out: a run keeps the folder that the command was started in.",
    "hydra.job.name": _RUN_NAME,
    "hydra.job.env_set": "Set variables before the command: NAME=VALUE python -m framework …",
    "hydra.output_subdir": "Leave it out: a run's configuration is in its directory.",
    "hydra.verbose": "Leave it out. trainer.progress and trainer.log_every_n_steps say how much is shown.",
    "hydra.callbacks": "Type callbacks=[NAME,…] for callbacks of the training.",
    "hydra": "Leave it out: Hydra composes the configuration, and the framework does the rest.",
    # Removed
    "trainer.cpu_affinity": "It was removed: numactl and srun bind processes to cores.",
    "trainer.log_rank_losses": "It was removed: a callback can log StepInfo.loss of its rank.",
    "collectives": "It was removed: see examples/collectives.py.",
    "logger=csv": 'It was removed: framework.load(RUN).history.to_csv("metrics.csv") writes the numbers of a run.',
    # How long
    "epochs": "Type trainer.max_epochs={value}",
    "num_epochs": "Type trainer.max_epochs={value}",
    "n_epochs": "Type trainer.max_epochs={value}",
    "num_train_epochs": "Type trainer.max_epochs={value}",
    "max_iters": "Type trainer.max_steps={value}",
    "max_time": "Nothing ends a run by the clock; a SIGTERM saves and stops it: timeout 2h python -m framework …",
    "min_epochs": "Leave it out: training ends at trainer.max_epochs or max_steps, or if a callback asks for it.",
    "min_steps": "Leave it out: training ends at trainer.max_epochs or max_steps, or if a callback asks for it.",
    "trainer.max_epochs=-1": "Type trainer.max_epochs=null; trainer.max_steps then says when training ends.",
    "trainer.max_steps=-1": "Type trainer.max_steps=null; trainer.max_epochs then says when training ends.",
    # Devices, processes and machines
    "devices": (
        "Type trainer.gpus={value} for {value} GPUs of each machine, or trainer.gpus=0 topology.procs_per_node={value} "
        "for {value} processes on the CPU."
    ),
    "devices=auto": "Type trainer.gpus=auto",
    "devices=-1": "Type trainer.gpus=auto",
    "devices=[]": _CHOSEN_GPUS,
    "trainer.gpus=[]": _CHOSEN_GPUS,
    "trainer.gpus=-1": "Type trainer.gpus=auto",
    "accelerator": "Type trainer.gpus=auto for all GPUs, or trainer.gpus=0 for the CPU.",
    "accelerator=cpu": "Type trainer.gpus=0",
    "accelerator=auto": "Leave it out: all GPUs are used, or the CPU if there are none.",
    "accelerator=gpu": "Type trainer.gpus=auto",
    "accelerator=cuda": "Type trainer.gpus=auto",
    "device": "Type trainer.gpus=auto for all GPUs, or trainer.gpus=0 for the CPU.",
    "device=cpu": "Type trainer.gpus=0",
    "device=cuda": "Type trainer.gpus=1, or trainer.gpus=auto for all GPUs.",
    "device=gpu": "Type trainer.gpus=1, or trainer.gpus=auto for all GPUs.",
    "cpu": "Type trainer.gpus=0",
    "use_cpu": "Type trainer.gpus=0",
    "no_cuda": "Type trainer.gpus=0",
    "cuda": "Type trainer.gpus=auto for all GPUs, or trainer.gpus=0 for the CPU.",
    "multi_gpu": "Leave it out: all GPUs are used. trainer.gpus=N uses N of them.",
    "num_gpus": "Type trainer.gpus={value}",
    "n_gpus": "Type trainer.gpus={value}",
    "n_gpu": "Type trainer.gpus={value}",
    "gpu_ids": _CHOSEN_GPUS,
    "cuda_visible_devices": _CHOSEN_GPUS,
    "num_nodes": "Type topology.nnodes={value}",
    "num_machines": "Type topology.nnodes={value}",
    "machine_rank": "Type topology.node_rank={value}",
    "nproc": "Type topology.procs_per_node={value}",
    "nproc_per_node": "Type topology.procs_per_node={value}",
    "num_processes": "Type topology.procs_per_node={value}, the processes of each machine.",
    "world_size": "Type topology.procs_per_node={value}, those of each machine, with topology.nnodes machines.",
    "local_rank": "Leave it out: the command starts its processes, or joins those that torchrun has started.",
    "standalone": "Leave it out: a command without topology.nnodes is for one machine.",
    "rdzv_backend": "Leave it out. On several machines, type topology.rdzv_endpoint=HOST:PORT.",
    "rdzv_id": "Leave it out. On several machines, type topology.rdzv_endpoint=HOST:PORT.",
    "port": _ENDPOINT,
    "host": _ENDPOINT,
    "master_addr": _ENDPOINT,
    "master_port": _ENDPOINT,
    "main_process_ip": _ENDPOINT,
    "main_process_port": _ENDPOINT,
    "dist_url": _ENDPOINT,
    "ddp_timeout": "Type backend.timeout={value}",
    "timeout": "Type backend.timeout={value}",
    "max_restarts": "Type launcher=elastic launcher.max_restarts={value}",
    # Strategies
    "ddp": "Type strategy=ddp",
    "fsdp": "Type strategy=fsdp",
    "use_fsdp": "Type strategy=fsdp",
    "deepspeed": _SHARDED,
    "use_deepspeed": _SHARDED,
    "ddp_find_unused_parameters": "Type strategy=ddp strategy.find_unused_parameters={value}",
    "sync_batchnorm": "Type strategy=ddp strategy.sync_batchnorm={value}",
    "use_distributed_sampler": "Leave it out: samples are always shared out. data.sampler is an order of your own.",
    "replace_sampler_ddp": "Leave it out: samples are always shared out. data.sampler is an order of your own.",
    "strategy=dp": "Type strategy=ddp",
    "strategy=ddp_spawn": "Type strategy=ddp",
    "strategy=ddp_fork": "Type strategy=ddp",
    "strategy=ddp_notebook": "Type strategy=ddp",
    "strategy=ddp_find_unused_parameters_true": "Type strategy=ddp strategy.find_unused_parameters=true",
    "strategy=ddp_find_unused_parameters_false": "Type strategy=ddp",
    "strategy=horovod": "Type strategy=ddp",
    "strategy=single_device": "Type strategy=single",
    "strategy=fsdp2": "Type strategy=fsdp, which is FSDP2.",
    "strategy=fsdp_native": "Type strategy=fsdp",
    "strategy=deepspeed": _SHARDED,
    "strategy=deepspeed_stage_1": _SHARDED,
    "strategy=deepspeed_stage_2": _SHARDED,
    "strategy=deepspeed_stage_3": _SHARDED,
    "strategy=zero": _SHARDED,
    "strategy=model_parallel": "Type topology=model_parallel for a model that places itself, or strategy=pipeline.",
    "strategy=true": _STRATEGIES,
    "launcher=torchrun": "Start the command by torchrun: torchrun --nproc-per-node=N -m framework …",
    "launcher=slurm": "Start the command by srun: srun --ntasks-per-node=N python -m framework …",
    "launcher=srun": "Start the command by srun: srun --ntasks-per-node=N python -m framework …",
    "launcher=spawn": "Type launcher=local",
    "launcher=fork": "Type launcher=local",
    "backend=ddp": "Type strategy=ddp",
    "backend=cuda": "Type backend=nccl, or leave it out: it follows from the device.",
    "backend=cpu": "Type trainer.gpus=0, with which the backend is gloo.",
    # Precision
    "fp16": "Type trainer.precision=16-mixed",
    "bf16": "Type trainer.precision=bf16-mixed",
    "amp": "Type trainer.precision=bf16-mixed, or 16-mixed on GPUs before Ampere.",
    "use_amp": "Type trainer.precision=bf16-mixed, or 16-mixed on GPUs before Ampere.",
    "mixed_precision": "Type trainer.precision=bf16-mixed or 16-mixed; 32-true is full precision.",
    "mixed_precision=fp16": "Type trainer.precision=16-mixed",
    "mixed_precision=bf16": "Type trainer.precision=bf16-mixed",
    "mixed_precision=no": "Type trainer.precision=32-true",
    "trainer.precision=bf16": "Type trainer.precision=bf16-mixed",
    "trainer.precision=fp16": "Type trainer.precision=16-mixed",
    "trainer.precision=16": "Type trainer.precision=16-mixed",
    "trainer.precision=32": "Type trainer.precision=32-true",
    "trainer.precision=64": "Type trainer.precision=64-true",
    "trainer.precision=fp32": "Type trainer.precision=32-true",
    "trainer.precision=fp64": "Type trainer.precision=64-true",
    "trainer.precision=float32": "Type trainer.precision=32-true",
    "trainer.precision=float16": "Type trainer.precision=16-mixed",
    "trainer.precision=bfloat16": "Type trainer.precision=bf16-mixed",
    "trainer.precision=double": "Type trainer.precision=64-true",
    "trainer.precision=16-true": "Type trainer.precision=16-mixed: weights of 16 bits can't be trained stably.",
    "tf32": "Type trainer.matmul_precision=high",
    "allow_tf32": "Type trainer.matmul_precision=high",
    # Data
    "per_device_train_batch_size": "Type data.batch_size={value}",
    "per_device_eval_batch_size": "Type data.eval_batch_size={value}",
    "per_gpu_batch_size": "Type data.batch_size={value}",
    "train_batch_size": "Type data.global_batch_size={value} for all processes together, or data.batch_size for each.",
    "total_batch_size": "Type data.global_batch_size={value}",
    "val_batch_size": "Type data.eval_batch_size={value}",
    "test_batch_size": "Type data.eval_batch_size={value}",
    "bs": "Type data.batch_size={value}",
    "split_batches": "Type data.global_batch_size=N: it is split among the processes.",
    "auto_find_batch_size": "Type job=tune, which finds the largest batch.",
    "auto_scale_batch_size": "Type job=tune, which finds the largest batch.",
    "auto_lr_find": "Type job=tune, which finds a learning rate.",
    "workers": "Type data.num_workers={value}",
    "dataloader_num_workers": "Type data.num_workers={value}",
    "dataloader_drop_last": "Type data.drop_last={value}",
    "pin_memory": "Leave it out: batches for a GPU are always pinned.",
    "dataloader_pin_memory": "Leave it out: batches for a GPU are always pinned.",
    "persistent_workers": "Leave it out: workers live as long as the run.",
    "reload_dataloaders_every_n_epochs": "Leave it out; a framework.Sampler in data.sampler can change with the epoch.",
    "data_dir": "Type data.root={value}",
    "data_path": "Type data.root={value}",
    "dataset": "Type data={value}",
    # Optimization
    "learning_rate": "Type optimizer.lr={value}",
    "optim": "Type optimizer={value}",
    "optimizer=rmsprop": _CLASS.format("RMSprop"),
    "optimizer=adagrad": _CLASS.format("Adagrad"),
    "optimizer=adadelta": _CLASS.format("Adadelta"),
    "optimizer=adamax": _CLASS.format("Adamax"),
    "optimizer=nadam": _CLASS.format("NAdam"),
    "optimizer=radam": _CLASS.format("RAdam"),
    "optimizer.name": "Type optimizer={value}",
    "optimizer.type": "Type optimizer={value}",
    "scheduler.name": "Type scheduler={value}",
    "scheduler.type": "Type scheduler={value}",
    "strategy.name": "Type strategy={value}",
    "model.name": "Type model={value}",
    "data.name": "Type data={value}",
    "optimizer=adamw_torch": "Type optimizer=adamw",
    "optimizer=adamw_torch_fused": "Type optimizer=adamw, which is fused where that is faster.",
    "adam_beta1": "Type 'optimizer.betas=[{value},0.999]'",
    "adam_beta2": "Type 'optimizer.betas=[0.9,{value}]'",
    "adam_epsilon": "Type optimizer.eps={value}",
    "gradient_accumulation_steps": "Type trainer.accumulate_grad_batches={value}",
    "grad_accum": "Type trainer.accumulate_grad_batches={value}",
    "grad_accumulation": "Type trainer.accumulate_grad_batches={value}",
    "accumulation_steps": "Type trainer.accumulate_grad_batches={value}",
    "max_grad_norm": "Type trainer.gradient_clip_val={value}",
    "grad_clip": "Type trainer.gradient_clip_val={value}",
    "clip_grad": "Type trainer.gradient_clip_val={value}",
    "clip_grad_norm": "Type trainer.gradient_clip_val={value}",
    "grad_norm_clip": "Type trainer.gradient_clip_val={value}",
    "track_grad_norm": _LOGGED,
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True) in your own code.",
    "terminate_on_nan": "Leave it out: a loss that isn't finite always ends the run.",
    "lr_scheduler": "Type scheduler={value}",
    "lr_scheduler_type": "Type scheduler={value}",
    "warmup_steps": "Type scheduler=warmup_cosine scheduler.schedule.warmup_steps={value}",
    "num_warmup_steps": "Type scheduler=warmup_cosine scheduler.schedule.warmup_steps={value}",
    "warmup_ratio": "Type scheduler=warmup_cosine scheduler.schedule.warmup_steps=N: that many steps.",
    "scheduler=constant": "Type scheduler=none",
    "scheduler=linear": "Type scheduler=warmup_cosine, or name a class of torch's in scheduler.schedule._target_.",
    "scheduler=reduce_on_plateau": "Type scheduler=plateau",
    "scheduler=reducelronplateau": "Type scheduler=plateau",
    "scheduler=onecyclelr": "Type scheduler=one_cycle",
    "scheduler=cosineannealinglr": "Type scheduler=cosine",
    "label_smoothing_factor": "Type +task.loss.label_smoothing={value}",
    "torch_compile": "Type trainer.compile=default",
    "dynamo_backend": "Type trainer.compile=default",
    "trainer.compile=true": "Type trainer.compile=default",
    "trainer.compile=false": "Type trainer.compile=null",
    "gradient_checkpointing": "Type trainer.activation_checkpointing=auto",
    # Evaluation, logs and files
    "eval_steps": "Type trainer.val_check_interval={value}",
    "eval_strategy": "Type trainer.check_val_every_n_epoch=1, or trainer.val_check_interval=N for every N steps.",
    "evaluation_strategy": "Type trainer.check_val_every_n_epoch=1, or trainer.val_check_interval=N for every N steps.",
    "logging_steps": "Type trainer.log_every_n_steps={value}",
    "logging_dir": "Type path.outputs={value}",
    "output_dir": "Type path.outputs={value}",
    "out_dir": "Type path.outputs={value}",
    "save_dir": "Type path.outputs={value}",
    "log_dir": "Type path.outputs={value}",
    "default_root_dir": "Type path.outputs={value}",
    "weights_save_path": "Type path.outputs={value}",
    "overwrite_output_dir": "Leave it out: each run has a directory of its own.",
    "save_steps": "Type checkpoint.every_n_steps={value}",
    "save_every": "Type checkpoint.every_n_steps={value}",
    "save_strategy": "Type checkpoint.every_n_epochs=1 or checkpoint.every_n_steps=N",
    "save_total_limit": "Type checkpoint.save_last_k={value}",
    "load_best_model_at_end": "Leave it out: with checkpoint.monitor, checkpoints/best has the best weights.",
    "metric_for_best_model": "Type checkpoint.monitor=val/{value}",
    "greater_is_better": "Type checkpoint.mode=max, or min",
    "report_to": "Type 'logger=[{value},console]'",
    "run_name": _RUN_NAME,
    "exp_name": _RUN_NAME,
    "experiment_name": _RUN_NAME,
    "name": _RUN_NAME,
    "logger=true": "Leave it out: the run is logged.",
    "logger=false": "Type logger=none",
    "trainer.logger=true": "Leave it out: the run is logged.",
    "trainer.logger=false": "Type logger=none",
    "wandb": "Type 'logger=[tensorboard,wandb,console]'",
    "tensorboard": "Leave it out: tensorboard is in the default loggers.",
    "verbose": "Leave it out. trainer.progress and trainer.log_every_n_steps say how much is shown.",
    "quiet": "Type trainer.progress=off",
    "enable_progress_bar": "Type trainer.progress=off, or auto",
    "enable_progress_bar=false": "Type trainer.progress=off",
    "progress_bar_refresh_rate": "Type trainer.progress=off to have none, or trainer.log_every_n_steps={value}",
    "enable_model_summary": _SUMMARY,
    "weights_summary": _SUMMARY,
    "enable_checkpointing": "Type checkpoint=default, or checkpoint=none to write none.",
    "enable_checkpointing=false": "Type checkpoint=none",
    "enable_checkpointing=true": "Leave it out: checkpoints are written.",
    "checkpoint=true": "Leave it out: checkpoints are written.",
    "checkpoint=false": "Type checkpoint=none",
    "checkpoint_callback": "Type checkpoint=none to write no checkpoints.",
    "auto_select_gpus": "Leave it out. trainer.gpus says how many are used.",
    "callbacks=model_checkpoint": _CHECKPOINTS,
    "callbacks=modelcheckpoint": _CHECKPOINTS,
    "callbacks=checkpoint": _CHECKPOINTS,
    "callbacks=lr_monitor": _LOGGED,
    "callbacks=learning_rate_monitor": _LOGGED,
    "callbacks=learningratemonitor": _LOGGED,
    "callbacks=rich_progress_bar": "Type trainer.progress=rich",
    "callbacks=progress_bar": "Type trainer.progress=rich",
    "callbacks=model_summary": _SUMMARY,
    "callbacks=stochastic_weight_averaging": "Type callbacks=swa",
    "callbacks=true": "Leave it out, or type callbacks=[early_stopping,ema] with the names of those you want.",
    "callbacks=false": "Type callbacks=none",
    "early_stopping": "Type callbacks=[early_stopping]",
    "patience": "Type callbacks=[early_stopping] callbacks.early_stopping.patience={value}",
    "early_stopping_patience": "Type callbacks=[early_stopping] callbacks.early_stopping.patience={value}",
    "ema": "Type callbacks=[ema]",
    "ema_decay": "Type callbacks=[ema] callbacks.ema.decay={value}",
    "swa": "Type callbacks=[swa]",
    "profile": "Type trainer.profiler=pytorch",
    # What to start from, and what to do
    "resume_from_checkpoint": _RESUME,
    "ckpt_path": _RESUME,
    "ckpt": _RESUME,
    "resume=none": "Type resume=null",
    "rerun=none": "Type rerun=null",
    "resume=true": "Type resume=auto, which is the newest unfinished run.",
    "pretrained": "Type init_from={value}, a checkpoint or a file of weights.",
    "pretrained=true": "Type init_from=FILE, a checkpoint or a file of weights.",
    "weights": "Type init_from={value}, a checkpoint or a file of weights.",
    "load_from": "Type init_from={value}, a checkpoint or a file of weights.",
    "mode": "Type job={value}",
    "do_train": "Type job=train, or leave it out.",
    "do_eval": _TEST,
    "do_predict": "Type job=predict checkpoint.path=RUN",
    "evaluate": _TEST,
    "test": _TEST,
    "test_only": _TEST,
    "eval=true": _TEST,
    "predict=true": "Type job=predict checkpoint.path=RUN",
    "plan=true": "Type job=plan",
    "export=true": "Type job=export checkpoint.path=RUN",
    "tune=true": "Type job=tune",
    "job=test": _TEST,
    "job=fit": "Type job=train, or leave it out.",
    "job=resume": "Type resume=RUN, or resume=auto for the newest unfinished run.",
    "job=validate": "Type job=eval eval.part=val checkpoint.path=RUN",
    "job=infer": "Type job=predict checkpoint.path=RUN",
    "job=inference": "Type job=predict checkpoint.path=RUN",
    "job=sweep": "Type -m and several values, such as -m optimizer.lr=0.1,0.01",
    "debug": "Type trainer=debug, or trainer.fast_dev_run=true for a single batch.",
    "dry_run": "Type trainer.fast_dev_run=true to run one batch, or job=plan to run nothing.",
    "random_seed": "Type seed={value}",
    "random_state": "Type seed={value}",
    "manual_seed": "Type seed={value}",
    "seed_everything": "Type seed={value}",
    "config": "A recipe is chosen by its name: type recipe=NAME for conf/recipe/NAME.yaml.",
    "config_file": "A recipe is chosen by its name: type recipe=NAME for conf/recipe/NAME.yaml.",
    "experiment": "Type recipe={value}",
    "exp": "Type recipe={value}",
    "task_name": "Type recipe={value}",
    "model_name": "Type model={value}",
    "arch": "Type model={value}",
    "loss": "Type task.loss._target_=torch.nn.{value}",
    "criterion": "Type task.loss._target_=torch.nn.{value}",
}
"""By what was refused: `NAME`, `SECTION.NAME` or `NAME=VALUE`. `{value}` stands for the value that was typed."""


def value_advice(key: str, value: str) -> str | None:
    """Return what to type in place of a value that its key refuses; None if unknown."""
    return _entry(key, value, default=None)


def advice(key: str, value: str) -> str | None:
    """Return what to type in place of a refused `key=value`, which has the form of an override; None if unknown."""
    full_key = key.lower().replace("-", "_")
    names = [full_key]
    section, _, name = full_key.rpartition(".")
    if section and name not in _ALONE and not full_key.startswith(_OWN_SECTIONS):
        names.append(name)
    # The section it is in, which may be gone as a whole.
    while section:
        names.append(section)
        section = section.rpartition(".")[0]

    for name in names:
        text = _entry(name, value, default=ADVICE.get(name))
        if text is not None:
            return text
    return None


def _entry(name: str, value: str, *, default: str | None) -> str | None:
    """Return the entry for `name=value`, else the default, with the value filled in. `name=[]` stands for any list."""
    plain = value.strip("'\"")
    form = "[]" if plain.startswith("[") else plain.lower()
    text = ADVICE.get(f"{name}={form}", default)
    if text is None:
        return None
    return text.replace("{values}", plain.strip("[]").replace(" ", "")).replace("{value}", value or "VALUE")
