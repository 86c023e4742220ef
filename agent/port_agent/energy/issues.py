"""The current problems of metering."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnergyIssue:
    """A problem of metering for the health board: a condition's code, its key, and the text."""

    code: str
    key: str
    reason: str
    remedy: str


class IssueList:
    """The current problems, by code and key."""

    def __init__(self) -> None:
        self._issues: dict[tuple[str, str], EnergyIssue] = {}

    def report(self, code: str, reason: str, remedy: str, *, key: str = "") -> None:
        """Report a problem."""
        self._issues[code, key] = EnergyIssue(code, key, reason, remedy)

    def clear(self, code: str, key: str = "") -> None:
        """Report that a problem no longer exists."""
        self._issues.pop((code, key), None)

    def all(self) -> tuple[EnergyIssue, ...]:
        """Return the current problems."""
        return tuple(self._issues.values())
