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

from framework.command.request import JobResult, Request
from framework.command.request import checked_placement as check
from framework.command.run_ranks import run
from framework.config.schema import Config
from framework.jobs.preflight.report import RESULT, render, verdict
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir, read_object

__all__ = ["check", "main"]


def main(request: Request) -> JobResult:
    """Check with any number of processes. Raises FrameworkError for what can't be started."""
    done = run(request, entry="framework.jobs.preflight.rank:preflight_rank", title="Preflight of", summary=_closing)
    found = None if done.status != 0 or done.run_dir is None else read_object(done.run_dir.path / RESULT)
    if found is None:
        return done
    if request.config.topology.node_rank > 0 and request.external_ranks is None:
        # The table is on the terminal of node 0.
        print(f"\n{verdict(found)}", flush=True)
    return replace(done, status=0 if found["passed"] else 1)


def _closing(_config: Config, run_dir: RunDir, status: int) -> str:
    path = display_path(run_dir.path)
    found = read_object(run_dir.path / RESULT) if status == 0 else None
    return format_facts([("logs", f"{path}/logs")]) if found is None else f"{render(found)}\n\n  {path}/{RESULT}"
