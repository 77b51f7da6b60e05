"""What a strategy can't do is refused when it is made or when it gets the model, before ranks exchange anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import nn

from framework import Strategy
from framework.errors import ConfigError, FrameworkError, TargetError, TopologyError
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD, Pipeline, Single, auto
from framework.types import DataShare
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import Context, Precision, StrategyRequest, Topology

Make = Callable[..., Strategy]


def gpus(*, procs: int = 1, span: int = 1, backend: str = "nccl") -> Context:
    devices = tuple(torch.device("cuda", number) for number in range(span))
    return Context(Topology(1, procs, procs * span, span), 0, 0, 0, devices, backend)


FOUR = cpu_context(world_size=4)
NO_MAPPING: Any = "bf16"
TWO_DEVICES = replace(cpu_context(), topology=Topology(1, 1, 0, 2), devices=(torch.device("cpu"),) * 2)


def powersgd(**options: Any) -> Make:
    return partial(DDP, comm_hook={"powersgd": options})


@pytest.mark.parametrize(
    ("make", "context", "kind", "message"),
    [
        (Single, FOUR, TopologyError, r"strategy=ddp \(or auto\), or topology\.nnodes=1 topology\.procs_per_node=1"),
        (partial(auto, comm_hook="fp8"), FOUR, ConfigError, r"comm_hook=fp8.* one of fp16, bf16, powersgd"),
        (powersgd(rank=2), FOUR, ConfigError, r"powersgd=.*unexpected keyword argument 'rank'"),
        (powersgd(start_powerSGD_iter=1), FOUR, ConfigError, r"powersgd=.*`start_powerSGD_iter` > 1"),
        (partial(DDP, comm_hook={"fp16": {"rank": 2}}), FOUR, ConfigError, "only powersgd has options"),
        (powersgd(), gpus(span=2), TopologyError, "one device each, and these have 2"),
        (partial(DDP, sync_batchnorm=True), FOUR, ConfigError, r"needs GPUs: .*\nUse strategy\.sync_batchnorm=false"),
        (partial(DDP, sync_batchnorm=True), gpus(span=2), TopologyError, r"these have 2\.\nUse topology\.gpus_per_pr"),
        (partial(LocalSGD, every_n_steps=0), FOUR, ConfigError, r"strategy\.every_n_steps=0 must be 1 or more"),
        (FSDP, TWO_DEVICES, TopologyError, r"Use topology\.gpus_per_process=1"),
        (FSDP, gpus(procs=2, backend="gloo"), TopologyError, r"from GPU to GPU, which backend=gloo can't"),
        (partial(FSDP, mp_policy={"param_dtpye": "bf16"}), FOUR, ConfigError, "param_dtype and reduce_dtype"),
        (partial(FSDP, mp_policy={"reduce_dtype": "bfloat16"}), FOUR, ConfigError, "one of fp32, bf16, fp16, or null"),
        (partial(FSDP, mp_policy=NO_MAPPING), FOUR, ConfigError, r"mp_policy=bf16: it has param_dtype"),
        (partial(FSDP, cpu_offload=True), FOUR, ConfigError, "cpu_offload=true is for GPUs"),
        (
            partial(FSDP, cpu_offload=True, data_parallel_shard_degree=2),
            gpus(procs=4),
            ConfigError,
            "for one copy of the model over all processes",
        ),
        *(
            (partial(FSDP, data_parallel_shard_degree=degree), FOUR, TopologyError, r"\nUse one of 1, 2, 4; auto")
            for degree in (3, 0, "some")
        ),
        (partial(Pipeline, schedule="zb"), FOUR, ConfigError, r"schedule=zb: must be one of gpipe, 1f1b, interleaved"),
        (partial(Pipeline, num_stages=3), FOUR, TopologyError, r"pipelines of 3 processes, and 4 processes need"),
        (partial(Pipeline, num_stages=1), FOUR, TopologyError, r"num_stages=1 makes pipelines of 1 processes"),
        (partial(Pipeline, num_stages=5, schedule="interleaved"), FOUR, ConfigError, r"of strategy\.stages_per_rank=2"),
        (partial(Pipeline, stages_per_rank=2), FOUR, ConfigError, "the others 1"),
        (partial(Pipeline, stages_per_rank=1, schedule="interleaved"), FOUR, ConfigError, r"has 2 or more stages"),
        (partial(Pipeline, num_microbatches=0), FOUR, ConfigError, r"num_microbatches=0 is below 1"),
        (Pipeline, replace(TWO_DEVICES, topology=Topology(1, 2, 0, 2)), TopologyError, "one device each"),
        (Pipeline, gpus(procs=2, backend="gloo"), TopologyError, "backend=gloo can't"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(make: Make, context: Context, kind: type[FrameworkError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(context=context)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(
    ("target", "options"),
    [
        (Single, {}),
        (auto, {"broadcast_buffers": False}),
        (DDP, {"broadcast_buffers": False}),
        (AllReduce, {}),
        (Butterfly, {"broadcast_buffers": False}),
        (LocalSGD, {}),
        (FSDP, {}),
        (Pipeline, {}),
        (Pipeline, {"num_stages": 2, "num_microbatches": 3}),
        (Pipeline, {"schedule": "interleaved"}),
    ],
)
def test_rules_say_what_the_strategy_says(target: Any, options: dict[str, Any], world_size: int) -> None:
    context = cpu_context(world_size=world_size)
    request = StrategyRequest(options, context.topology, context.backend, "32-true")
    rules = target.rules(request)
    if list(rules.mistakes()):
        with pytest.raises(FrameworkError):
            target(context=context, **options)
        return
    strategy = target(context=context, **options)
    for name in ("forward_communicates", "num_stages", "buffers_differ", "replicas_differ"):
        assert getattr(rules, name) == getattr(strategy, name), name
    assert rules.data_share() == strategy.data_share(context)


# Models


class Net(nn.Module):
    """Says itself how it is cut: by `way`."""

    def __init__(self, way: Callable[[Net], list[Any]]) -> None:
        super().__init__()
        self.way = way
        self.last = nn.Linear(3, 1)
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def stages(self, number: int) -> list[Any]:
        return self.way(self)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A module of that name is no method.
        self.stages = nn.ModuleList([nn.Linear(1, 1)])


class Counting(nn.Linear):
    """Has something in its state that isn't a tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


def half(net: Net) -> nn.Module:
    return nn.Sequential(net.first, net.norm)


DENSE_ONLY: dict[str, Make] = {
    "allreduce": AllReduce,
    "local_sgd": partial(LocalSGD, warmup_steps=1),
    "pipeline": partial(Pipeline, num_stages=2),
    "fsdp": FSDP,
    "ddp with comm_hook=powersgd": partial(DDP, comm_hook="powersgd"),
}
SPARSE = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True))
FROZEN = nn.Linear(1, 1).requires_grad_(False)
HOLDER = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
STAGES = partial(Pipeline, num_stages=2)


@pytest.mark.parametrize(
    ("make", "model", "kind", "message"),
    [
        *((make, FROZEN, ConfigError, "no parameter of Linear requires") for make in (DDP, AllReduce, LocalSGD)),
        *(
            (make, SPARSE, ConfigError, rf"strategy={name} .* there is a sparse one: 1\.weight\.\nMake it dense")
            for name, make in DENSE_ONLY.items()
        ),
        (partial(FSDP, wrap=["Lineer"]), HOLDER, ConfigError, r"of the class Lineer\.\nIt has Linear"),
        (partial(FSDP, wrap=["ModuleList"]), HOLDER, ConfigError, "ModuleList only holds other modules"),
        (STAGES, Net(lambda net: [net.first, "last"]), TargetError, "must return 2 modules, and returned 2: Linear"),
        (STAGES, Net(lambda net: [net.first, net.last]), TargetError, r"Look at norm\.weight, norm\.bias"),
        (STAGES, Net(lambda net: [nn.Sequential(half(net), net.last), net.last]), TargetError, r"Look at last\.weight"),
        (STAGES, Net(lambda net: [nn.ReLU(), nn.Sequential(half(net), net.last)]), ConfigError, "no parameter to"),
        (STAGES, Net(lambda net: [half(net), nn.Linear(3, 1)]), TargetError, "not of copies"),
        (STAGES, nn.Sequential(nn.Linear(1, 2), Counting()), ConfigError, r"isn't a tensor in .*: 1\._extra_state"),
        (STAGES, Holds(), TargetError, r"can't cut Holds into 2 stages.*no method `stages`"),
        (STAGES, nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ConfigError, r"with 1 trained modules can't be cut into 2"),
    ],
)  # fmt: skip
def test_models_that_cannot_be(make: Make, model: nn.Module, kind: type[FrameworkError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(context=FOUR).wrap(model)


def test_one_process_only_evaluates_a_pipeline() -> None:
    alone = Pipeline(context=cpu_context(), num_stages=4)
    assert alone.data_share(cpu_context()) == DataShare(0, 1)
    with pytest.raises(TopologyError, match="on several processes, and there is one"):
        alone.wrap(nn.Sequential(nn.Linear(1, 1)))


# Precisions


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype"])
def test_fp16_needs_a_loss_scaler(key: str) -> None:
    strategy = FSDP(context=FOUR, mp_policy={key: "fp16"})
    strategy.check_precision("16-mixed")
    for precision in set(get_args(Precision)) - {"16-mixed"}:
        with pytest.raises(ConfigError, match=rf"fp16 can't go with trainer\.precision={precision}"):
            strategy.check_precision(precision)


@pytest.mark.parametrize("make", [LocalSGD, Pipeline, partial(DDP, comm_hook="powersgd")])
def test_a_scaled_loss(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"(?s)precision=16-mixed.*Use trainer\.precision=bf16-mixed"):
        make(context=FOUR).check_precision("16-mixed")
    make(context=FOUR).check_precision("bf16-mixed")
