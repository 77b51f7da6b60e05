"""What a strategy can't do is refused when it is made or when it gets the model, before ranks exchange anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.errors import ConfigError, FrameworkError, TargetError, TopologyError
from framework.strategies import DDP, FSDP, AllReduce, Butterfly, LocalSGD, Pipeline, Single, auto
from framework.topology import Topology
from framework.types import Strategy
from tests.helpers.contexts import cpu_context

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
        (Single, FOUR, TopologyError, r"strategy=ddp \(or auto\), or topology\.procs_per_node=1"),
        (partial(auto, comm_hook="fp8"), FOUR, ConfigError, r"comm_hook=fp8.* one of fp16, bf16, butterfly, powersgd"),
        (powersgd(rank=2), FOUR, ConfigError, r"no option rank\. It takes matrix_approximation_rank"),
        (powersgd(start_powerSGD_iter=1), FOUR, ConfigError, r"start_powerSGD_iter=1 must be 2 or more"),
        (partial(powersgd(start_powerSGD_iter=2), static_graph=True), FOUR, ConfigError, r"=2 must be 3 or more"),
        (partial(DDP, comm_hook={"fp16": {"rank": 2}}), FOUR, ConfigError, "only powersgd has options"),
        (powersgd(), gpus(span=2), TopologyError, "one device each, and these have 2"),
        (partial(DDP, sync_batchnorm=True), FOUR, ConfigError, r"needs GPUs: .*\nUse strategy\.sync_batchnorm=false"),
        (partial(DDP, sync_batchnorm=True), gpus(span=2), TopologyError, r"these have 2\.\nUse topology\.gpus_per_pr"),
        (partial(AllReduce, bucket_cap_mb=-1), FOUR, ConfigError, r"strategy\.bucket_cap_mb=-1 must be 0"),
        (partial(Butterfly, bucket_cap_mb=float("nan")), FOUR, ConfigError, r"bucket_cap_mb=nan must be 0"),
        (partial(LocalSGD, every_n_steps=0), FOUR, ConfigError, r"strategy\.every_n_steps=0 must be 1 or more"),
        (partial(LocalSGD, warmup_steps=-1), FOUR, ConfigError, r"strategy\.warmup_steps=-1 must be 0"),
        (partial(LocalSGD, outer_lr=float("nan")), FOUR, ConfigError, r"strategy\.outer_lr=nan must be above 0"),
        (partial(LocalSGD, outer_lr=0.0), FOUR, ConfigError, r"strategy\.outer_lr=0\.0 must be above 0"),
        (partial(LocalSGD, outer_momentum=1.0), FOUR, ConfigError, r"strategy\.outer_momentum=1\.0 must be 0"),
        (partial(LocalSGD, outer_momentum=-0.1), FOUR, ConfigError, r"strategy\.outer_momentum=-0\.1 must be 0"),
        (partial(LocalSGD, nesterov=True), FOUR, ConfigError, r"strategy\.nesterov=true needs a momentum"),
        (FSDP, TWO_DEVICES, TopologyError, r"Use topology\.gpus_per_process=1"),
        (FSDP, gpus(procs=2, backend="gloo"), TopologyError, r"from GPU to GPU, which backend=gloo can't"),
        (partial(FSDP, wrap="Block"), FOUR, ConfigError, r"class names: strategy\.wrap=\[Block\]"),
        (partial(FSDP, wrap=[]), FOUR, ConfigError, r"strategy\.wrap=\[\]: must be auto, or a list"),
        (partial(FSDP, min_num_params=0), FOUR, ConfigError, r"strategy\.min_num_params=0 is below 1"),
        (partial(FSDP, mp_policy={"param_dtpye": "bf16"}), FOUR, ConfigError, r"Did you mean .*mp_policy\.param_dtype"),
        (partial(FSDP, mp_policy={"reduce_dtype": "bfloat16"}), FOUR, ConfigError, "one of fp32, bf16, fp16, or null"),
        (partial(FSDP, mp_policy=NO_MAPPING), FOUR, ConfigError, r"mp_policy=bf16: must be a mapping"),
        (partial(FSDP, cpu_offload=True), FOUR, ConfigError, r"compute on the CPU, where they are already"),
        (
            partial(FSDP, cpu_offload=True, data_parallel_shard_degree=2),
            gpus(procs=4),
            ConfigError,
            r"one copy of the model over all 4 processes, and here each 2 have one",
        ),
        *(
            (partial(FSDP, data_parallel_shard_degree=degree), FOUR, TopologyError, r"\nUse one of 1, 2, 4; auto")
            for degree in (3, 8, 0, True, "some")
        ),
        (partial(Pipeline, schedule="zb"), FOUR, ConfigError, r"schedule=zb: must be one of gpipe, 1f1b, interleaved"),
        (partial(Pipeline, num_stages=3), FOUR, TopologyError, r"takes 3 processes .* and 4 aren't a multiple"),
        (partial(Pipeline, num_stages=1), FOUR, ConfigError, r"num_stages=1 puts the whole model on one process"),
        (partial(Pipeline, num_stages=0), FOUR, ConfigError, r"num_stages=0 isn't a multiple"),
        (partial(Pipeline, num_stages=5, schedule="interleaved"), FOUR, ConfigError, r"of strategy\.stages_per_rank=2"),
        (partial(Pipeline, stages_per_rank=2), FOUR, ConfigError, r"schedule=1f1b has one stage on each rank"),
        (partial(Pipeline, stages_per_rank=1, schedule="interleaved"), FOUR, ConfigError, r"wants 2 or more stages"),
        (partial(Pipeline, num_microbatches=0), FOUR, ConfigError, r"num_microbatches=0 is below 1"),
        (partial(Pipeline, num_microbatches=3), FOUR, ConfigError, r"wants one for each of the 4 ranks"),
        (partial(Pipeline, num_microbatches=6, schedule="interleaved"), FOUR, ConfigError, r"num_microbatches=8"),
        (partial(Pipeline, bucket_cap_mb=-1), FOUR, ConfigError, r"strategy\.bucket_cap_mb=-1 must be 0"),
        (Pipeline, replace(TWO_DEVICES, topology=Topology(1, 2, 0, 2)), TopologyError, "one device each"),
        (Pipeline, gpus(procs=2, backend="gloo"), TopologyError, "backend=gloo can't"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(make: Make, context: Context, kind: type[FrameworkError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(context=context)


@pytest.mark.parametrize("make", [DDP, AllReduce, Butterfly, LocalSGD], ids=lambda value: value.__name__)
def test_a_model_with_nothing_to_train(make: Make) -> None:
    with pytest.raises(ConfigError, match="no parameter of Linear requires a gradient"):
        make(context=FOUR).wrap(nn.Linear(1, 1).requires_grad_(False))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("allreduce", AllReduce),
        ("butterfly", Butterfly),
        ("local_sgd", partial(LocalSGD, warmup_steps=1)),
        ("pipeline", partial(Pipeline, num_stages=2)),
        ("fsdp", FSDP),
        ("ddp with comm_hook=butterfly", partial(DDP, comm_hook="butterfly")),
        ("ddp with comm_hook=powersgd", partial(DDP, comm_hook="powersgd")),
    ],
)
def test_an_embedding_with_sparse_gradients(name: str, make: Make) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match=rf"strategy={name} .* there is a sparse one: 1\.weight\.\nMake it dense"):
        make(context=FOUR).wrap(model)


def test_sync_batchnorm_without_batchnorm() -> None:
    with pytest.raises(ConfigError, match="Linear has no BatchNorm"):
        DDP(context=gpus(), sync_batchnorm=True).wrap(nn.Linear(1, 1))


class Mixed(nn.Module):
    """With weights of two types, and one without dimensions."""

    def __init__(self, *, scalar: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float32 if scalar else torch.bfloat16)]
        )
        if scalar:
            self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "wrap", "message"),
    [
        (Mixed(scalar=True), "auto", r"without dimensions: scale\.\nGive it the shape \(1,\)"),
        (Mixed(scalar=False), "auto", r"layers\.0\.bias is float32, layers\.1\.bias is bfloat16"),
        (Mixed(scalar=False), ["Lineer"], r"no module of the class Lineer\.\nIt has Linear, ModuleList"),
        (Mixed(scalar=False), ["ModuleList"], "ModuleList only holds other modules"),
    ],
    ids=str,
)  # fmt: skip
def test_models_that_fsdp_cannot_shard(model: nn.Module, wrap: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FSDP(context=FOUR, wrap=wrap).wrap(model)


GO_TOGETHER = {
    Precision.FP32: ("fp32", "bf16"),
    Precision.BF16_MIXED: ("fp32", "bf16"),
    Precision.FP16_MIXED: ("fp32", "fp16"),
    Precision.BF16: ("bf16",),
    Precision.FP64: (),
}


@pytest.mark.parametrize("precision", list(Precision))
def test_number_formats_of_fsdp_that_do_not_go_with_a_precision(precision: Precision) -> None:
    for key in ("param_dtype", "reduce_dtype"):
        longer = ("fp32",) if (precision, key) == (Precision.BF16, "reduce_dtype") else ()
        for name in ("fp32", "bf16", "fp16"):
            strategy = FSDP(context=FOUR, mp_policy={key: name})
            if name in GO_TOGETHER[precision] + longer:
                strategy.check_precision(precision)
                continue
            with pytest.raises(ConfigError, match=rf"{key}={name} can't go with trainer\.precision={precision.value}"):
                strategy.check_precision(precision)
    FSDP(context=FOUR).check_precision(precision)


@pytest.mark.parametrize("make", [LocalSGD, partial(DDP, comm_hook="powersgd")])
def test_a_scaled_loss(make: Callable[..., LocalSGD | DDP]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)precision=16-mixed.*Use trainer\.precision=bf16-mixed"):
        make(context=FOUR).check_precision(Precision.FP16_MIXED)
    make(context=FOUR).check_precision(Precision.BF16_MIXED)


class Net(nn.Module):
    """Says itself how it is cut: by `way`."""

    def __init__(self, way: Callable[[Net], list[Any]]) -> None:
        super().__init__()
        self.way = way
        self.last, self.first, self.norm = nn.Linear(3, 1), nn.Linear(2, 3), nn.BatchNorm1d(3)

    def stages(self, number: int) -> list[Any]:
        return self.way(self)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(1, 1)])  # a module of that name is no method


class Own(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.table = inner, nn.Buffer(torch.ones(1))


class Counts(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError

    def forward(self, input: Tensor) -> Tensor:
        return input


def half(net: Net) -> nn.Module:
    return nn.Sequential(net.first, net.norm)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (Net(lambda net: [net.first]), TargetError, r"Net\.stages\(2\) must give 2 modules, and gave 1: Linear"),
        (Net(lambda net: [net.first, "last"]), TargetError, r"gave 2: Linear, str"),
        (Net(lambda net: [net.first, net.last]), TargetError, r"No stage of Net has norm\.weight, norm\.bias"),
        (Net(lambda net: [nn.Sequential(half(net), net.last), net.last]), ConfigError, r"share.*last\.weight in 0, 1"),
        (Net(lambda net: [nn.ReLU(), nn.Sequential(half(net), net.last)]), ConfigError, "no parameter to train"),
        (Net(lambda net: [half(net), nn.Linear(3, 1)]), TargetError, "aren't the model's own"),
        (Net(lambda net: [Own(half(net)), net.last]), TargetError, "aren't the model's own"),
        (Holds(), TargetError, r"can't cut Holds into 2 stages.*no method `stages`"),
        (nn.Sequential(Counts(1, 1), nn.Linear(1, 1)), ConfigError, r"something else: 0\._extra_state"),
        (nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ConfigError, r"with 1 trained modules can't be cut into 2 stages"),
    ],
)
def test_models_that_cannot_be_cut_into_stages(model: nn.Module, kind: type[FrameworkError], message: str) -> None:
    with pytest.raises(kind, match=message):
        Pipeline(context=cpu_context(world_size=2)).wrap(model)


def test_one_process_may_evaluate_a_pipeline_and_not_train_it() -> None:
    alone = Pipeline(context=cpu_context(), num_stages=4)
    assert (alone.data_share.rank, alone.data_share.world_size) == (0, 1)
    with pytest.raises(TopologyError, match="on several processes, and there is one"):
        alone.wrap(nn.Sequential(nn.Linear(1, 1)))
