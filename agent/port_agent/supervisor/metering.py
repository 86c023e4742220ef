"""Report problems of the energy meter on the health board."""

from collections.abc import Iterable

from port_agent.energy.issues import EnergyIssue
from port_agent.health.conditions import HealthBoard
from port_agent.system.clock import Clock

_CODES = ("energy-source", "energy-ledger", "energy-flash-wear")


def report_issues(issues: Iterable[EnergyIssue], health: HealthBoard, clock: Clock) -> None:
    """Report current problems, and clear those that are gone."""
    issues = list(issues)
    for issue in issues:
        health.report(
            issue.code,
            clock.monotonic_s(),
            clock.wall_s(),
            key=issue.key,
            source=issue.key,
            reason=issue.reason,
            cure=issue.remedy,
        )
    for code in _CODES:
        health.keep_only(code, {issue.key for issue in issues if issue.code == code})
