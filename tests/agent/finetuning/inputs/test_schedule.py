"""The rate rises in a line, and falls as it is asked for."""

import pytest

from port_agent.finetuning.inputs.schedule import RateSchedule, rate_share


@pytest.mark.parametrize("schedule", RateSchedule)
def test_it_rises_in_a_line_and_is_reached_once(schedule: RateSchedule) -> None:
    shares = [rate_share(schedule, update, 100, 0.1) for update in range(100)]
    assert shares[:10] == [(n + 1) / 10 for n in range(10)] and max(shares) == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True) and all(share > 0 for share in shares)


def test_each_falls_in_its_way() -> None:
    half = {schedule: rate_share(schedule, 55, 100, 0.1) for schedule in RateSchedule}
    assert half[RateSchedule.LINEAR] == 45 / 91 and half[RateSchedule.CONSTANT] == 1.0
    assert half[RateSchedule.COSINE] == pytest.approx(0.492, abs=1e-3)
    assert rate_share(RateSchedule.COSINE, 99, 100, 0.1) < rate_share(RateSchedule.LINEAR, 99, 100, 0.1) / 10
    assert [rate_share(schedule, 0, 1, 0.03) for schedule in RateSchedule] == [1.0] * 3
