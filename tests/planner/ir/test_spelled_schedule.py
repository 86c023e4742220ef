"""A schedule as text names the first number that differs."""

import pytest

from port_planner.ir.spelled_schedule import SpelledSchedule

TABLE = SpelledSchedule(({"lr": "0.1"}, {"lr": "0.2"}), (({}, {"lr": "0.2"}), ({"momentum": "0.9"}, {"lr": "0.3"})))


@pytest.mark.parametrize(
    ("groups", "update", "named"),
    [
        ([{"lr": 0.1}, {"lr": 0.2}], 0, ""),
        ([{"lr": 0.1, "n": 7}, {"lr": 0.2}], 0, ""),
        ([{"lr": 0.1}, {"lr": 0.3}], 0, "lr to 0.3, but to 0.2"),
        ([{"lr": 0.1, "momentum": 0.9}, {"lr": 0.3}], 1, ""),
        ([{"lr": 0.1}, {"lr": 0.3}], 1, "momentum to None, but to 0.9"),
        ([{"lr": 9.0}, {"lr": 9.0}], 2, ""),
    ],
)
def test_what_differs_from_the_table_is_named(groups: list[dict[str, float]], update: int, named: str) -> None:
    found = TABLE.difference(groups, update)
    assert (named in found) if named else not found
