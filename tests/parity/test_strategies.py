"""Every way to average gradients against one process with the same global batches: 20 steps of the toy.

Those that add in the parameters' own type end at the same weights, but for the order of sums. Those that send shorter
numbers end where a plain loop does that rounds each rank's gradients as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from framework.data.batching import share
from tests.helpers import results
from tests.helpers.loops import toy_batches, toy_model

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
Train = Callable[..., Path]
Exchange = Callable[[Sequence[Tensor]], Tensor]  # the gradients of one parameter, of each rank

STEPS, LR = 20, 0.01
COMMAND = (
    *("recipe=toy", "logger=none", f"trainer.max_steps={STEPS}", "trainer.num_threads=1", f"optimizer.lr={LR}"),
    *("trainer.check_val_every_n_epoch=null", "checkpoint.monitor=null"),
)
SPREAD = ("strategy=fsdp", "strategy.min_num_params=50")
COPIES = ("strategy=hsdp", "strategy.min_num_params=50", "strategy.data_parallel_shard_degree=2")
BUTTERFLY_HOOK = ("strategy=ddp", "strategy.comm_hook=butterfly")


def mean(gradients: Sequence[Tensor]) -> Tensor:
    """Their mean; of one rank, itself."""
    return torch.stack(list(gradients)).mean(dim=0)


def plain(*, clip: float | None = None, ranks: int = 1, exchange: Exchange = mean) -> dict[str, Tensor]:
    """The weights after 20 steps of one process, which takes `ranks` parts of each batch of 20 one after another."""
    model = toy_model()
    parameters = list(model.parameters())
    optimizer = SGD(parameters, lr=LR)
    for inputs, targets in toy_batches(epochs=1, batches=STEPS):
        of_ranks = []
        for rank in range(ranks):
            own = list(share(len(inputs), rank=rank, world_size=ranks))
            loss = nn.functional.mse_loss(model(inputs[own]), targets[own]) * (len(own) * ranks / len(inputs))
            of_ranks.append(torch.autograd.grad(loss, parameters))
        for parameter, gradients in zip(parameters, zip(*of_ranks, strict=True), strict=True):
            parameter.grad = exchange(gradients)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("processes", "layers", "options"),
    [
        (2, 2, ("schedule=1f1b",)),
        pytest.param(2, 2, ("schedule=gpipe", "num_microbatches=3"), marks=pytest.mark.exhaustive),
        pytest.param(3, 3, ("schedule=1f1b",), marks=pytest.mark.exhaustive),
        pytest.param(3, 3, ("schedule=gpipe", "num_microbatches=1"), marks=pytest.mark.exhaustive),
        pytest.param(4, 4, ("schedule=1f1b",), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, ("schedule=1f1b", "num_stages=2"), marks=pytest.mark.exhaustive),
        pytest.param(4, 2, ("schedule=gpipe", "num_stages=2"), marks=pytest.mark.exhaustive),
        pytest.param(2, 4, ("schedule=interleaved",), marks=pytest.mark.exhaustive),
        pytest.param(4, 4, ("schedule=interleaved", "num_stages=4"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_stages_on_several_processes_end_as_layers_on_several_devices_of_one(
    train: Train, processes: int, layers: int, options: tuple[str, ...]
) -> None:
    """With clipping, by the norm of all stages; the model-parallel network of two layers is the toy."""
    more = ("trainer.gradient_clip_val=0.5", "recipe=toy_model_parallel", "data.global_batch_size=20")
    cut = ("strategy=pipeline", "topology=single_node", f"topology.procs_per_node={processes}")
    run = train(*COMMAND, *more, *cut, *(f"strategy.{option}" for option in options))
    if layers == 2:
        wanted = plain(clip=0.5)
    else:
        wanted = results.weights(train(*COMMAND, *more, f"topology.gpus_per_process={layers}"))
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_so_do_compiled_stages(train: Train, schedule: str) -> None:
    """Each by itself. Batches of 20 in 8 micro-batches: some have a row that is no sample."""
    more = ("trainer.gradient_clip_val=0.5", "recipe=toy_model_parallel", "data.global_batch_size=20")
    stages = ("strategy=pipeline", "topology=single_node", "topology.procs_per_node=2", "trainer.compile=default")
    run = train(*COMMAND, *more, *stages, f"strategy.schedule={schedule}")
    whole = train(*COMMAND, *more, f"topology.gpus_per_process={2 if schedule == '1f1b' else 4}")
    results.assert_same(results.weights(run), results.weights(whole), tolerance=1e-6)


def rounded(dtype: torch.dtype) -> Exchange:
    """Each rank's gradient is rounded and divided, and so is each sum of them, from the first rank on."""

    def exchange(gradients: Sequence[Tensor]) -> Tensor:
        first, *others = (gradient.to(dtype).div_(len(gradients)) for gradient in gradients)
        for other in others:
            first = first + other
        return first.float()

    return exchange


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (2, ("strategy=allreduce", "strategy.bucket_cap_mb=0")),
        (3, ("strategy=allreduce",)),
        (3, ("strategy=butterfly",)),
        (3, BUTTERFLY_HOOK),
        (3, SPREAD),
        pytest.param(4, COPIES, marks=pytest.mark.exhaustive),
        pytest.param(2, SPREAD, marks=pytest.mark.exhaustive),
        pytest.param(2, (*SPREAD, "trainer.activation_checkpointing=[Linear]"), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=ddp", "trainer.activation_checkpointing=[Linear]"), marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=butterfly",), marks=pytest.mark.exhaustive),
        pytest.param(2, BUTTERFLY_HOOK, marks=pytest.mark.exhaustive),
        pytest.param(2, ("strategy=ddp",), marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=ddp",), marks=pytest.mark.exhaustive),
        pytest.param(5, ("strategy=butterfly",), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_exact_ways_end_as_one_process(train: Train, processes: int, strategy: tuple[str, ...]) -> None:
    """Of 20 samples, 3 processes take 7, 7 and 6."""
    run = train(*COMMAND, *strategy, f"topology.procs_per_node={processes}", "data.global_batch_size=20")
    results.assert_same(results.weights(run), plain(), tolerance=1e-6)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (3, ("strategy=allreduce",)),
        (4, (*COPIES, "trainer.activation_checkpointing=[Linear]")),
        pytest.param(3, SPREAD, marks=pytest.mark.exhaustive),
        pytest.param(3, ("strategy=butterfly",), marks=pytest.mark.exhaustive),
        pytest.param(3, BUTTERFLY_HOOK, marks=pytest.mark.exhaustive),
        *(
            pytest.param(4 if how is COPIES else 3, (*how, "trainer.compile=default"), marks=pytest.mark.exhaustive)
            for how in (
                ("strategy=ddp",),
                BUTTERFLY_HOOK,
                ("strategy=allreduce",),
                ("strategy=butterfly",),
                SPREAD,
                COPIES,
            )
        ),
    ],
    ids=str,
)
def test_so_they_do_with_accumulation_and_clipping(train: Train, processes: int, options: tuple[str, ...]) -> None:
    clipped = ("trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2")
    run = train(*COMMAND, *options, *clipped, f"topology.procs_per_node={processes}", "data.global_batch_size=20")
    wanted = plain(clip=0.5)
    assert max((value - wanted[name]).abs().max().item() for name, value in plain().items()) > 1e-3
    results.assert_same(results.weights(run), wanted, tolerance=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=pytest.mark.exhaustive)]
)
def test_short_numbers_end_where_their_rule_does(train: Train, name: str, dtype: torch.dtype) -> None:
    hook = ("strategy=ddp", f"strategy.comm_hook={name}")
    run = train(*COMMAND, *hook, "topology.procs_per_node=2", "data.global_batch_size=20")
    results.assert_same(results.weights(run), plain(ranks=2, exchange=rounded(dtype)), tolerance=1e-6)
    off = max((value - results.weights(run)[key]).abs().max().item() for key, value in plain().items())
    assert off > 1e-5


def short_weights(*, ranks: int, reduce: torch.dtype) -> dict[str, Tensor]:
    """The weights after 20 steps of SGD where each computes with weights and inputs of bfloat16.

    Gradients of each rank are added in `reduce`, from the first rank on, and divided.
    """
    model = toy_model()
    parameters = dict(model.named_parameters())
    optimizer = SGD(parameters.values(), lr=LR)
    for inputs, targets in toy_batches(epochs=1, batches=STEPS):
        sums: list[Tensor] = []
        for rank in range(ranks):
            own = list(share(len(inputs), rank=rank, world_size=ranks))
            short = {name: each.detach().bfloat16().requires_grad_() for name, each in parameters.items()}
            output = torch.func.functional_call(model, short, inputs[own].bfloat16()).float()
            loss = nn.functional.mse_loss(output, targets[own]) * (len(own) * ranks / len(inputs))
            gradients = [each.to(reduce) for each in torch.autograd.grad(loss, list(short.values()))]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
        for parameter, total in zip(parameters.values(), sums, strict=True):
            parameter.grad = (total / ranks).float()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("reduce", "dtype"),
    [("bf16", torch.bfloat16), pytest.param("null", torch.float32, marks=pytest.mark.exhaustive)],
)
def test_short_weights_end_where_their_rule_does(train: Train, reduce: str, dtype: torch.dtype) -> None:
    """As a mean over ranks that is rounded; weights are kept and stepped in 32 bits."""
    policy = f"strategy.mp_policy={{param_dtype:bf16,reduce_dtype:{reduce}}}"
    run = train(*COMMAND, *SPREAD, policy, "topology.procs_per_node=2", "data.global_batch_size=20")
    results.assert_same(results.weights(run), short_weights(ranks=2, reduce=dtype), tolerance=1e-6)
    off = max((value - results.weights(run)[key]).abs().max().item() for key, value in plain().items())
    assert off > 1e-4


class LowRank:
    """PowerSGD of rank 1 with error feedback and warm start, as its paper has it, for the toy in one bucket.

    Gradients come from the last layer to the first, and biases, which are vectors, are averaged as they are.
    """

    def __init__(self, *, start: int) -> None:
        self.start, self.calls = start, 0
        self.errors: dict[int, list[Tensor]] = {}
        self.thin: dict[int, Tensor] = {}
        self.random = numpy.random.RandomState(0)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        number, step = self.calls % 4, self.calls // 4  # two weights and two biases
        self.calls += 1
        if gradients[0].ndim == 1 or step < self.start:
            return mean(gradients)
        if not self.thin:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.random.randint(1_000_000_000))
                self.thin = {2: torch.randn(10, 1), 0: torch.randn(10, 1)}
        errors = self.errors.get(number, [torch.zeros_like(each) for each in gradients])
        wanted = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        q = nn.functional.normalize(self.thin[number], dim=0)
        p = nn.functional.normalize(sum((each @ q for each in wanted), torch.zeros(())), dim=0)
        q = torch.stack([each.t() @ p for each in wanted]).mean(dim=0)
        self.thin[number] = q
        product = p @ q.t()
        self.errors[number] = [each - product for each in wanted]
        return product


def test_thin_matrices_end_where_their_rule_does(train: Train) -> None:
    hook = "strategy.comm_hook={powersgd:{start_powerSGD_iter:4,min_compression_rate:1}}"
    processes = ("topology.procs_per_node=2", "data.global_batch_size=20")
    run = train(*COMMAND, "strategy=ddp", hook, *processes)
    wanted = plain(ranks=2, exchange=LowRank(start=4))
    results.assert_same(results.weights(run), wanted, tolerance=1e-5)
    assert max((value - wanted[name]).abs().max().item() for name, value in plain().items()) > 1e-3
