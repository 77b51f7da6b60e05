"""Injected faults: does job=why name their step, layer, rank and sample, and does job=replay give the same values?

    python -m benchmarks.faults --faults 200 --seed 0 [--kinds sample,layer] [--setups plain,stream] [--processes 1-3]

Each fault is drawn by its seed: a wrong value in a sample, a layer that explodes, a learning rate that is out of range
from a step on, a gradient of NaN on one rank, or one wrong value in what a layer returns. A run of 20 steps is trained
with it, which notes on each rank the samples, losses and weights. Then `job=why` looks for the fault. It is given the
run alone if that ended in NaN, else the step, or for a learning rate the name of the loss. `job=replay` repeats the
step, and what it shows must be what was noted, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import IterableDataset, TensorDataset

from benchmarks.arguments import some_of
from framework import Callback, Datasets, FitInfo, MicroBatchInfo, Objective, StepInfo, StepOutput, samplers
from framework.command import compose
from framework.distributed.context import Context
from framework.launch.fork_server import PRELOAD, ForkServer, OwnForkServer
from framework.system.formatting import format_table
from framework.system.run_dir import RunDir
from tests.helpers.recipes import write_recipe

_CASES = "tests.features.fault_cases"
_LIGHTNING_CASE = "tests.features.lightning_fault_case"
_STEPS = 20
_SAMPLES = 480
# The one that Fault changes in an activation.
_ROW = 3
# Values of the toy's data are far below.
_WRONG = 1e3
# Steps that job=replay shows.
_SHOWN = 3

KINDS = ("sample", "target", "layer", "learning_rate", "gradient", "activation")
VALUES = ("nan", "inf", "1e30")

# The 480 samples are 20 global batches.
_DATA = {"datasets": {"_target_": "benchmarks.faults.data", "num_samples": 600}, "global_batch_size": 24}
_TRAINING = {
    "data": _DATA,
    "trainer": {"max_epochs": None, "max_steps": _STEPS, "log_every_n_steps": 4, "limit_val_batches": 0},
    "checkpoint": {"monitor": None, "every_n_steps": 5, "every_n_epochs": None, "save_top_k": -1},
    "callbacks": {"notes": {"_target_": "benchmarks.faults.Notes"}},
}
RECIPES = {
    "fault": {
        **_TRAINING,
        "defaults": [{"override /model": "toy"}, {"override /task": "regression"}, {"override /logger": "jsonl"}],
    },
    "fault_of_rivals": {
        **_TRAINING,
        "defaults": [{"override /optimizer": None}, {"override /logger": "jsonl"}],
        "model": {"_target_": "benchmarks.faults.Rivals"},
        "task": {"_target_": "benchmarks.faults.Adversarial"},
        "optimizer": {
            "critic": {"_target_": "torch.optim.Adam", "params": "^critic", "lr": 0.001},
            "generator": {"_target_": "torch.optim.Adam", "lr": 0.001},
        },
    },
    "fault_of_lightning": {
        **_TRAINING,
        "defaults": [{"override /task": "lightning"}, {"override /logger": "jsonl"}],
        "model": {"_target_": f"{_LIGHTNING_CASE}.Lit", "inputs": 10, "outputs": 5},
    },
}


@dataclass(frozen=True)
class Setup:
    """How a run is trained."""

    recipe: str = "fault"
    overrides: tuple[str, ...] = ()
    layers: tuple[str, ...] = ("net1", "net2")
    is_swept: bool = False


SETUPS = {
    "plain": Setup(),
    "accumulated": Setup(overrides=("trainer.accumulate_grad_batches=2",)),
    "averaged": Setup(overrides=("callbacks=[ema]", "optimizer=adam")),
    "normalized": Setup(overrides=(f"model._target_={_CASES}.Normed",)),
    "sampler": Setup(overrides=("data.sampler={_target_:benchmarks.faults.weighted}",)),
    "stream": Setup(overrides=("+data.datasets.is_stream=true", "data.shuffle=false")),
    "objectives": Setup(recipe="fault_of_rivals", layers=("generator", "critic.0", "critic.2")),
    "lightning": Setup(recipe="fault_of_lightning", layers=("first", "second")),
    "trial": Setup(is_swept=True),
}


# What is trained


@final
class Stream(IterableDataset[Any]):
    """The samples of a dataset, one after another."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._samples)):
            yield self._samples[number]


def data(index: int = -1, value: float = 0.0, target: bool = False, is_stream: bool = False, **settings: Any) -> Any:
    """Return the toy recipe's data, with a wrong value in the sample with this index; -1: in none."""
    from recipes.toy import toy_regression
    from tests.features.fault_cases import poisoned

    datasets = toy_regression(**settings)
    if index >= 0:
        datasets = poisoned(index, value=value, target=target, **settings)
    if is_stream:
        return Datasets(Stream(datasets.train), datasets.val, datasets.test)
    return datasets


def weighted(dataset: Any) -> samplers.WeightedRandomSampler:
    """Return a sampler that takes every sample once, those with odd indices rather early."""
    weights = [1.0 + 2.0 * (index % 2) for index in range(len(dataset))]
    return samplers.WeightedRandomSampler(dataset, weights, replacement=False)


@final
class Rivals(nn.Module):
    """A generator of targets, and a critic that tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(10, 5)
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, part: str, x: Tensor, y: Tensor | None = None) -> Any:
        fake = self.generator(x)
        if part == "generator":
            return self.critic(fake)
        return self.critic(fake.detach()), self.critic(y)


@final
class Adversarial:
    """Each step trains the critic, then the generator."""

    def __init__(self) -> None:
        self.objectives = [
            Objective("critic", self.critic, optimizer="critic"),
            Objective("generator", self.generator, optimizer="generator"),
        ]

    def critic(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        fake, real = model("critic", x, y)
        scores = torch.cat([fake, real])
        is_real = torch.cat([torch.zeros_like(fake), torch.ones_like(real)])
        return StepOutput(binary_cross_entropy_with_logits(scores, is_real), len(x))

    def generator(self, model: nn.Module, batch: Any) -> StepOutput:
        x, _ = batch
        scores = model("generator", x)
        return StepOutput(binary_cross_entropy_with_logits(scores, torch.ones_like(scores)), len(x))

    validation_step = critic


@final
class Notes(Callback):
    """Notes what is trained in `notes/rank_N.jsonl` of the run directory, a line for each micro-batch and step."""

    def __init__(self, *, run_dir: RunDir, context: Context) -> None:
        self._rank = context.rank
        self._file = run_dir.path / "notes" / f"rank_{context.rank}.jsonl"

    def on_fit_start(self, info: FitInfo) -> None:
        self._file.parent.mkdir(exist_ok=True)
        self._model = info.model
        self._step = info.start_step + 1
        self._add_weights(info.start_step)

    def on_micro_batch_start(self, info: MicroBatchInfo) -> None:
        self._info = info

    def on_micro_batch_output(self, output: StepOutput) -> None:
        info = self._info
        assert info.indices is not None
        line = {
            "step": self._step,
            "rank": self._rank,
            "micro_batch": info.number,
            "objective": info.objective,
            "indices": info.indices.tolist(),
            "is_wrong": not all(bool((values.abs() < _WRONG).all()) for values in info.batch),
            "loss": _text(float(output.loss.detach())),
        }
        self._add(line)

    def on_train_step_end(self, info: StepInfo) -> None:
        self._step = info.step + 1
        self._add_weights(info.step)

    def _add_weights(self, step: int) -> None:
        norms = {}
        for name, weight in self._model.named_parameters():
            norms[name] = _text(float(torch.linalg.vector_norm(weight.detach())))
        self._add({"step": step, "weights": norms})

    def _add(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def _text(value: object) -> str:
    """Return a number, or the text that stands for one in replay.json, as a text that is equal if all bits are."""
    return repr(float(str(value)))


# The faults


@dataclass(frozen=True)
class Case:
    """A fault, in a run."""

    seed: int
    kind: str
    setup: str
    num_processes: int
    step: int
    layer: str
    # Where it is injected; of a sample, wherever it is trained.
    rank: int
    value: str
    index: int

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind} ({self.value}), {self.setup} on {self.num_processes}"

    def overrides(self) -> list[str]:
        """Return the arguments of the command that trains the run."""
        setup = SETUPS[self.setup]
        arguments = [
            f"recipe={setup.recipe}",
            "trainer.gpus=0",
            f"topology.procs_per_node={self.num_processes}",
            *setup.overrides,
        ]
        if setup.is_swept:
            arguments += ["-m", f"seed={self.seed},{self.seed + 1}"]
        else:
            arguments.append(f"seed={self.seed}")
        if self.kind in ("sample", "target"):
            is_target = str(self.kind == "target").lower()
            settings = {"index": self.index, "value": self.value, "target": is_target}
            return arguments + [f"+data.datasets.{key}={value}" for key, value in settings.items()]
        fault = {
            "_target_": f"{_CASES}.Fault",
            "kind": self.kind,
            "step": self.step,
            "layer": self.layer,
            "value": self.value,
        }
        if self.kind != "learning_rate":
            fault["rank"] = self.rank
        return arguments + [f"+callbacks.fault.{key}={value}" for key, value in fault.items()]


def draw(seed: int, *, kinds: Sequence[str], setups: Sequence[str], processes: tuple[int, int]) -> Case:
    """Return the case of a seed, always the same one."""
    choose = random.Random(seed)
    kind = choose.choice(list(kinds))
    setup = choose.choice(list(setups))
    num_processes = choose.randint(*processes)
    value = choose.choice(VALUES)
    if kind == "learning_rate":
        value = choose.choice(("1e10", "1e3"))
    if kind in ("layer", "gradient"):
        # The layer's output is multiplied until it is infinite.
        value = "nan"
    return Case(
        seed=seed,
        kind=kind,
        setup=setup,
        num_processes=num_processes,
        step=choose.randint(3, _STEPS - 2),
        layer=choose.choice(SETUPS[setup].layers),
        rank=choose.randrange(num_processes),
        value=value,
        index=choose.randrange(_SAMPLES),
    )


class Fact(NamedTuple):
    """What job=why should have named."""

    wanted: Any
    named: Any

    @property
    def is_right(self) -> bool:
        return bool(self.wanted == self.named)


@dataclass
class Result:
    case: Case
    # step, layer, rank and sample, as far as the fault has them.
    facts: dict[str, Fact] = field(default_factory=dict)
    # A line for each thing that went wrong: a command, or values that differ.
    errors: list[str] = field(default_factory=list)
    is_equal: bool = False

    @property
    def is_right(self) -> bool:
        return self.is_equal and not self.errors and all(fact.is_right for fact in self.facts.values())


@final
class Bench:
    """A working directory, and the fork server that ranks start from."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self._folder = folder
        self._server = server
        self._log = folder / "output.txt"
        for name, recipe in RECIPES.items():
            write_recipe(folder, name, recipe)

    def run(self, case: Case) -> Result:
        """Train a case, look for its fault, and judge the answers."""
        result = Result(case)
        try:
            self._judge(case, result)
        # Whatever it is, the other cases still have to be run.
        except Exception as error:
            result.errors.append(f"{type(error).__name__}: {error}")
        shutil.rmtree(self._folder / "outputs", ignore_errors=True)
        return result

    def _judge(self, case: Case, result: Result) -> None:
        self._command(*case.overrides())
        run = self._run_dir(case)
        notes = _notes(run)
        wanted = _wanted(case, notes)

        question = [f"run={run}"]
        has_failed = (run / "failure.json").exists()
        if not has_failed and case.kind == "learning_rate":
            name = "critic/loss" if case.setup == "objectives" else "loss"
            question.append(f"why.metric=train/{name}")
        elif not has_failed:
            question.append(f"why.step={wanted['step']}")
        self._command("job=why", *question)
        answer = self._answer("why")
        fault = answer.get("fault") or {}
        named = {**fault, "samples": sorted(sample["index"] for sample in fault.get("samples") or [])}
        for name, value in wanted.items():
            result.facts[name] = Fact(value, named.get(name))

        step = wanted["step"]
        num_shown = min(_SHOWN, step)
        status = self._command("job=replay", f"run={run}", f"step={step}", f"replay.steps={num_shown}")
        result.errors += _differences(notes, self._answer("replay").get("steps", []), last=step, num_shown=num_shown)
        if status != 0:
            result.errors.append(f"job=replay ended with {status}: {self._log.read_text()[-2000:]}")
        result.is_equal = not result.errors

    def _command(self, *arguments: str) -> int:
        """Run a command; what it prints goes to a file."""
        with _output_to(self._log):
            return compose.main(arguments, fork_server=self._server)

    def _run_dir(self, case: Case) -> Path:
        pattern = f"outputs/{SETUPS[case.setup].recipe}/*/notes"
        if SETUPS[case.setup].is_swept:
            pattern = "outputs/multirun/*/1/notes"
        found = list(self._folder.glob(pattern))
        if len(found) != 1:
            raise AssertionError(f"the run can't be trained: {self._log.read_text()[-2000:]}")
        return found[0].parent

    def _answer(self, job: str) -> dict[str, Any]:
        files = list(self._folder.glob(f"outputs/*/{job}/*/{job}.json"))
        if len(files) != 1:
            raise AssertionError(f"no answer of job={job}: {self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(files[0].read_text())
        return answer


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Write what this process prints, and those that it starts, to a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    stdout = os.dup(1)
    stderr = os.dup(2)
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for number in (descriptor, stdout, stderr):
            os.close(number)


def _notes(run: Path) -> list[dict[str, Any]]:
    """Return what the ranks have noted, rank 0's first."""
    lines = []
    for file in sorted(run.glob("notes/rank_*.jsonl")):
        lines += [json.loads(line) for line in file.read_text().splitlines()]
    return lines


def _wanted(case: Case, notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what job=why should name, by what was injected and noted."""
    if case.kind == "learning_rate":
        return {"step": case.step, "cause": case.kind}
    if case.kind in ("sample", "target"):
        wrong = [line for line in notes if line.get("is_wrong")]
        first = min(wrong, key=lambda line: line["step"])
        return {"step": first["step"], "rank": first["rank"], "samples": [case.index], "cause": "sample"}
    wanted = {"step": case.step, "rank": case.rank, "layer": case.layer, "cause": case.kind}
    if case.kind == "gradient":
        wanted["layer"] = f"{case.layer}.weight"
    if case.kind == "activation":
        here = (case.step, case.rank)
        lines = [line for line in notes if "indices" in line and (line["step"], line["rank"]) == here]
        wanted["samples"] = [lines[0]["indices"][_ROW]]
    return wanted


def _differences(
    notes: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], *, last: int, num_shown: int
) -> list[str]:
    """Return a line for each value that job=replay shows otherwise than the run had it."""
    numbers = [step["step"] for step in steps]
    if numbers != list(range(last - num_shown + 1, last + 1)):
        return [f"job=replay shows the steps {numbers}"]
    losses = {}
    weights = {}
    for line in notes:
        if "weights" in line:
            weights[line["step"]] = line["weights"]
        else:
            place = (line["step"], line["rank"], line["micro_batch"], line["objective"])
            losses[place] = (line["indices"], line["loss"])

    differences = []
    num_compared = 0
    for step in steps:
        number = step["step"]
        for micro in step["micro_batches"]:
            for output in micro["outputs"]:
                place = (number, micro["rank"], micro["micro_batch"], output["objective"])
                repeated = (micro["indices"], _text(output["loss"]))
                num_compared += 1
                if repeated != losses[place]:
                    differences.append(f"{place}: {repeated} instead of {losses[place]}")
        for weight in step["weights"]:
            before = weights[number - 1][weight["name"]]
            if _text(weight["norm"]) != before:
                differences.append(f"step {number}: {weight['name']} has norm {weight['norm']} instead of {before}")
    of_steps = [place for place in losses if last - num_shown < place[0] <= last]
    if num_compared != len(of_steps):
        differences.append(f"job=replay shows {num_compared} losses, and the run had {len(of_steps)}")
    return differences


# What is printed


def table(results: Sequence[Result], *, by: Callable[[Case], str], title: str) -> str:
    """Return how many of the faults of each group were named right."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(by(result.case), []).append(result)
    rows = [_row(name, group) for name, group in sorted(groups.items())]
    rows.append(_row("all", results))
    header = (title, "faults", "step", "layer", "rank", "sample", "cause", "replayed", "all right")
    return format_table([header, *rows])


def _row(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    cells = [name, str(len(results))]
    for fact in ("step", "layer", "rank", "samples", "cause"):
        named = [result.facts[fact].is_right for result in results if fact in result.facts]
        cells.append(f"{sum(named)}/{len(named)}" if named else "")
    cells.append(_share(result.is_equal for result in results))
    cells.append(_share(result.is_right for result in results))
    return tuple(cells)


def _share(values: Iterable[bool]) -> str:
    of_all = list(values)
    return f"{sum(of_all)}/{len(of_all)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if anything wasn't named right, or repeated otherwise."""
    asked = _arguments(argv)
    restrictions = (
        f"--kinds {','.join(asked.kinds)} --setups {','.join(asked.setups)} "
        f"--processes {'-'.join(map(str, asked.processes))}"
    )
    with _output_to(Path(os.devnull)):
        # What ranks print goes nowhere.
        server = OwnForkServer((*PRELOAD, _CASES, _LIGHTNING_CASE, "benchmarks.faults"))
    results = []
    start = Path.cwd()
    sys.path.insert(0, str(start))
    try:
        with tempfile.TemporaryDirectory(prefix="faults_") as name:
            os.chdir(name)
            bench = Bench(Path(name), server)
            for seed in range(asked.seed, asked.seed + asked.faults):
                case = draw(seed, kinds=asked.kinds, setups=asked.setups, processes=asked.processes)
                result = bench.run(case)
                results.append(result)
                _print(result, restrictions)
            os.chdir(start)
    finally:
        server.close()
    print(table(results, by=lambda case: case.kind, title="kind"))
    print(table(results, by=lambda case: case.setup, title="set-up"))
    return 0 if all(result.is_right for result in results) else 1


def _print(result: Result, restrictions: str) -> None:
    word = "right" if result.is_right else "WRONG"
    print(f"{word} {result.case}", flush=True)
    for name, fact in result.facts.items():
        if not fact.is_right:
            print(f"  {name}: {fact.named} instead of {fact.wanted}", flush=True)
    for error in result.errors:
        print(f"  {error}", flush=True)
    if not result.is_right:
        print(f"  python -m benchmarks.faults --faults 1 --seed {result.case.seed} {restrictions}", flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first fault; the next one has the next number")
    parser.add_argument(
        "--kinds", type=some_of(KINDS), default=list(KINDS), help=f"drawn from these: {','.join(KINDS)}"
    )
    parser.add_argument(
        "--setups", type=some_of(SETUPS), default=list(SETUPS), help=f"drawn from these: {','.join(SETUPS)}"
    )
    parser.add_argument("--processes", type=_range, default=(1, 3), help="how many ranks, from-to")
    return parser.parse_args(argv)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


if __name__ == "__main__":
    sys.exit(main())
