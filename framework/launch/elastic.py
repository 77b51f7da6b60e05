"""The launcher for several nodes and for restarts: PyTorch's agent on each node decides, over ranks of the fork server.

On every node there is what the `local` launcher has, a parent without torch, a fork server and a keeper, and one more
child, the agent (see `agent`). The command is typed on every node. Node 0 composes, makes the run directory and hosts
the store at topology.rdzv_endpoint; the others compare what they were started with, and run their part of that.

After a failure the ranks of all nodes are ended, the agents meet again, and a new attempt goes on from the run's last
checkpoint, launcher.max_restarts times in the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import final

from framework.config.schema import InitMethod
from framework.errors import EXIT_RUN_FAILED, EXIT_WRONG_REQUEST, ConfigError, FrameworkError, LaunchError
from framework.launch.endpoint import LOOPBACK
from framework.launch.failure import Kind
from framework.launch.local import node_run
from framework.launch.node_run import NodeRun
from framework.launch.offer import Fingerprint, Offer, fingerprint
from framework.launch.panel import render
from framework.launch.plan import LaunchPlan, Outcome
from framework.launch.report import FailureReport
from framework.launch.site import Site
from framework.launch.warm import WarmServer
from framework.launch.wire import Channel, Message
from framework.run_dir import write_atomically

_MARGIN_S = 30.0  # for what an agent does besides waiting; it has time-outs of its own and tells of them


def launch(plan: LaunchPlan) -> Outcome:
    """Run the ranks of one machine, anew after failures. With several nodes, see `gathered`.

    Raises LaunchError when processes are lost, KeyboardInterrupt when the run is ended at once; no process is left.
    """
    with _company(Site.of(plan), warm=plan.warm, init_method=plan.init_method) as company:
        company.start_alone()
        return company.run(plan)


@contextmanager
def gathered(
    site: Site, *, warm: WarmServer | None, init_method: InitMethod, arguments: Sequence[str]
) -> Iterator[Company]:
    """This node's part of a run of several, once all have come and are found to have been started alike.

    arguments: of the command. Raises ConfigError where a node differs, RunError where one doesn't come in time; nothing
    was started then.
    """
    own = fingerprint(arguments, working_dir=Path.cwd())
    topology = site.topology
    told = f"{topology.procs_per_node} with {topology.gpus_per_node} GPUs"  # from each node's own GPUs, where left open
    own = replace(own, versions={**own.versions, "processes on a node:": told})
    with _company(site, warm=warm, init_method=init_method) as company:
        company.gather(own)
        yield company


@contextmanager
def _company(site: Site, *, warm: WarmServer | None, init_method: InitMethod) -> Iterator[Company]:
    with node_run(site, warm=warm, init_method=init_method) as run:
        company = Company(run)
        try:
            yield company
        finally:
            company.close()


@final
class Company:
    """The parent's side of an agent. offer: what node 0 wants run, on a further node that has gathered."""

    def __init__(self, run: NodeRun) -> None:
        self._run = run
        self._site = run.site
        self._agent, self._agent_end = Channel.pair()
        self._said: list[Message] = []  # by the agent, and not taken in yet
        self._told_well = False  # that the ranks here have done their work
        self._restarts = 0
        self.offer: Offer | None = None
        self.endpoint = run.site.endpoint

    def start_alone(self) -> None:
        """Start keeper and agent of a run on this machine alone."""
        self._run.start()
        self._start_agent((LOOPBACK, self._run.port), own=None)

    def gather(self, own: Fingerprint) -> None:
        """Start keeper and agent of a run on several nodes; see `gathered`."""
        site, endpoint = self._site, self._site.endpoint
        if endpoint is None:
            raise LaunchError("Several nodes need topology.rdzv_endpoint=HOST:PORT.")
        if site.node == 0:
            self._run.start()
            self._run.say(
                f"Waiting for {site.topology.nnodes - 1} more of {site.topology.nnodes} nodes at {_shown(endpoint)}"
            )
            self._start_agent(endpoint, own=own)
            self._next("compared", timeout_s=site.limits.init_timeout_s)
        else:
            self._run.say(f"Waiting for node 0 at {_shown(endpoint)}")
            self._start_agent(endpoint, own=own)
            message = self._next("offered", timeout_s=3 * site.limits.init_timeout_s)  # for the store, then the others
            self.offer = Offer.from_plain(message["offer"])
            self._run.start()

    def run(self, plan: LaunchPlan) -> Outcome:
        """Run this node's ranks: attempt after attempt, until their work is done or nothing is to be started anew.

        Raises LaunchError when processes or nodes are lost, KeyboardInterrupt when the run is ended at once.
        """
        hands_on = self._site.node == 0 and self._site.topology.nnodes > 1
        offer = asdict(_offer(plan)) if hands_on else None
        self._agent.send({"op": "go", "run_dir": str(plan.run_dir.path), "offer": offer})
        failed: FailureReport | None = None
        while True:
            number = self._next_attempt(plan, failed)
            self._told_well = False
            outcome = self._run.attempt(plan, number, until=self._is_to_stop, elsewhere=self._others_are_done)
            if not self._goes_on(outcome, number):
                return replace(
                    outcome,
                    failure=None if outcome.failure is None else self._as_last(plan, outcome.failure),
                    late=tuple(self._run.late),
                    restarts=self._restarts,
                )
            failed = outcome.failure
            if failed is not None:
                self._run.say(render(failed))
                if self._site.topology.nnodes > 1:
                    self._run.say(f"Waiting up to {self._site.limits.init_timeout_s:g} s for all nodes to meet again")
            self._said = [message for message in self._said if message["event"] != "stop"]
            self._agent.send({"op": "ended", "well": False})

    def close(self) -> None:
        """End the agent."""
        self._agent_end.close()
        self._run.ignore(self._agent)
        with suppress(LaunchError):  # the fork server is gone, and its children with it
            self._run.kill("agent")
        self._agent.close()

    def _start_agent(self, store: tuple[str, int], *, own: Fingerprint | None) -> None:
        site = self._site
        arguments = {
            "node": site.node,
            "nnodes": site.topology.nnodes,
            "procs_per_node": site.topology.procs_per_node,
            "host": store[0],
            "port": store[1],
            "max_restarts": site.max_restarts,
            "init_timeout_s": site.limits.init_timeout_s,
            "exit_timeout_s": site.limits.timeout_s,
            "fingerprint": None if own is None else asdict(own),
        }
        self._run.listen(self._agent, self._on_agent)
        self._run.spawn("agent", "framework.launch.agent:agent_main", arguments, end=self._agent_end)

    def _on_agent(self) -> None:
        try:
            self._said += self._agent.receive_ready()
        except (EOFError, OSError) as error:
            self._run.ignore(self._agent)
            if not any(message["event"] == "over" for message in self._said):
                raise LaunchError("The agent of this run ended: the run can't go on.") from error

    def _next(self, event: str, *, timeout_s: float) -> Message:
        """What the agent says next, which is `event`. Raises what the agent says has happened instead."""
        if not self._run.wait_for(lambda: self._said, timeout_s=timeout_s + _MARGIN_S):
            node = self._site.node
            raise LaunchError(
                f"Node {node} wasn't let in within {timeout_s + _MARGIN_S:g} s. Was another one started with "
                f"topology.node_rank={node}, too?"
            )
        message = self._said.pop(0)
        if message["event"] == "over":
            raise _error(message)
        if message["event"] != event:
            raise LaunchError(f"The agent of this run said {message['event']}, not {event}.")
        return message

    def _next_attempt(self, plan: LaunchPlan, failed: FailureReport | None) -> int:
        """The number of the attempt to start now, said and recorded where it is a restart."""
        try:
            number: int = self._next("start", timeout_s=self._site.limits.init_timeout_s)["attempt"]
        except FrameworkError:
            if failed is not None and self._as_last(plan, failed) is not failed:
                self._run.say("Nothing was started anew; the report above is in failure.json now.")
            raise
        if number > 0:
            self._note_restart(plan, number, failed)
        return number

    def _note_restart(self, plan: LaunchPlan, number: int, failed: FailureReport | None) -> None:
        cause = "a node has come anew" if failed is None else _in_short(failed)
        self._run.say(f"Restart {number} of {self._site.max_restarts} after {cause}")
        self._restarts = number
        if self._site.node == 0:
            note = {"attempt": number, "cause": cause, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            with suppress(OSError):  # the disk refuses: the ranks will have more to say of that
                plan.run_dir.update_run({"restarts": [*plan.run_dir.read_run().get("restarts", []), note]})

    def _as_last(self, plan: LaunchPlan, report: FailureReport) -> FailureReport:
        """The report with the name of one after which nothing was started anew, where this node has written it."""
        node, attempt = self._site.node, report.attempt
        written = plan.run_dir.failure_of(node=node, attempt=attempt, is_last=False)
        if report.file != str(written):
            return report
        file = plan.run_dir.failure_of(node=node, attempt=attempt, is_last=True)
        renamed = replace(report, file=str(file))
        try:
            write_atomically(file, json.dumps(renamed.to_plain(), indent=2) + "\n")
            written.unlink()
        except OSError:
            return report
        return renamed

    def _is_to_stop(self) -> bool:
        return any(message["event"] == "stop" for message in self._said)

    def _others_are_done(self) -> bool:
        """Asked when the ranks here are: tells the agent, the first time, and awaits its word for all nodes."""
        if not self._told_well:
            self._told_well = True
            self._agent.send({"op": "ended", "well": True})
        over = next((message for message in self._said if message["event"] == "over"), None)
        if over is not None and over["status"] != 0:
            raise _error(over)
        return over is not None

    def _goes_on(self, outcome: Outcome, number: int) -> bool:
        """Whether there may be another attempt after this one."""
        if outcome.failure is None:
            return outcome.status == EXIT_RUN_FAILED  # ended by the agent, to meet anew
        is_final = number >= self._site.max_restarts or outcome.failure.first.is_final
        is_alone = (
            self._run.is_cut and self._site.node > 0
        )  # node 0 waits for this node; from here there is no way back
        return not (is_final or is_alone or self._run.stop_asked)


def _offer(plan: LaunchPlan) -> Offer:
    return Offer(
        entry=plan.entry,
        run_dir=str(plan.run_dir.path),
        topology=plan.topology,
        limits=plan.limits,
        config=plan.run_dir.config_file.read_text(),
        overrides=plan.run_dir.overrides_file.read_text(),
    )


def _error(over: Message) -> FrameworkError:
    text = over["text"] or "The agent of this run has given up: the run can't go on."
    return ConfigError(text) if over["status"] == EXIT_WRONG_REQUEST else LaunchError(text)


def _in_short(report: FailureReport) -> str:
    first = report.first
    if first.kind is Kind.UNREACHABLE:
        return f"node {first.node} was out of reach"
    return f"rank {first.rank} of {report.world_size} (pid {first.pid}) failed: {first.cause}"


def _shown(endpoint: tuple[str, int]) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"
