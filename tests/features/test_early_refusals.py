"""What needs neither data nor ranks is refused by the command itself: before anything starts, all of it at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.internals import (
    compose,
    export_job_module,
    job_module,
    parity_job_module,
    plan_job_module,
    sweep_module,
)
from tests.helpers.trust import trusting


class Answer(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Answer]


def start(*_: Any, **__: Any) -> None:
    raise AssertionError("ranks or children were started")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in a folder with the module `own`, without a process that could start anything."""
    for name, text in {"own": OWN, "own_strategy": OWN_STRATEGY, "own_rules": OWN_RULES}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job_module, "run_ranks", start)
    monkeypatch.setattr(sweep_module, "Worker", start)
    for module in (plan_job_module, parity_job_module, export_job_module):
        monkeypatch.setattr(module, "call_in_child", start)

    def run(*overrides: str) -> Answer:
        capfd.readouterr()
        status = compose.main(["trainer.gpus=0", *trusting(overrides)])
        assert {path.suffix for path in tmp_path.iterdir() if path.name != "__pycache__"} == {".py"}
        return Answer(status, *capfd.readouterr())

    return run


TARGETS = {
    "optimizer.lr=abc": "optimizer.lr=abc: must be a number for torch.optim.SGD.",
    "optimizer.lr=-1": "optimizer.lr=-1: must be at least 0 for torch.optim.SGD.",
    "optimizer=adam optimizer.betas=[0.9,1.0]": "optimizer.betas.1=1.0: must be at least 0 and below 1 for torch.opti",
    "optimizer.nesterov=true": "optimizer.nesterov=true needs momentum and no dampening. Set optimizer.momentum, to",
    "optimizer=lbfgs trainer.precision=16-mixed": "optimizer: LBFGS computes the loss several times in a step, which",
    "+optimizer.momentun=0.9": "optimizer.momentun: torch.optim.SGD has no such keyword. Did you mean optimizer.mom",
    "+model.width=3": "model.width: recipes.toy.ToyModel has no such keyword.",
    "model._target_=recipes.toy.ToyModl": "there is no ToyModl in recipes.toy. Did you mean recipes.toy.ToyModel?",
    "model._target_=own.Wide": "model.width is required by own.Wide. It takes width.",
    "task.loss._target_=torch.nn.MSELos": "there is no MSELos in torch.nn. Did you mean torch.nn.MSELoss?",
    "+task.loss.reductoin=sum": "Did you mean task.loss.reduction?",
    "+data.datasets.nois=1": "Did you mean data.datasets.noise?",
    "scheduler=step ~scheduler.schedule.step_size": "scheduler.schedule.step_size is required by torch.optim.lr_sched",
    "callbacks=early_stopping ~callbacks.early_stopping.monitor": "callbacks.early_stopping.monitor is required by",
    "+callbacks.mine._target_=own.Mine +callbacks.mine.sped=1": "callbacks.mine.sped: own.Mine has no such keyword. Di",
    "+logger.mine._target_=framework.loggers.JsonlLoger": "Did you mean framework.loggers.JsonlLogger?",
    "+callbacks.mine._target_=own.Late": "callbacks.mine: own.Late.on_train_step_ended isn't a hook and would never be",
    "+logger.mine._target_=own.Flushing": "logger.mine: own.Flushing.on_results_ isn't a hook and would never",
    "data.sampler._target_=own.Mine": "there is no such key. Type data.sampler={_target_:own.Mine}",
    "job=tune resume=auto": "resume=auto can't go with job=tune: it continues a training run. Leave it out.",
    "-m seed=1,2 hydra/launcher=joblib": "hydra/launcher=joblib can't be used: a sweep starts its trials itself.",
    "strategy=ddp +strategy.static_grap=true": "Did you mean strategy.static_graph?",
}


@pytest.mark.parametrize("overrides", TARGETS)
def test_a_wrong_target_or_keyword(command: Command, overrides: str) -> None:
    answer = command("recipe=toy", *overrides.split())
    assert (answer.status, answer.out) == (2, "")
    assert TARGETS[overrides] in answer.err


TWO = "topology.procs_per_node=2"
EMA = f"{TWO} callbacks=ema strategy"
STRATEGIES = {
    f"{TWO} strategy=single": "strategy=single is for one process, and there are 2.",
    "strategy=pipeline": "strategy=pipeline puts the stages of a model on several processes, and there is one.",
    f"{TWO} strategy=pipeline strategy.stages_per_rank=2": "strategy.stages_per_rank=2: schedule=interleaved has 2",
    f"{TWO} strategy=pipeline strategy.num_stages=3": "strategy.num_stages=3 makes pipelines of 3 processes, and 2",
    f"{TWO} strategy=pipeline strategy.schedule=zb": "strategy.schedule=zb: must be one of gpipe, 1f1b, interleaved.",
    f"{TWO} strategy=pipeline strategy.num_microbatches=0": "strategy.num_microbatches=0 is below 1.",
    f"{TWO} strategy=pipeline trainer.precision=16-mixed": "strategy=pipeline can't go with trainer.precision=16-mixed",
    f"{TWO} strategy=pipeline data.batch_size=3": "data.batch_size=3 can't be cut into strategy.num_microbatches=8",
    f"{TWO} strategy=pipeline job=parity": "strategy=pipeline can't go with job=parity",
    f"{TWO} strategy=local_sgd job=parity": "job=parity compares what each process has after every step",
    f"{TWO} strategy=local_sgd trainer.precision=16-mixed": "Under strategy=local_sgd each process would skip steps",
    "strategy=local_sgd strategy.every_n_steps=0": "strategy.every_n_steps=0 must be 1 or more",
    f"{TWO} strategy=ddp strategy.comm_hook=fp8": "strategy.comm_hook=fp8: use one of fp16, bf16, powersgd",
    f"{TWO} +strategy.comm_hook=fp8": "strategy.comm_hook=fp8: use one of fp16, bf16, powersgd",
    f"{TWO} strategy=ddp strategy.sync_batchnorm=true": "PyTorch's SyncBatchNorm doesn't run on the CPU.",
    f"{TWO} strategy=fsdp strategy.cpu_offload=true": "strategy.cpu_offload=true is for GPUs",
    f"{TWO} strategy=fsdp strategy.mp_policy.param_dtype=fp16": "fp16 can't go with trainer.precision=32-true",
    f"{TWO} strategy=fsdp strategy.data_parallel_shard_degree=3": "doesn't divide the 2 processes into copies",
    f"{EMA}=fsdp": "callbacks.ema keeps a whole copy of the model to evaluate, and strategy=fsdp leaves no",
    f"{EMA}=ddp strategy.broadcast_buffers=false": "callbacks.ema averages buffers (BatchNorm's statistics) too",
    f"{TWO} data.global_batch_size=3 trainer.accumulate_grad_batches=2": "is less than one sample for each of the 4",
    f"{TWO} job=plan data.global_batch_size=1": "is less than one sample for each of the 2 forward passes",
    "topology=model_parallel": "recipes.toy.ToyModel can't use 2 devices: it takes no keyword `devices`.",
    f"{TWO} strategy._target_=own_strategy.Mine strategy.ranks=3": "strategy.ranks=3 doesn't divide 2 processes",
}


WITHOUT_EFFECT = {
    "topology.rdzv_endpoint=localhost:29400": "has no effect with topology.nnodes=1",
    "topology.rdzv_endpoint=localhost:29400 launcher=elastic": "has no effect with topology.nnodes=1",
    "backend.init_method=file launcher=in_process": "backend.init_method=file has no effect with launcher=in_process",
    "backend.init_method=file:///tmp/meet": "backend.init_method=file:///tmp/meet: must be one of env, tcp, file",
}


@pytest.mark.parametrize("overrides", WITHOUT_EFFECT)
def test_a_key_without_effect_here(command: Command, overrides: str) -> None:
    answer = command("recipe=toy", *overrides.split())
    assert (answer.status, answer.out) == (2, "")
    assert WITHOUT_EFFECT[overrides] in answer.err


@pytest.mark.parametrize("overrides", STRATEGIES)
def test_a_request_that_the_strategy_cannot_meet(command: Command, overrides: str) -> None:
    answer = command("recipe=toy", *overrides.replace("strategy.ranks", "+strategy.ranks").split())
    assert (answer.status, answer.out) == (2, "")
    assert STRATEGIES[overrides] in answer.err


def test_mistakes_of_every_kind_come_at_once(command: Command) -> None:
    answer = command("recipe=toy", "optimizer.lr=abc", "+model.width=3", "trainer.limit_val_batches=1.5")
    assert answer.status == 2
    assert answer.err.splitlines()[0] == "The configuration has 3 mistakes:"

    answer = command("recipe=toy", "optimizer.lr=abc", "data.global_batch_size=1", "topology.procs_per_node=2")
    assert "optimizer.lr=abc: must be a number" in answer.err
    assert "data.global_batch_size=1 is less than one sample" in answer.err

    answer = command("recipe=toy", "optimizer.lr=abc", "topology.procs_per_node=2", "strategy=single")
    assert "\n    Use strategy=ddp" in answer.err


@pytest.mark.parametrize(
    "swept",
    [
        "optimizer.lr=0.1,abc",
        "optimizer.lr=0.1,-1",
        "optimizer.nesterov=false,true",
        "trainer.max_steps=1,x",
        "trainer.max_steps=1,0",
        "trainer.limit_val_batches=1.0,1.5",
        "trainer.precision=32-true,33",
        "optimizer=sgd,sgdd",
        "task.loss._target_=torch.nn.MSELoss,torch.nn.MSELos",
        "+model={},{width:3}",
        "data.global_batch_size=4,1 topology.procs_per_node=2",
        "strategy=ddp,pipeline",
        "checkpoint.save_top_k=1,3 checkpoint.monitor=null",
    ],
)
def test_no_trial_starts_if_one_is_wrong(command: Command, swept: str) -> None:
    answer = command("-m", "recipe=toy", *swept.split())
    assert (answer.status, answer.out) == (2, "")
    *mistakes, trial = answer.err.splitlines()
    assert mistakes
    last_value = swept.split()[0].rpartition(",")[2]
    assert re.fullmatch(r"Found in the trial \S+\. No trial was started\.", trial)
    assert last_value.lower() in trial.lower()


def test_jobs_on_runs_build_nothing(command: Command) -> None:
    assert command("job=runs", "recipe=toy", "optimizer.lr=abc").status == 0


OWN = """
import torch
import framework

class Wide(torch.nn.Module):
    def __init__(self, width):
        super().__init__()

class Mine(framework.Callback):
    def __init__(self, speed=1): ...
    def on_train_step_end(self, info): ...
"""

OWN += """
class Late(Mine):
    def on_train_step_ended(self, info): ...
    def helper(self): ...

class Flushing(framework.Logger):
    def log(self, values, *, step, epoch): ...
    def on_results_(self, metrics): ...
"""

OWN_STRATEGY = """
raise ImportError("the command must not import it")
import torch
import framework
from own_rules import Rules

class Mine(framework.Strategy):
    rules = Rules

    def __init__(self, *, context, ranks): ...
"""

OWN_RULES = """
from framework.strategies.rules import StrategyRules

class Rules(StrategyRules):
    def mistakes(self):
        world_size = self.request.topology.world_size
        ranks = self.request.options["ranks"]
        if world_size % ranks:
            yield f"strategy.ranks={ranks} doesn't divide {world_size} processes."
"""
