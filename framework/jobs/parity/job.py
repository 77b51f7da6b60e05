"""`job=parity`: are the weights the same with one process and with several? If not, what differs first?

Three ordinary trainings of `parity.steps` optimizer steps run one after another, from the same seed, with the same
global batches, without dropout, validation or checkpoints: with `parity.processes` processes, with one, and again with
one from slightly moved weights, to measure how far rounding carries. The answer is printed, and written to parity.json
with these keys:

    recipe, processes, global_batch_size, precision
    same           if gradients, weights and buffers are the same but for rounding
    steps          how many were compared
    model          its class; dropouts: how many modules had their dropout switched off
    parts          layers, gradients, weights, buffers: how many are compared, and the greatest of their differences:
                   name, difference, allowed, rounding (measured), rank, step. Differences are shares of a tensor's size
    unsure         parameters that can't be compared, since rounding is as large as their gradients
    first_difference
                   null, or of the first step that differs: step (0: the start), layer (the first in the forward),
                   parts (how many differ, the first of them), shares (samples of each process), reason (see
                   `page.CAUSES`), module, factor, names

Exit status 0: the same; 1: not the same, or a training failed; 2: can't be compared. No torch here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.parse import parse
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.data.batching import plan_batches
from framework.errors import ConfigError, TopologyError
from framework.jobs.train import Train
from framework.launch.fork_server import call_in_child
from framework.remote.place import outputs_folder
from framework.system.formatting import display_path, format_count
from framework.system.hardware import count_gpus
from framework.system.run_dir import new_name, write_object

# The folder in each run directory that `recording` writes to.
_RECORDS = "parity"


class Parity(Job):
    """Compare trainings with one process and with several."""

    # The three trainings have ranks of their own.
    needs_ranks = False
    sweepable = False
    sections = ("parity",)

    def run(self, request: Request) -> JobResult:
        """Compare, print and write the answer. Raises FrameworkError for what can't be compared."""
        config = request.config
        topology, processes, batch_size = check_setup(request)
        folder = outputs_folder(config.path) / config.recipe / "parity" / new_name()
        steps = format_count(config.parity.steps, "step")
        print(f"Comparing {config.recipe} with 1 process and with {processes}: {steps} of {batch_size} samples")
        print(display_path(folder), flush=True)

        # Several processes first: more can go wrong with them.
        sides = {
            "many": folder / "processes" / str(processes),
            "one": folder / "processes" / "1",
            "moved": folder / "moved" / "1",
        }
        try:
            for side, sub_run in sides.items():
                of_side = training(
                    request,
                    topology,
                    processes=processes if side == "many" else 1,
                    global_batch_size=batch_size,
                    moves=side == "moved",
                )
                result = ParityTraining().run(replace(of_side, sub_run=sub_run))
                if result.status != 0:
                    print(f"\nNothing was compared: a training failed. Its logs are in {display_path(sub_run)}/logs")
                    return result

            run_dirs = {side: str(sub_run.resolve()) for side, sub_run in sides.items()}
            compared = call_in_child(
                request.fork_server,
                "framework.jobs.parity.comparison:compare",
                {"processes": processes, **run_dirs},
                timeout_s=config.backend.init_timeout,
            )
        finally:
            # The records may be large.
            for sub_run in sides.values():
                shutil.rmtree(sub_run / _RECORDS, ignore_errors=True)

        answer = {
            "recipe": config.recipe,
            "global_batch_size": batch_size,
            "precision": config.trainer.precision,
            **compared["answer"],
        }
        file = folder / "parity.json"
        write_object(file, answer)
        print(f"{compared['text']}\n\n  {display_path(file)}", flush=True)
        return JobResult(0 if answer["same"] else 1, results={**answer, "output": display_path(file)})


class ParityTraining(Train):
    """One of the trainings that are compared. It can't be resumed."""

    trains = False


def check_setup(request: Request) -> tuple[Topology, int, int]:
    """Return the run's topology, the number of processes to compare with one, and the global batch size.

    Raises FrameworkError for what can't be compared.
    """
    config = request.config
    if request.external_ranks is not None or config.topology.nnodes > 1:
        raise ConfigError(
            "job=parity compares on one machine, with processes of its own.\n"
            "Run the command once, without torchrun or srun, and with topology.nnodes=1."
        )
    topology = request.placement.topology
    processes = config.parity.processes or max(2, topology.world_size)

    plan = plan_batches(
        batch_size=config.data.train_batch_size,
        global_batch_size=config.data.global_batch_size,
        world_size=topology.world_size,
        accumulate=config.trainer.accumulate_grad_batches,
    )
    batch_size = plan.global_batch_size
    # Raises ConfigError for a batch that can't be split so.
    plan_batches(batch_size=1, global_batch_size=batch_size, world_size=processes, accumulate=plan.micro_batches)

    needed_gpus = processes * topology.span
    if topology.gpus_per_node and not config.topology.share_gpus and needed_gpus > count_gpus():
        raise TopologyError(
            f"{processes} processes of {topology.span} GPU(s) each need {needed_gpus} GPUs; there are {count_gpus()}.\n"
            "Use fewer (parity.processes), topology.share_gpus=true, or the CPU: trainer.gpus=0"
        )
    # Raises ConfigError, too, for a strategy whose processes can't be compared with one.
    several = training(request, topology, processes=processes, global_batch_size=batch_size, moves=False)
    ParityTraining().check(several)
    return topology, processes, batch_size


def training(request: Request, topology: Topology, *, processes: int, global_batch_size: int, moves: bool) -> Request:
    """Return one of the trainings: the user's, except for its length, its processes, and what only costs time.

    Schedules keep their length: the callback stops the training, once the ranks agree on it when they log.

    Args:
        moves: True: the initial weights are slightly moved.
    """
    gpus = 0
    if topology.gpus_per_node > 0:
        gpus = processes * topology.span
        if request.config.topology.share_gpus:
            gpus = min(gpus, topology.gpus_per_node)

    raw: dict[str, Any] = deepcopy(dict(request.raw))
    raw["data"] |= {"global_batch_size": global_batch_size}
    raw["topology"] |= {"procs_per_node": processes, "gpus_per_process": topology.span}
    raw["trainer"] |= {
        "gpus": gpus,
        "fast_dev_run": False,
        # It would choose other kernels for other shapes, and at random.
        "benchmark": False,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "limit_test_batches": 0,
    }
    raw["checkpoint"] |= {"enabled": False, "monitor": None}
    raw["logger"] = {}
    raw["launcher"] |= {"max_restarts": 0}
    raw["preflight"] |= {"enabled": False}
    recording = {
        "_target_": "framework.jobs.parity.recording.Recording",
        "steps": request.config.parity.steps,
        "precision": _coarsest_precision(request.config),
        "moves_weights": moves,
    }
    # The last one: others may change the model.
    raw["callbacks"] = {**raw["callbacks"], "parity_recording": recording}
    config: Config = parse(raw)
    return replace(request, config=config, raw=raw)


def _coarsest_precision(config: Config) -> str:
    """Return the precision that decides rounding: the trainer's, unless the strategy computes in a coarser one."""
    policy = config.strategy.get("mp_policy")
    if isinstance(policy, Mapping):
        coarser = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
        for dtype in policy.values():
            if dtype in coarser:
                return coarser[dtype]
    return config.trainer.precision
