"""A whole configuration as plain values, to change in tests of what reads it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_RAW: dict[str, Any] = {
    "recipe": "some",
    "job": "train",
    "seed": 0,
    "resume": None,
    "init_from": None,
    "eval": {"part": "test"},
    "predict": {"part": "test", "output": "predictions.csv"},
    "export": {"format": "state_dict", "output": None, "dynamic_batch": True},
    "plan": {"format": "text", "train_samples": None},
    "parity": {"processes": None, "steps": 3},
    "preflight": {
        "enabled": False,
        "seconds": None,
        "max_bytes": 1024,
        "max_clock_offset": "1s",
        "max_latency": None,
        "min_link_bandwidth": None,
        "min_bus_bandwidth": None,
        "min_matmul": None,
        "min_free_disk": None,
        "min_shm": None,
    },
    "collectives": {"backends": None, "delay": "1s"},
    "tune": {
        "find_batch_size": True,
        "find_lr": True,
        "max_batch_size": None,
        "steps_per_trial": 3,
        "margin": 0.1,
        "min_lr": 1e-7,
        "max_lr": 10,
        "num_training": 100,
        "early_stop_threshold": 4.0,
    },
    "path": {"outputs": "outputs"},
    "model": {"_target_": "recipes.some.Model", "width": 8},
    "data": {
        "datasets": {"_target_": "recipes.some.data"},
        "batch_size": 4,
        "global_batch_size": None,
        "eval_batch_size": None,
        "loader": "auto",
        "stream": "shared",
        "num_workers": "auto",
        "shuffle": True,
        "root": None,
        "mirrors": None,
    },
    "task": {"_target_": "framework.tasks.Supervised", "loss": {"_target_": "torch.nn.MSELoss"}, "metrics": {}},
    "backend": {"name": "auto", "init_method": "env", "init_timeout": "5m", "timeout": 600},
    "topology": {
        "nnodes": 1,
        "node_rank": 0,
        "procs_per_node": "auto",
        "gpus_per_process": None,
        "min_gpus_per_process": 1,
        "share_gpus": False,
        "rdzv_endpoint": None,
    },
    "trainer": {
        "gpus": "auto",
        "max_epochs": 2,
        "max_steps": None,
        "precision": "32-true",
        "accumulate_grad_batches": 1,
        "gradient_clip_val": None,
        "gradient_clip_algorithm": "norm",
        "log_every_n_steps": 10,
        "log_rank_losses": False,
        "val_check_interval": None,
        "check_val_every_n_epoch": 1,
        "num_sanity_val_steps": 1,
        "limit_train_batches": None,
        "limit_val_batches": None,
        "limit_test_batches": None,
        "fast_dev_run": False,
        "overfit_batches": None,
        "deterministic": False,
        "benchmark": None,
        "num_threads": "auto",
        "cpu_affinity": False,
        "channels_last": False,
        "compile": None,
        "activation_checkpointing": None,
        "profiler": None,
    },
    "strategy": {"_target_": "framework.strategies.auto"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "scheduler": {"schedule": None, "interval": "epoch", "monitor": None, "total_steps": None},
    "checkpoint": {
        "path": None,
        "enabled": True,
        "monitor": None,
        "mode": "min",
        "save_top_k": 1,
        "save_last_k": 2,
        "every_n_steps": None,
        "every_n_epochs": 1,
        "every_n_minutes": None,
        "asynchronous": True,
    },
    "logger": {"jsonl": {"_target_": "framework.loggers.JsonlLogger"}},
    "callbacks": {},
    "launcher": {"name": "auto", "max_restarts": 0, "late_after": "10s"},
}


def raw_config(changes: Mapping[str, Any] | None = None, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A configuration that is right, with values put at dotted keys and keys taken out."""
    raw = deepcopy(_RAW)
    for key, value in (changes or {}).items():
        parent, name = _find(raw, key)
        parent[name] = value
    for key in without:
        parent, name = _find(raw, key)
        del parent[name]
    return raw


def _find(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *above, name = key.split(".")
    for part in above:
        raw = raw.setdefault(part, {})
    return raw, name
