"""A stage in parts and in rounds."""

from port_agent.prepare.measurement.progress import part_of, rounds_of


def test_parts_of_a_stage_follow_one_another_to_its_end() -> None:
    on_line: list[tuple[str, float]] = []
    for part in range(2):
        rounds = rounds_of(part_of(lambda *said: on_line.append(said), part, 2), "flash")
        rounds(1, 2)
        rounds(2, 2)
    assert on_line == [("flash", 0.25), ("flash", 0.5), ("flash", 0.75), ("flash", 1.0)]
