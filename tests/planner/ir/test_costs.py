"""What a transfer takes, and when what steps really take is news."""

import pytest

from port_planner.ir.costs import Flash, Speeds


def test_a_transfer_takes_its_latency_and_its_bytes_at_the_speed_of_its_direction() -> None:
    card = Flash(
        "card",
        read_bytes_per_s=200.0,
        write_bytes_per_s=50.0,
        latency_s=0.25,
        read_joules_per_byte=0.0,
        write_joules_per_byte=0.0,
    )
    assert (card.read_seconds(100), card.write_seconds(100)) == (0.75, 2.25)
    assert card.read_seconds(0) == card.write_seconds(0) == 0.25


@pytest.mark.parametrize(
    ("new", "old", "differs"),
    [
        (Speeds(1.0), Speeds(1.0), False),
        (Speeds(1.2), Speeds(1.0), False),
        (Speeds(1.3), Speeds(1.0), True),
        (Speeds(1.0, 1e6), Speeds(1.0), True),
        (Speeds(1.0), Speeds(1.0, 1e6), False),
        (Speeds(1.0, 1e6, 1e6), Speeds(1.0, 1e6, 2e6), True),
    ],
)
def test_speeds_differ_by_share(new: Speeds, old: Speeds, differs: bool) -> None:
    assert new.differ_from(old, 0.25) is differs
