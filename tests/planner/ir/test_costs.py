"""What a transfer takes."""

from planner.ir.costs import Flash


def test_a_transfer_takes_its_latency_and_its_bytes_at_the_speed_of_its_direction() -> None:
    card = Flash("card", read_bytes_per_s=200.0, write_bytes_per_s=50.0, latency_s=0.25, read_joules_per_byte=0.0,
                 write_joules_per_byte=0.0)  # fmt: skip
    assert (card.read_seconds(100), card.write_seconds(100)) == (0.75, 2.25)
    assert card.read_seconds(0) == card.write_seconds(0) == 0.25
