"""`job=parity`: does the model get the same weights from one process and from several? If not, what departs first?

Three ordinary trainings of `parity.steps` optimizer steps run one after another, from the same seed, with the same
global batches, without dropout, validation or checkpoints: with `parity.processes` processes, with one, and again with
one from weights that are moved by a little more than rounding does, to measure how far rounding carries. The answer
is printed, and written to parity.json with these keys:

    recipe, processes, global_batch_size, precision
    same           whether gradients, weights and buffers are the same but for rounding
    steps          compared; left_out: those in which the loss scaler skipped the optimizer
    model, dropouts        its class; how many modules had their dropout switched off
    unit, floor, moved_by  one rounding; what is always allowed; how much the weights were moved
    parts          layers, gradients, weights, buffers: how many are compared, and the greatest of their differences:
                   name, difference, allowed, rounding (measured), rank, step. Differences are shares of a tensor's size
    unsure         parameters whose gradient is rounding and nothing else, so that nothing can be said of them
    layer_alone    a layer that departs where gradients, weights and buffers don't; else null
    departure      null, or of the first step that departs: step (0: the beginning), layer (the first in the forward),
                   parts (of what depart how many, the first, the worst), shares (samples of each process), reason,
                   module, factor, names

Status 0: the same; 1: not the same, or a training failed; 2: can't be compared as asked. No torch here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework.config.parse import parse
from framework.config.schema import Config, Precision
from framework.data.batching import plan_batches
from framework.errors import ConfigError, TopologyError
from framework.hardware import count_gpus
from framework.jobs.choosing import checked_topology
from framework.jobs.parity_text import failed, heading, render
from framework.jobs.request import JobResult, Place, Request
from framework.jobs.running import Words, run
from framework.jobs.summary import closing_of_training, interruption_without_trace, short
from framework.launch.errand import ask
from framework.run_dir import new_name, write_atomically
from framework.topology import Topology

_ENTRY = "framework.engine:run_rank"
_ANSWER = "framework.parity.answering:answer"
_RECORDING = "framework.parity.recording.Recording"
_NOTES = "parity"  # in each run's directory; as `recording` has it
_RESULT = "parity.json"
_CALLBACK = "parity_recording"
_WORDS = Words("Comparing", closing_of_training, interruption_without_trace)  # said by this job itself, but the last


@dataclass(frozen=True)
class Setting:
    """What is compared with one process, and what both have in common. span: devices of a process; gpus: there are."""

    processes: int
    global_batch_size: int
    span: int
    gpus: int


def main(request: Request) -> JobResult:
    """Compare, print and write the answer. Raises FrameworkError for what can't be compared as asked."""
    setting = check_setting(request)
    folder = Path(request.config.path.outputs, request.config.recipe, "parity", new_name())
    runs = {  # several first: more can be wrong with it
        "many": Place(folder / "processes", setting.processes),
        "one": Place(folder / "processes", 1),
        "moved": Place(folder / "moved", 1),
    }
    print(heading(request.config, setting.processes, setting.global_batch_size), flush=True)
    print(short(folder), flush=True)
    with _without_notes(runs):
        for side, place in runs.items():
            result = run(training(request, setting, place=place, moves=side == "moved"), entry=_ENTRY, words=_WORDS)
            if result.status != 0:
                print(failed(place.number, setting.global_batch_size, short(place.folder / str(place.number))))
                return result
        answer = {
            "recipe": request.config.recipe,
            "processes": setting.processes,
            "global_batch_size": setting.global_batch_size,
            "precision": request.config.trainer.precision.value,
            **_compared(request, runs, setting),
        }
    write_atomically(folder / _RESULT, json.dumps(answer, indent=2) + "\n")
    print(render(answer), flush=True)
    print(f"\n  {short(folder / _RESULT)}", flush=True)
    return JobResult(0 if answer["same"] else 1)


def check(request: Request) -> Topology:
    """What can be found wrong before anything is made. Gives the topology with several processes."""
    setting = check_setting(request)
    return checked_topology(training(request, setting, place=Place(Path(), setting.processes), moves=False))


def check_setting(request: Request) -> Setting:
    """What to compare. Raises FrameworkError where it can't be compared as asked."""
    config = request.config
    if request.place is not None:
        raise ConfigError(
            "job=parity runs trainings of its own, so it can't go with a sweep (-m). Compare one of them."
        )
    if request.leader is not None:
        raise ConfigError(
            f"job=parity starts one process and several itself, and {request.leader.place.starter} has started these.\n"
            "Start the command once, without it."
        )
    if config.topology.nnodes > 1:
        raise ConfigError(
            f"job=parity compares on one machine, and topology.nnodes={config.topology.nnodes}.\n"
            "Use topology.nnodes=1: what depends on the number of processes does so on one machine too."
        )
    if config.launcher.name == "in_place":
        raise ConfigError("job=parity needs several processes, and launcher=in_place runs one. Use launcher=local.")
    topology = checked_topology(request)
    processes = config.parity.processes or (topology.world_size if topology.world_size > 1 else 2)
    plan = plan_batches(
        batch_size=config.data.batch_size,
        global_batch_size=config.data.global_batch_size,
        world_size=topology.world_size,
        accumulate=config.trainer.accumulate_grad_batches,
    )
    size = plan.global_batch_size
    plan_batches(batch_size=1, global_batch_size=size, world_size=processes, accumulate=plan.micro_batches)
    shares = config.topology.share_gpus
    gpus = count_gpus() if topology.gpus_per_node and not shares else topology.gpus_per_node
    needed = processes * topology.span
    if gpus and needed > gpus and not shares:
        fewer = f"Use parity.processes={gpus // topology.span}, or let" if gpus // topology.span > 1 else "Let"
        raise TopologyError(
            f"{processes} processes of {topology.span} GPU(s) each need {needed} GPUs; there are {gpus}.\n"
            f"{fewer} them share: topology.share_gpus=true topology.gpus_per_process={topology.span} backend=gloo;\n"
            "or compare on the CPU: trainer.gpus=0"
        )
    return Setting(processes, size, span=topology.span, gpus=gpus)


def training(request: Request, setting: Setting, *, place: Place, moves: bool) -> Request:
    """One of the trainings: the user's own but for its length, its processes, and what only costs time.

    The schedule keeps its length; the callback ends the training, once each step's log lets the ranks agree on it.
    """
    raw: dict[str, Any] = deepcopy(dict(request.raw))
    processes = place.number
    gpus = min(setting.gpus, processes * setting.span)
    raw["data"] |= {"global_batch_size": setting.global_batch_size}
    raw["topology"] |= {"procs_per_node": processes, "gpus_per_process": setting.span}
    raw["trainer"] |= {
        "gpus": gpus,
        "fast_dev_run": False,
        "benchmark": False,  # it would choose other kernels for other shapes, and at random
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "limit_test_batches": 0,
    }
    raw["checkpoint"] |= {"enabled": False, "monitor": None}
    raw["logger"] = {}
    raw["launcher"] |= {"max_restarts": 0}
    raw["preflight"] = False
    recording = {
        "_target_": _RECORDING,
        "steps": request.config.parity.steps,
        "precision": _coarsest(request.config),
        "moves_weights": moves,
    }
    raw["callbacks"] = {**raw["callbacks"], _CALLBACK: recording}  # the last: others may change the model
    config: Config = parse(raw)
    return replace(request, config=config, raw=raw, place=place)


def _coarsest(config: Config) -> str:
    """The precision whose rounding is the run's: that of the trainer, but where a strategy computes in less."""
    policy = config.strategy.get("mp_policy") or {}
    short = {"bf16": Precision.BF16_MIXED, "fp16": Precision.FP16_MIXED}
    found = [short[name] for name in policy.values() if name in short] if isinstance(policy, Mapping) else []
    return (found[0] if found else config.trainer.precision).value


def _compared(request: Request, runs: Mapping[str, Place], setting: Setting) -> dict[str, Any]:
    folders = {side: str((place.folder / str(place.number)).resolve()) for side, place in runs.items()}
    return ask(
        request.warm,
        _ANSWER,
        {**folders, "processes": setting.processes},
        timeout_s=request.config.backend.init_timeout,
    )


@contextmanager
def _without_notes(runs: Mapping[str, Place]) -> Iterator[None]:
    """Remove what the ranks noted, however the comparison ends: it may be large."""
    try:
        yield
    finally:
        for place in runs.values():
            shutil.rmtree(place.folder / str(place.number) / _NOTES, ignore_errors=True)
