"""What is wrong with metering at this moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnergyIssue:
    """Something wrong with metering, for the health board: a condition's code, its key, and what it says."""

    code: str
    key: str
    reason: str
    remedy: str


class IssueList:
    """The issues that hold now, by code and key."""

    def __init__(self) -> None:
        self._issues: dict[tuple[str, str], EnergyIssue] = {}

    def report(self, code: str, reason: str, remedy: str, *, key: str = "") -> None:
        """Say that something is wrong."""
        self._issues[code, key] = EnergyIssue(code, key, reason, remedy)

    def clear(self, code: str, key: str = "") -> None:
        """Say that it no longer is."""
        self._issues.pop((code, key), None)

    def all(self) -> tuple[EnergyIssue, ...]:
        """Return what is wrong now."""
        return tuple(self._issues.values())
