"""The page that a plan is shown as."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from framework.jobs.drawing import WIDTH
from framework.jobs.plan_text import render, sized

PLAN: dict[str, Any] = {
    "recipe": "some",
    "launcher": "elastic",
    "topology": {"nnodes": 2, "procs_per_node": 4, "gpus_per_node": 8, "span": 2},
    "backend": {"name": "nccl", "init_method": "env", "init_timeout_s": 300.0, "timeout_s": 90.0},
    "strategy": "DDP",
    "spread": False,
    "exchanges_every": 1,
    "spread_over": 1,
    "optimizer": "Adam",
    "batch": {
        "global": 100,
        "per_rank": {"least": 12, "most": 13},
        "per_forward": {"least": 6, "most": 7},
        "accumulate_grad_batches": 2,
        "num_microbatches": 1,
    },
    "data": {"train": 1600, "val": None, "test": 200, "streams": [], "source": "data"},
    "steps": {"per_epoch": 16, "total": 160, "max_epochs": 10, "max_steps": None},
    "model": {"name": "Net", "parameters": 1000, "trainable": 900},
    "memory": {"parameters": 4000, "gradients": 3600, "optimizer": 7200, "buffers": 0, "averages": 0},
    "traffic": {"reduced": 3600, "ring_per_rank": 6300},
    "checkpoint": 123_456,
    "run_dir": "outputs/some/<date>_<time>_<4 hex>",
    "environment": {"common": {"WORLD_SIZE": "8"}, "first_rank": {"RANK": "0"}, "last_rank": {"RANK": "7"}},
    "commands": {
        "framework": ["python", "-m", "framework", "a=1"],
        "torchrun": ["torchrun", "-m", "framework", "a=1"],
        "srun": ["srun", "python", "-m", "framework", "a=1"],
    },
    "notes": [],
}


def page(**changes: Any) -> list[str]:
    plan = copy.deepcopy(PLAN)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            plan[section][name] = value
        else:
            plan[section] = value
    return render(plan).splitlines()


def row(name: str, **changes: Any) -> str:
    (found,) = [line for line in page(**changes) if line.startswith(f"  {name} ")]
    return found.removeprefix(f"  {name}").strip()


def test_every_number_is_on_the_page() -> None:
    assert page()[0] == "Plan of some: 2 nodes × 4 processes = 8 ranks; 8 GPUs a node, 2 for each rank"
    assert row("backend") == "nccl, meeting by env; set-up within 5 min, then 90 s a collective"
    assert row("strategy").startswith("DDP, 8 model-parallel replicas: the model places itself on the 2 devices")
    assert row("samples") == "1,600 to train with, 200 to test"
    assert row("batch") == "12 or 13 on each rank in 2 passes of 6 or 7, 100 global"
    assert row("steps") == "16 an epoch, 160 in all (trainer.max_epochs=10)"
    assert row("model") == "Net, 1,000 parameters, 900 trainable"
    assert row("on each rank").startswith("14.8 kB = parameters 4.00 kB + gradients 3.60 kB + optimizer (Adam) 7.20 kB")
    assert row("reduced a step") == "3.60 kB of gradients; in a ring each rank sends and receives 6.30 kB"
    assert row("checkpoint") == "about 123 kB"
    assert row("run directory") == PLAN["run_dir"]
    assert [row("rank 0"), row("rank 7")] == ["RANK=0", "RANK=7"]
    assert "Start it on each node, with its number (0, 1) for NODE" in page()


def test_what_is_exchanged_every_few_steps_are_weights() -> None:
    assert row("reduced a step").startswith("3.60 kB of gradients; in a ring each rank sends and receives 6.30 kB")
    assert "3.60 kB of weights, exchanged every 9 steps; in" in row("reduced a step", exchanges_every=9)


def test_a_spread_model_is_one() -> None:
    spread = {"strategy": "FSDP", "spread": True}
    assert row("strategy", **spread, spread_over=8) == "FSDP, one copy of the model, spread over 8 ranks"
    assert row("strategy", **spread, spread_over=2) == "FSDP, 4 copies of the model, each spread over 2 ranks"


def test_what_is_not_known_is_said() -> None:
    unknown: dict[str, Any] = {"train": None, "val": None, "test": None, "streams": [], "source": None}
    assert row("samples", data=unknown) == "unknown, the data isn't here"
    assert row("steps", steps__per_epoch=None, steps__total=None) == "unknown an epoch (trainer.max_epochs=10)"
    assert row("on each rank", memory__optimizer=None).startswith("at least 7.60 kB = ")
    assert row("checkpoint", memory__optimizer=None, checkpoint=None) == "of unknown size"
    assert page(notes=["it is so"])[-1] == "Note: it is so"


def test_other_cases_have_their_words() -> None:
    alone = {"nnodes": 1, "procs_per_node": 1, "gpus_per_node": 0, "span": 1}
    assert page(topology=alone)[0] == "Plan of some: 1 node × 1 process = 1 rank on the CPU"
    assert "Start it" in page(topology=alone)
    assert row("reduced a step", traffic__reduced=0) == "nothing, there is one rank"
    assert row("checkpoint", checkpoint=None) == "none is saved"
    assert row("samples", data__source="plan.train_samples").endswith("(plan.train_samples)")
    shared = {"nnodes": 1, "procs_per_node": 2, "gpus_per_node": 1, "span": 1}
    assert page(topology=shared)[0].endswith("1 GPU a node (shared), 1 for each rank")
    assert row("backend", topology=shared, backend__name="gloo").startswith("gloo, as GPUs are shared")
    empty: dict[str, dict[str, str]] = {"common": {}, "first_rank": {}, "last_rank": {}}
    assert "Environment of the rank: this command's own, it is this process" in page(environment=empty)


def test_no_line_is_wider_than_the_page_and_long_commands_go_on() -> None:
    words = ["python", "-m", "framework", *(f"some.key.of.the.configuration={number}" for number in range(20))]
    lines = page(commands={"framework": words, "torchrun": words, "srun": words})
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    command = text[text.index("  python -m framework") : text.index("\nor with torchrun")]
    assert command.replace("\\\n", "").split() == words


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (99_949, "99.9 kB"), (999_499, "999 kB")),
        *((999_500, "1.00 MB"), (4_805_000, "4.80 MB"), (123_456_789_000, "123 GB"), (5 * 10**18, "5000 PB")),
    ],
)
def test_sizes_have_three_digits(number: int, text: str) -> None:
    assert sized(number) == text
