"""`job=preflight`: can the processes of a run really talk, and how fast? Nothing is trained; no torch here.

The ranks start as for training, on all nodes and by any launcher. What is found is printed, and written to
preflight.json in the run directory with these keys (seconds, bytes, bytes or operations a second; null: not known):

    recipe, backend, seconds (to measure in), took_s
    passed, failures   each with check, text, value and limit (in the unit of its key)
    notes              list of texts
    ranks              rank, node, host, local_rank, devices (device, name), driver, versions, cores, threads,
                       free_disk_bytes, free_shm_bytes, data_root (null where none is configured; path, state), clock
                       (its node's: ahead_s of rank 0's, error_s), matmul (device, flops_per_s), turn (its number in the
                       ordered barrier), barrier_s (the median of 20), late_s (in them, after the first), late_sender
                       (of a receiver: source, posted_s until irecv came back, worked_s, total_s, overlapped)
    interconnects      node → what `nvidia-smi topo -m` prints
    links              of those that were measured: ranks, nodes, is_within_node, round_trips_s (ten), latency_s (half
                       of their median), points (bytes, seconds one way: of several sizes), bytes_per_s (there and back
                       together, the best of them), bytes (that size), compared_bytes_per_s and compared_bytes (at the
                       largest size that all links of its kind have measured)
    num_links          that there are to measure: within_node, between_nodes
    sizes              max_bytes, limited_by (null: preflight.max_bytes)
    checks             of each exchange: name, unsupported (null, or what the backend says), cut_at_bytes (the last
                       size, where time ended it), points: size_bytes, bytes (the whole buffer), repetitions, seconds
                       (of one, of the rank that took longest), algorithm_bytes_per_s, bus_bytes_per_s (as nccl-tests
                       has them)
    faults             values that were wrong: check, rank, text
    slowest_link       one of links, with times_slower (than the median of the others of its kind) and stands_out
    slow_nodes         nodes all of whose links to others are slow
    slowest_device     rank, device, flops_per_s, times_slower, stands_out

Status 0: passed; 1: a value was wrong, a limit of `preflight` is exceeded, or a rank didn't answer.
"""

from __future__ import annotations

import re
from dataclasses import replace

from framework.config.schema import Config
from framework.jobs.preflight_text import render
from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, check, run
from framework.jobs.summary import interruption_without_trace, short
from framework.preflight.wording import verdict
from framework.run_dir import RunDir, read_object

__all__ = ["check", "main"]

_ENTRY = "framework.preflight.running:preflight_rank"
_RESULT = "preflight.json"  # as `running` has it
_CHECK = re.compile(r"Preflight check (\S+) failed")


def main(request: Request) -> JobResult:
    """Check as asked, on any number of processes. Raises FrameworkError for what can't be done as asked."""
    done = run(request, entry=_ENTRY, words=Words("Preflight of", _closing, interruption_without_trace))
    found = None if done.status != 0 or done.run_dir is None else read_object(done.run_dir.path / _RESULT)
    if found is None:
        return done
    if request.config.topology.node_rank > 0 and request.leader is None:  # the table is on the terminal of node 0
        print(f"\n{verdict(found)}", flush=True)
    return replace(done, status=0 if found["passed"] else 1)


def _closing(_config: Config, run_dir: RunDir, status: int) -> str:
    """The table and the verdict, or at which check it ended."""
    path = short(run_dir.path)
    found = read_object(run_dir.path / _RESULT) if status == 0 else None
    if found is not None:
        return f"{render(found)}\n\n  {path}/{_RESULT}"
    name = _check_that_failed(run_dir)
    where = "" if name is None else f"\nThe preflight was at the check {name}."
    return f"{where}\n  {'logs':<12} {path}/logs"


def _check_that_failed(run_dir: RunDir) -> str | None:
    """As one of the ranks has said that waited for another, or lost it."""
    report = read_object(run_dir.failure_file)
    if report is None:
        return None
    said = [each["exception"] or "" for each in (report["first"], *report["others"])]
    return next((match[1] for match in map(_CHECK.search, said) if match), None)
