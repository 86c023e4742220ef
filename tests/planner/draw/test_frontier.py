"""Plans beside each other: a circle for each, the chosen one filled."""

from port_planner.draw.frontier import Mark, frontier_svg

MARKS = [Mark(0, 300 << 20, 1.0, 10.0), Mark(1, 200 << 20, 2.0, 12.5)]


def test_each_plan_has_a_circle() -> None:
    text = frontier_svg(MARKS, chosen=1)
    assert text.count("<circle") == 2 and text.count('fill="var(--kept)"') == 1
    assert "200.0 MiB" in text and "plan 2: 12.50 J" in text


def test_equal_figures_divide_by_nothing() -> None:
    assert frontier_svg([MARKS[0], MARKS[0]], 0).count("<circle") == 2
