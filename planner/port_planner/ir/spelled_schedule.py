"""A learning-rate schedule as text, to compare it with that of a program's scheduler in another process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def spelled_numbers(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return hyperparameters as text that is equal only for equal numbers."""
    return {key: repr(value) for key, value in numbers.items()}


@dataclass(frozen=True, slots=True)
class SpelledSchedule:
    """For each update and parameter group, the hyperparameters that change; `constant`: the learning rate of
    each group that does not.
    """

    constant: tuple[dict[str, str], ...] = ()
    rows: tuple[tuple[dict[str, str], ...], ...] = ()

    def difference(self, groups: Sequence[Mapping[str, Any]], update: int) -> str:
        """Return how the groups' hyperparameters before this update, counted from 0, differ; "" if they do not."""
        if update >= len(self.rows):
            return ""
        for group, constant, row in zip(groups, self.constant, self.rows[update], strict=True):
            now = spelled_numbers(group)
            for key, expected in (constant | row).items():
                if now.get(key) != expected:
                    return f"the scheduler sets {key} to {now.get(key)}, but to {expected} where no training runs"
        return ""


NO_SCHEDULE = SpelledSchedule()
