"""The idle baseline: a median of enough samples, known ones until then, one for each source."""

import statistics

import pytest

from port_agent.energy.attribution.timeline import Interval
from port_agent.energy.baseline import IdleBaseline, stored_baselines
from port_agent.energy.sources.power_source import Kind


def idle(watts: float | None, source: str = "ina3221") -> Interval:
    return Interval(0.0, 2.0, None if watts is None else 2.0 * watts, source, Kind.MEASURED)


def test_it_is_known_after_twenty_samples_and_a_peak_does_not_move_it() -> None:
    baseline = IdleBaseline()
    seen = [2.0 + 0.01 * i for i in range(19)] + [90.0]
    for i, watts in enumerate(seen):
        assert baseline.watts("ina3221") is None, i
        baseline.add(idle(watts))
    assert baseline.watts("ina3221") == statistics.median(seen)


def test_gaps_and_other_sources_are_left_out() -> None:
    baseline = IdleBaseline()
    for _ in range(30):
        baseline.add(idle(None))
        baseline.add(idle(5.0, "battery"))
    assert baseline.watts("ina3221") is None and baseline.watts("battery") == 5.0


def test_what_earlier_runs_knew_holds_until_it_is_measured_anew() -> None:
    baseline = IdleBaseline({"ina3221": 3.0})
    baseline.set_watts("estimated", 2.0)
    for _ in range(19):
        baseline.add(idle(4.0))
    assert baseline.known_watts() == {"ina3221": 3.0, "estimated": 2.0}
    baseline.add(idle(4.0))
    assert baseline.watts("ina3221") == 4.0


def test_old_samples_are_forgotten() -> None:
    baseline = IdleBaseline()
    for watts in [1.0] * 300 + [6.0] * 240:
        baseline.add(idle(watts))
    assert baseline.watts("ina3221") == 6.0


@pytest.mark.parametrize(
    ("content", "known"),
    [('{"rapl": 4}', {"rapl": 4.0}), (None, {}), ("{", {}), ('{"rapl": "four"}', {}), ("[4]", {})],
)
def test_baselines_of_an_earlier_run_are_kept_or_measured_again(content: str | None, known: dict[str, float]) -> None:
    assert stored_baselines(content) == known
