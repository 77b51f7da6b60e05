"""What jobs print at their end: the facts that a person needs, wherever they are on the page."""

from __future__ import annotations

import copy
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.jobs import plan_text
from framework.jobs.drawing import WIDTH, draw, numbers
from framework.topology import Topology


def flat(text: str) -> str:
    """The text with its words one space apart."""
    return " ".join(text.split())


# job=plan: the map of ranks

TOPOLOGIES = st.builds(
    Topology,
    nnodes=st.integers(1, 3000),
    procs_per_node=st.integers(1, 600),
    gpus_per_node=st.just(0) | st.integers(1, 600),
    span=st.integers(1, 9),
)


def cells(drawn: str, label: str) -> list[list[str]]:
    """The cells of each row with that label."""
    rows = re.findall(rf"^    {label} *│(.*)│$", drawn, re.MULTILINE)
    return [[cell.strip() for cell in row.split("│")] for row in rows]


def test_a_map_shows_ranks_local_ranks_and_gpus_of_each_node() -> None:
    drawn = draw(Topology(nnodes=2, procs_per_node=2, gpus_per_node=4, span=2))
    assert cells(drawn, "rank") == [["0", "1"], ["2", "3"]]
    assert cells(drawn, "local rank") == [["0", "1"]] * 2
    assert cells(drawn, "GPU") == [["0, 1", "2, 3"]] * 2
    assert cells(draw(Topology(1, 4, 3, 2)), "GPU") == [["0, 1", "2, 0", "1, 2", "0, 1"]]
    assert cells(draw(Topology(1, 1, 8, 8)), "GPU") == [["0–7"]]
    assert cells(draw(Topology(1, 2, 0, 1)), "device") == [["CPU", "CPU"]]
    assert cells(draw(Topology(1, 1, 0, 2)), "device") == [["2 × CPU"]]


@given(TOPOLOGIES)
def test_a_map_fits_a_page_and_has_every_rank(topology: Topology) -> None:
    drawn = draw(topology)
    assert len(drawn.splitlines()) <= 60
    assert max(map(len, drawn.splitlines())) <= WIDTH
    shown = [cell for row in cells(drawn, "rank") for cell in row]
    alike = re.search(r"ranks (\d+)–(\d+)", drawn)
    condensed = range(int(alike[1]), int(alike[2]) + 1) if alike else range(0)
    ranks = [int(cell) for cell in shown if cell != "…"]
    assert (ranks[0], ranks[-1]) == (0, topology.world_size - 1)
    if "…" not in shown:
        assert sorted([*ranks, *condensed]) == list(topology.ranks())


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([3], "3"), ([3, 4], "3, 4"), ([3, 4, 5], "3–5"), ([2, 0, 1], "2, 0, 1")]
)
def test_consecutive_numbers_are_shown_as_a_range(values: list[int], text: str) -> None:
    assert numbers(values) == text


# job=plan: the page

PLAN: dict[str, Any] = {
    **{"recipe": "some", "launcher": "elastic", "strategy": "DDP", "optimizer": "Adam", "notes": []},
    **{"spread": False, "spread_over": 1, "exchanges_every": 1},
    "topology": {"nnodes": 2, "procs_per_node": 4, "gpus_per_node": 8, "span": 2},
    "backend": {"name": "nccl", "init_method": "env", "init_timeout_s": 300.0, "timeout_s": 90.0},
    "batch": {
        **{"global": 100, "accumulate_grad_batches": 2, "num_microbatches": 1},
        **{"per_rank": {"least": 12, "most": 13}, "per_forward": {"least": 6, "most": 7}},
    },
    "data": {"train": 1600, "val": None, "test": 200, "streams": [], "source": "data"},
    "steps": {"per_epoch": 16, "total": 160, "max_epochs": 10, "max_steps": None},
    "model": {"name": "Net", "parameters": 1000, "trainable": 900},
    "memory": {"parameters": 4000, "gradients": 3600, "optimizer": 7200, "buffers": 0, "averages": 0},
    "traffic": {"reduced": 3600, "ring_per_rank": 6300},
    **{"checkpoint": 123_456, "run_dir": "outputs/some/<date>_<time>_<4 hex>"},
    "environment": {"common": {"WORLD_SIZE": "8"}, "first_rank": {"RANK": "0"}, "last_rank": {"RANK": "7"}},
    "commands": {name: [name, "-m", "framework", "a=1"] for name in ("framework", "torchrun", "srun")},
}
ALONE = {"nnodes": 1, "procs_per_node": 1, "gpus_per_node": 0, "span": 1}
SHARED = {"nnodes": 1, "procs_per_node": 2, "gpus_per_node": 1, "span": 1}
SPREAD = {"strategy": "FSDP", "spread": True}
UNKNOWN: dict[str, Any] = {"train": None, "val": None, "test": None, "streams": [], "source": None}


def page(**changes: Any) -> str:
    """changes: values of the plan; `section__name` puts one into a section."""
    plan = copy.deepcopy(PLAN)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            plan[section][name] = value
        else:
            plan[section] = value
    return plan_text.render(plan)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {},
            [
                "2 nodes × 4 processes = 8 ranks",
                *("8 GPUs a node, 2 for each rank", "nccl", "5 min", "90 s", "DDP, 8 model-parallel replicas"),
                *("1,600 to train", "200 to test", "12 or 13 on each rank in 2 passes of 6 or 7, 100 global"),
                *("16 an epoch, 160 in all (trainer.max_epochs=10)", "1,000 parameters, 900 trainable"),
                "14.8 kB = parameters 4.00 kB + gradients 3.60 kB + optimizer (Adam) 7.20 kB",
                *("3.60 kB of gradients", "sends and receives 6.30 kB", "about 123 kB", PLAN["run_dir"]),
                *("RANK=0", "RANK=7", "(0, 1) for NODE", "framework -m framework a=1", "torchrun -m framework a=1"),
            ],
        ),
        ({"exchanges_every": 9}, ["3.60 kB of weights, exchanged every 9 steps"]),
        ({**SPREAD, "spread_over": 8}, ["one copy of the model, spread over 8 ranks"]),
        ({**SPREAD, "spread_over": 2}, ["4 copies of the model, each spread over 2 ranks"]),
        ({"data": UNKNOWN}, ["unknown, the data isn't here"]),
        ({"steps__per_epoch": None, "steps__total": None}, ["unknown an epoch"]),
        ({"memory__optimizer": None, "checkpoint": None}, ["at least 7.60 kB = ", "of unknown size"]),
        ({"notes": ["it is so"]}, ["Note: it is so"]),
        ({"topology": ALONE, "traffic__reduced": 0}, ["1 node × 1 process = 1 rank on the CPU", "there is one rank"]),
        ({"checkpoint": None}, ["none is saved"]),
        ({"data__source": "plan.train_samples"}, ["(plan.train_samples)"]),
        ({"topology": SHARED, "backend__name": "gloo"}, ["1 GPU a node (shared), 1 for each rank", "GPUs are shared"]),
        ({"environment": {"common": {}, "first_rank": {}, "last_rank": {}}}, ["it is this process"]),
    ],
)
def test_facts_of_a_plan(changes: dict[str, Any], facts: list[str]) -> None:
    text = flat(page(**changes))
    assert [fact for fact in facts if fact not in text] == []


def test_long_commands_are_continued_on_the_next_line() -> None:
    words = ["python", "-m", "framework", *(f"some.key.of.the.configuration={number}" for number in range(20))]
    text = page(commands={"framework": words, "torchrun": words, "srun": words})
    assert max(map(len, text.splitlines())) <= WIDTH
    command = text[text.index("  python -m framework") :].split("\n\n")[0].split("\nor ")[0]
    assert shlex.split(command.replace("\\\n", "")) == words


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_994, "9.99 kB"), (99_949, "99.9 kB"), (999_499, "999 kB")),
        *((999_500, "1.00 MB"), (4_805_000, "4.80 MB"), (123_456_789_000, "123 GB"), (5 * 10**18, "5000 PB")),
    ],
)
def test_sizes_have_three_digits(number: int, text: str) -> None:
    assert plan_text.sized(number) == text
