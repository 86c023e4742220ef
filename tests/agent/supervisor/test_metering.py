"""The meter's troubles on the health board."""

from port_agent.energy.issues import EnergyIssue
from port_agent.health.conditions import HealthBoard, Severity
from port_agent.supervisor.metering import report_issues
from port_agent.system.clock import SystemClock


def test_issues_come_and_go_on_the_board() -> None:
    board, clock = HealthBoard(), SystemClock()
    ledger = EnergyIssue("energy-ledger", "", "disk full", "free some space")
    report_issues([EnergyIssue("energy-source", "rapl", "may not be read", "run as root"), ledger], board, clock)
    worst, other = board.items(clock.monotonic_s())
    assert (worst.code, worst.severity, worst.remedy) == ("energy-ledger", Severity.ERROR, "free some space")
    assert (other.key, other.text) == ("rapl", "rapl: may not be read")
    report_issues([ledger], board, clock)
    assert [item.code for item in board.items(clock.monotonic_s())] == ["energy-ledger"]
    report_issues([], board, clock)
    assert board.items(clock.monotonic_s()) == []
