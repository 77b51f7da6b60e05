"""`job=preflight`: can the processes of a run communicate, and how fast? Nothing is trained; no torch here.

The ranks start as for training, on all nodes and by any launcher. The result is printed, and written to preflight.json
in the run directory with these keys (seconds, bytes, bytes or operations per second; null: not known):

    recipe, backend, seconds (to measure in), took_s, max_bytes (of a buffer)
    passed, failures   each with check, text, value and limit (in the unit of its key)
    notes              list of strings
    ranks              rank, name, node, host, local_rank, devices (device, name), driver, versions, cores, threads,
                       free_disk_bytes, free_shm_bytes, data_root (null if none is configured; path, state),
                       interconnect (of the first rank of a node: what `nvidia-smi topo -m` prints), clock (ahead_s
                       of rank 0's, error_s), matmul (device, flops_per_s), barrier_s (the median of 20)
    links              those that were measured: ranks, nodes, kind, round_trips_s (ten), latency_s (half
                       of their median), bytes (of a large message), bytes_per_s (there and back together)
    num_links          kind ("within nodes", "between nodes") → how many there are
    checks             of each exchange: name, points, as far as time reached: size_bytes, bytes (the whole buffer),
                       repetitions, seconds (of one, of the slowest rank), algorithm_bytes_per_s, bus_bytes_per_s (as
                       in nccl-tests)
    faults             values that were wrong: check, rank, text
    slowest_link       one of links, with times_slower (than the median of its kind) and stands_out
    slowest_device     rank, device, flops_per_s, times_slower, stands_out

Exit status 0: passed; 1: a value was wrong, a limit was exceeded, or a rank didn't answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.schema import Config
from framework.jobs.preflight.report import RESULT, render, verdict
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir, read_object

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Preflight(Job):
    """Check and time the links of any number of processes."""

    def title(self, config: Config) -> str:
        return "Preflight of"

    def run(self, request: Request) -> JobResult:
        """Check and time. The exit status is 1 if a value was wrong or a limit was exceeded."""
        result = super().run(request)
        if result.status != 0 or result.run_dir is None:
            return result
        measured = read_object(result.run_dir.path / RESULT)
        if measured is None:
            return result

        if request.config.topology.node_rank > 0 and request.external_ranks is None:
            # The table is on the terminal of node 0.
            print(f"\n{verdict(measured)}", flush=True)
        return replace(result, status=0 if measured["passed"] else 1)

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.preflight.rank import preflight_rank

        preflight_rank(arguments, link)

    def document(self, request: Request, result: JobResult) -> dict[str, Any]:
        """Return the run's facts, with the content of preflight.json as its results."""
        from framework.command.document import document_of

        measured = None
        if result.run_dir is not None:
            measured = read_object(result.run_dir.path / RESULT)
        return document_of(request, result, results=measured)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        """Return the tables of what was measured."""
        path = display_path(run_dir.path)
        measured = read_object(run_dir.path / RESULT) if status == 0 else None
        if measured is None:
            return format_facts([("logs", f"{path}/logs")])
        return f"{render(measured)}\n\n  {path}/{RESULT}"
