"""What a strategy can't do is refused when it is made or when it gets the model, before ranks exchange anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

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


class RefusedOptions(NamedTuple):
    make: Make
    error: type[FrameworkError]
    says: str
    context: Context = FOUR


@pytest.mark.parametrize(
    "case",
    [
        RefusedOptions(
            make=Single,
            error=TopologyError,
            says=r"strategy=ddp \(or auto\), or topology\.nnodes=1 topology\.procs_per_node=1",
        ),
        RefusedOptions(
            make=partial(auto, comm_hook="fp8"), error=ConfigError, says=r"comm_hook=fp8.* one of fp16, bf16, powersgd"
        ),
        RefusedOptions(make=powersgd(rank=2), error=ConfigError, says=r"powersgd=.*unexpected keyword argument 'rank'"),
        RefusedOptions(
            make=powersgd(start_powerSGD_iter=1), error=ConfigError, says=r"powersgd=.*`start_powerSGD_iter` > 1"
        ),
        RefusedOptions(
            make=partial(DDP, comm_hook={"fp16": {"rank": 2}}), error=ConfigError, says="only powersgd has options"
        ),
        RefusedOptions(
            make=powersgd(), context=gpus(span=2), error=TopologyError, says="one device each, and these have 2"
        ),
        RefusedOptions(
            make=partial(DDP, sync_batchnorm=True),
            error=ConfigError,
            says=r"needs GPUs: .*\nUse strategy\.sync_batchnorm=false",
        ),
        RefusedOptions(
            make=partial(DDP, sync_batchnorm=True),
            context=gpus(span=2),
            error=TopologyError,
            says=r"these have 2\.\nUse topology\.gpus_per_pr",
        ),
        RefusedOptions(
            make=partial(LocalSGD, every_n_steps=0),
            error=ConfigError,
            says=r"strategy\.every_n_steps=0 must be 1 or more",
        ),
        RefusedOptions(make=FSDP, context=TWO_DEVICES, error=TopologyError, says=r"Use topology\.gpus_per_process=1"),
        RefusedOptions(
            make=FSDP,
            context=gpus(procs=2, backend="gloo"),
            error=TopologyError,
            says=r"from GPU to GPU, which backend=gloo can't",
        ),
        RefusedOptions(
            make=partial(FSDP, mp_policy={"param_dtpye": "bf16"}),
            error=ConfigError,
            says="param_dtype and reduce_dtype",
        ),
        RefusedOptions(
            make=partial(FSDP, mp_policy={"reduce_dtype": "bfloat16"}),
            error=ConfigError,
            says="one of fp32, bf16, fp16, or null",
        ),
        RefusedOptions(
            make=partial(FSDP, mp_policy=NO_MAPPING), error=ConfigError, says=r"mp_policy=bf16: it has param_dtype"
        ),
        RefusedOptions(make=partial(FSDP, cpu_offload=True), error=ConfigError, says="cpu_offload=true is for GPUs"),
        RefusedOptions(
            make=partial(FSDP, cpu_offload=True, data_parallel_shard_degree=2),
            context=gpus(procs=4),
            error=ConfigError,
            says="for one copy of the model over all processes",
        ),
        *(
            RefusedOptions(
                make=partial(FSDP, data_parallel_shard_degree=degree),
                error=TopologyError,
                says=r"\nUse one of 1, 2, 4; auto",
            )
            for degree in (3, 0, "some")
        ),
        RefusedOptions(
            make=partial(Pipeline, schedule="zb"),
            error=ConfigError,
            says=r"schedule=zb: must be one of gpipe, 1f1b, interleaved",
        ),
        RefusedOptions(
            make=partial(Pipeline, num_stages=3),
            error=TopologyError,
            says=r"pipelines of 3 processes, and 4 processes need",
        ),
        RefusedOptions(
            make=partial(Pipeline, num_stages=1),
            error=TopologyError,
            says=r"num_stages=1 makes pipelines of 1 processes",
        ),
        RefusedOptions(
            make=partial(Pipeline, num_stages=5, schedule="interleaved"),
            error=ConfigError,
            says=r"of strategy\.stages_per_rank=2",
        ),
        RefusedOptions(make=partial(Pipeline, stages_per_rank=2), error=ConfigError, says="the others 1"),
        RefusedOptions(
            make=partial(Pipeline, stages_per_rank=1, schedule="interleaved"),
            error=ConfigError,
            says=r"has 2 or more stages",
        ),
        RefusedOptions(
            make=partial(Pipeline, num_microbatches=0), error=ConfigError, says=r"num_microbatches=0 is below 1"
        ),
        RefusedOptions(
            make=Pipeline,
            context=replace(TWO_DEVICES, topology=Topology(1, 2, 0, 2)),
            error=TopologyError,
            says="one device each",
        ),
        RefusedOptions(
            make=Pipeline, context=gpus(procs=2, backend="gloo"), error=TopologyError, says="backend=gloo can't"
        ),
    ],
)
def test_options_that_cannot_be(case: RefusedOptions) -> None:
    with pytest.raises(case.error, match=case.says):
        case.make(context=case.context)


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


class RefusedModel(NamedTuple):
    make: Make
    model: nn.Module
    error: type[FrameworkError]
    says: str


@pytest.mark.parametrize(
    "case",
    [
        *(
            RefusedModel(make=make, model=FROZEN, error=ConfigError, says="no parameter of Linear requires")
            for make in (DDP, AllReduce, LocalSGD)
        ),
        *(
            RefusedModel(
                make=make,
                model=SPARSE,
                error=ConfigError,
                says=rf"strategy={name} .* there is a sparse one: 1\.weight\.\nMake it dense",
            )
            for name, make in DENSE_ONLY.items()
        ),
        RefusedModel(
            make=partial(FSDP, wrap=["Lineer"]),
            model=HOLDER,
            error=ConfigError,
            says=r"of the class Lineer\.\nIt has Linear",
        ),
        RefusedModel(
            make=partial(FSDP, wrap=["ModuleList"]),
            model=HOLDER,
            error=ConfigError,
            says="ModuleList only holds other modules",
        ),
        RefusedModel(
            make=STAGES,
            model=Net(lambda net: [net.first, "last"]),
            error=TargetError,
            says="must return 2 modules, and returned 2: Linear",
        ),
        RefusedModel(
            make=STAGES,
            model=Net(lambda net: [net.first, net.last]),
            error=TargetError,
            says=r"Look at norm\.weight, norm\.bias",
        ),
        RefusedModel(
            make=STAGES,
            model=Net(lambda net: [nn.Sequential(half(net), net.last), net.last]),
            error=TargetError,
            says=r"Look at last\.weight",
        ),
        RefusedModel(
            make=STAGES,
            model=Net(lambda net: [nn.ReLU(), nn.Sequential(half(net), net.last)]),
            error=ConfigError,
            says="no parameter to",
        ),
        RefusedModel(
            make=STAGES, model=Net(lambda net: [half(net), nn.Linear(3, 1)]), error=TargetError, says="not of copies"
        ),
        RefusedModel(
            make=STAGES,
            model=nn.Sequential(nn.Linear(1, 2), Counting()),
            error=ConfigError,
            says=r"isn't a tensor in .*: 1\._extra_state",
        ),
        RefusedModel(
            make=STAGES, model=Holds(), error=TargetError, says=r"can't cut Holds into 2 stages.*no method `stages`"
        ),
        RefusedModel(
            make=STAGES,
            model=nn.Sequential(nn.Linear(1, 1), nn.ReLU()),
            error=ConfigError,
            says=r"with 1 trained modules can't be cut into 2",
        ),
    ],
)
def test_models_that_cannot_be(case: RefusedModel) -> None:
    with pytest.raises(case.error, match=case.says):
        case.make(context=FOUR).wrap(case.model)


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
