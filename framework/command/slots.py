"""The places for trials of a sweep on this machine: each has cores of its own and, if trials use GPUs, GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framework.config.topology import Topology
from framework.errors import ConfigError
from framework.system.formatting import format_count
from framework.system.hardware import available_memory, cpu_count, own_cores, visible_gpus

# What a process of a trial on the CPU is assumed to need, so that many cores don't fill little memory.
_BYTES_PER_PROCESS = 1 << 30


@dataclass(frozen=True)
class Slot:
    """A place for one trial."""

    # By number; empty: the trial isn't bound to cores.
    cores: frozenset[int]
    # Identifiers for CUDA_VISIBLE_DEVICES; empty: the trial sees those that this process sees.
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that trials in this place get."""
        if not self.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def make_slots(topologies: Sequence[Topology], *, count: int, jobs: int | None, share_gpus: int) -> list[Slot]:
    """Return the places for trials with these topologies. All are alike, and the largest trial fits into each.

    Args:
        count: of the trials that there are.
        jobs: `sweep.jobs`; None: as many as the machine has room for.
        share_gpus: how many trials may use the same GPU.

    Raises ConfigError if there isn't room for so many.
    """
    num_gpus = max(topology.gpus_per_node for topology in topologies)
    num_processes = max(topology.procs_per_node for topology in topologies)
    if num_gpus > 0:
        groups = _gpu_groups(num_gpus, share_gpus=share_gpus)
        room = len(groups)
        if jobs is not None and jobs > room:
            raise ConfigError(
                f"sweep.jobs={jobs}: trials of {format_count(num_gpus, 'GPU')} need {jobs * num_gpus} GPUs at "
                f"sweep.share_gpus=1, and this machine has room for {format_count(room, 'trial')} at a time.\n"
                f"Use sweep.jobs={room} or sweep.jobs=auto, fewer trainer.gpus, or a larger sweep.share_gpus."
            )
    else:
        if share_gpus > 1:
            raise ConfigError(
                f"sweep.share_gpus={share_gpus} is for trials on GPUs, and these run on the CPU. Leave it out, or set "
                "trainer.gpus."
            )
        groups = []
        room = _room_on_cpu(num_processes)

    count = min(count, room if jobs is None else jobs)
    cores = _split(sorted(own_cores()), count)
    slots = []
    for number in range(count):
        gpus = groups[number] if groups else ()
        slots.append(Slot(cores[number], gpus))
    return slots


def _gpu_groups(size: int, *, share_gpus: int) -> list[tuple[str, ...]]:
    """Return groups of `size` GPUs, each group `share_gpus` times; neighbours in the list are different groups."""
    uuids = [gpu.uuid for gpu in visible_gpus()]
    groups = [tuple(uuids[start : start + size]) for start in range(0, len(uuids) - size + 1, size)]
    return groups * share_gpus


def _room_on_cpu(num_processes: int) -> int:
    """Return how many trials of so many processes can run at a time with a core, and memory, for each process."""
    room = cpu_count() // num_processes
    memory = available_memory()
    if memory is not None:
        room = min(room, memory // (num_processes * _BYTES_PER_PROCESS))
    return max(1, room)


def _split(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    """Return the cores of each of `count` places: none for a single place, which may use all.

    With more places than cores, places share them.
    """
    if count == 1 or not cores:
        return [frozenset()] * count
    size = max(1, min(len(cores), cpu_count()) // count)
    split = []
    for number in range(count):
        start = number * size % len(cores)
        split.append(frozenset(cores[start : start + size]))
    return split
