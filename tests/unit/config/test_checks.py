"""Rules between keys: every combination that is refused, and its neighbours that aren't."""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import ConfigError
from tests.helpers.internals import Request, check_request, parse
from tests.unit.config.raw import raw_config

ELASTIC = {"launcher._target_": "framework.launch.elastic.ElasticLauncher"}
LOCAL = {"launcher._target_": "framework.launch.local.LocalLauncher"}
TOY = {
    "model": {"_target_": "recipes.toy.ToyModel"},
    "data.datasets": {"_target_": "recipes.toy.toy_regression"},
}
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}


def check(changes: dict[str, Any]) -> None:
    check_request(Request(parse(raw_config({**TOY, **changes})), {}, ()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.max_epochs": None}, "both null"),
        ({"trainer.limit_train_batches": 1.5}, "limit_train_batches=1.5: a fraction of the batches is at most 1.0"),
        ({"trainer.limit_test_batches": 2.0}, "trainer.limit_test_batches=2.0"),
        ({"trainer.overfit_batches": 1.01}, "trainer.overfit_batches=1.01"),
        ({"trainer.overfit_batches": 2, "trainer.limit_train_batches": 3}, "can't go with trainer.limit_train_batches"),
        ({"trainer.overfit_batches": 2, "trainer.limit_val_batches": 3}, "can't go with trainer.limit_val_batches"),
        ({"trainer.overfit_batches": 2, "trainer.fast_dev_run": True}, "can't go with trainer.fast_dev_run"),
        ({"trainer.activation_checkpointing": "auto", "trainer.compile": "default"}, "can't go with trainer.compile="),
        (
            {"trainer.compile": "reduce-overhead", "trainer.accumulate_grad_batches": 2},
            "trainer.compile=reduce-overhead can't go with trainer.accumulate_grad_batches=2",
        ),
        ({"trainer.fast_dev_run": 2, "resume": "run"}, "trainer.fast_dev_run can't go with resume"),
        (
            {**LOCAL, "topology.nnodes": 2},
            "topology.nnodes=2 needs launcher=elastic",
        ),
        ({"topology.node_rank": 1}, "must be less than topology.nnodes=1."),
        ({"data.root": "here"}, "data.root is set, but data.datasets (recipes.toy.toy_regression) doesn't take it"),
        ({"checkpoint.path": "run"}, "checkpoint.path=run is for job=eval, predict, export and your functions"),
        ({"job": "eval"}, "job=eval needs weights: checkpoint.path="),
        ({"job": "export", "checkpoint.path": "run", "resume": "run"}, "Use checkpoint.path=run"),
        ({"data.loader": "resident", "data.num_workers": 2}, "data.num_workers=2 can't go with data.loader=resident"),
        (
            {"data.folds": 5},
            "needs data.fold, the number of the fold to hold out, from 0 to 4. To hold out each in turn",
        ),
        ({"data.fold": 0}, "data.fold=0 needs data.folds, the number of folds"),
        ({"data.folds": 5, "data.fold": 5}, "data.fold=5: the folds of data.folds=5 have the numbers 0 to 4."),
        ({"job": "plan", "topology.nnodes": 3, "topology.node_rank": 3}, "must be less than topology.nnodes=3."),
        ({"topology.rdzv_endpoint": "node0"}, "topology.rdzv_endpoint=node0: must be HOST:PORT"),
        ({"topology.rdzv_secret": "hidden"}, "topology.rdzv_secret is set in a file"),
        ({"topology.rdzv_endpoint": "node0:65536"}, "a port from 1 to 65535"),
        (
            {"topology.share_gpus": True, "topology.gpus_per_process": 1, "backend.name": "nccl"},
            "Use backend=gloo, or backend=auto",
        ),
        (
            {"launcher.max_restarts": 1, **LOCAL},
            "Use launcher=elastic, or launcher.max_restarts=0",
        ),
        ({"job": "plan", "resume": "run"}, "resume can't go with job=plan"),
        ({"job": "parity", "resume": "run"}, "Use init_from=run"),
        ({"job": "tune", "tune.min_lr": 10}, "tune.min_lr=10 must be less than tune.max_lr=10."),
        ({"job": "tune", "trainer.overfit_batches": 2}, "trainer.overfit_batches can't go with job=tune"),
        ({"trainer.deterministic": True, "trainer.benchmark": True}, "Set trainer.benchmark=null"),
        ({"scheduler.schedule": PLATEAU}, "Set scheduler.monitor"),
        (
            {"scheduler.schedule": PLATEAU, "scheduler.monitor": "val/loss", "scheduler.interval": "step"},
            "Use scheduler.interval=epoch",
        ),
        ({"checkpoint.save_top_k": 2}, "Set checkpoint.monitor"),
        ({"checkpoint.monitor": "accuracy"}, "Did you mean checkpoint.monitor=val/accuracy?"),
        ({"checkpoint.monitor": "test/loss"}, "Did you mean checkpoint.monitor=val/loss?"),
        ({"checkpoint.monitor": "val/loss", "trainer.limit_val_batches": 0}, "validation is off"),
        ({"checkpoint.monitor": "val/loss", "trainer.check_val_every_n_epoch": None}, "validation is off"),
        ({"trainer.max_steps": 10, "trainer.val_check_interval": 11}, "is above trainer.max_steps=10"),
        ({"trainer.max_epochs": 2, "trainer.check_val_every_n_epoch": 3}, "is above trainer.max_epochs=2"),
        ({"trainer.val_check_interval": 1.5}, "trainer.val_check_interval=1.5: a share of the epoch is at most 1.0"),
        (
            {"trainer.val_check_interval": 0.5, "trainer.check_val_every_n_epoch": None},
            "trainer.val_check_interval=0.5 is a share of the epochs that are validated",
        ),
    ],
)
def test_combinations_that_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changes)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer.max_epochs": None, "trainer.max_steps": 3},
        {"trainer.max_steps": 10, "trainer.val_check_interval": 10, "trainer.check_val_every_n_epoch": 100},
        {"trainer.max_steps": 10, "trainer.val_check_interval": 11, "trainer.limit_val_batches": 0},
        {"trainer.max_steps": 10, "trainer.val_check_interval": 0.5},
        {"trainer.max_epochs": None, "trainer.fast_dev_run": True},
        {"topology.rdzv_endpoint": "node0:65535"},
        {"trainer.limit_train_batches": 1.0, "trainer.limit_val_batches": 0},
        {"scheduler.schedule": PLATEAU, "scheduler.monitor": "val/loss"},
        {"checkpoint.save_top_k": -1},
        {"checkpoint.enabled": False, "checkpoint.monitor": "val/loss", "trainer.limit_val_batches": 0},
        LOCAL,
        {"topology.nnodes": 2, "topology.node_rank": 1, "topology.rdzv_endpoint": "node0:29400"},
        {"topology.nnodes": 2, "topology.rdzv_endpoint": "[fe80::1]:29400", "launcher.max_restarts": 2},
        {"topology.nnodes": 2, "job": "plan"},
        {"topology.share_gpus": True, "topology.gpus_per_process": 2},
        {"launcher.max_restarts": 1, **ELASTIC},
        {"data.global_batch_size": 8, "trainer.accumulate_grad_batches": 4, "topology.procs_per_node": 2},
        {"resume": "run", "init_from": "what/the/run/started/from"},
        {"job": "tune", "tune.find_lr": False, "init_from": "run"},
        {"trainer.fast_dev_run": True},
    ],
)
def test_combinations_that_are_accepted(changes: dict[str, Any]) -> None:
    check(changes)
