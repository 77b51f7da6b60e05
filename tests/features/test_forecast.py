"""The memory that job=plan forecasts for a device, against that of real trainings on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.forecast import CASES, SHARDED_CASES, Case, measuring, read_peak
from tests.helpers.internals import Topology, compose, parse, plan_job_module, trace_step, with_workspaces
from tests.helpers.trust import trusting

pytestmark = pytest.mark.multiproc

ALWAYS = {"convolutions", "GPT, ddp, 2 accumulated"}


class PlannedError(Exception):
    """Carries what a plan is computed from."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@pytest.fixture
def forecast_peak(monkeypatch, own_state):
    """The peak that is forecast, without the other figures of a plan, in this process."""

    def call(_: object, __: str, arguments: Mapping[str, Any], **___: Any) -> None:
        raise PlannedError(arguments)

    def run(*overrides: str) -> int:
        monkeypatch.setattr(plan_job_module, "call_in_child", call)
        with pytest.raises(PlannedError) as caught:
            compose.main(["job=plan", *trusting(overrides)])
        arguments = caught.value.arguments
        topology = Topology(**arguments["topology"])
        trace = trace_step(parse(arguments["config"]), topology, backend=arguments["backend"])
        return with_workspaces(trace).peak().total_bytes

    return run


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in ALWAYS else pytest.mark.exhaustive, id=case.name) for case in CASES],
)
def test_the_forecast_is_within_one_percent_of_the_profiler(case: Case, train, forecast_peak, tmp_path):
    file = tmp_path / "peak.json"
    train(*case.arguments, "checkpoint=none", "logger=none", *measuring(file))
    assert forecast_peak(*case.arguments) == pytest.approx(read_peak(file), rel=0.01)


def test_shards_take_at_least_what_is_forecast(train, forecast_peak, tmp_path):
    # How much more is gathered ahead depends on gloo's threads.
    case = SHARDED_CASES[-1]
    file = tmp_path / "peak.json"
    train(*case.arguments, "checkpoint=none", "logger=none", *measuring(file))
    assert forecast_peak(*case.arguments) <= 1.01 * read_peak(file)
