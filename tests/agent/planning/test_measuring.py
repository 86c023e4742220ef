"""What planning begins with, as the request says: steps to compare, what a step may write, the deadline
and the hours of charging.
"""

from dataclasses import replace
from datetime import datetime, time
from pathlib import Path
from typing import Any

import pytest

from port_agent.planning.measuring import compared_steps_of, limits_of
from port_agent.planning.request import PlanRequest
from port_planner.deadline import Pace
from tests.agent.jobs_small import make_job
from tests.planner.ir.lowering.small_graph import costs

CARD_ENDURANCE_BYTES = 1e12


def asked(**settings: Any) -> PlanRequest:
    return PlanRequest(script=Path("train.py"), out=Path("job.port"), ram_bytes=1 << 30, **settings)


def test_every_kind_of_step_is_compared_but_where_other_numbers_are_allowed() -> None:
    job = make_job(accumulate=3)
    assert compared_steps_of(asked(), job) == 4
    assert compared_steps_of(asked(compared_steps=2), job) == 2
    assert compared_steps_of(asked(compared_steps=2, reordered=True), job) == 0


@pytest.mark.parametrize(
    ("words", "endurance_bytes", "bytes_per_step"),
    [
        ({}, CARD_ENDURANCE_BYTES, None),
        ({"written_bytes_per_step": 20_000_000}, CARD_ENDURANCE_BYTES, 20_000_000),
        (
            {"flash_life_s": 1e6},
            CARD_ENDURANCE_BYTES,
            5_000_000,
        ),  # five operators of a second each, a million bytes a second
        ({"flash_life_s": 1e6}, None, None),
    ],
)
def test_what_a_step_may_write_is_said_or_follows_from_how_long_the_medium_is_to_last(
    words: dict[str, Any], endurance_bytes: float | None, bytes_per_step: int | None
) -> None:
    table = costs()
    flash = replace(table.device.flash, endurance_bytes=endurance_bytes)
    limits = limits_of(asked(**words), None, replace(table, device=replace(table.device, flash=flash)))
    assert limits.written_bytes == bytes_per_step
    assert limits.step_s is None and limits.deadline_at is None and limits.charging is None


def test_the_deadline_and_the_hours_of_charging_stand_in_the_limits() -> None:
    deadline = datetime(2030, 1, 2, 7).timestamp()
    words = asked(deadline_at=deadline, charging=(time(22), time(7)))
    limits = limits_of(words, Pace(available_s=3600.0, steps=1200, seconds_per_step=3.0), costs())
    assert limits.step_s == 3.0 and limits.deadline_at == deadline and limits.charging == ("22:00", "07:00")
