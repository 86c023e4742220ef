"""Rounds of a federation: the loss as a line, a dot for each device in an average, a ring for who was lost, a
band for what was abandoned.
"""

import xml.etree.ElementTree as ElementTree

from port_planner.draw.rounds import RoundMark, rounds_svg

ROUNDS = [
    RoundMark(1, 9.0, 0.75, ("<attic>", "cellar"), {}),
    RoundMark(2, 60.0, None, (), {"cellar": "no reply in time"}, "1 of 2 devices replied"),
    RoundMark(2, 9.0, 0.25, ("<attic>",), {"cellar": "its loss is nan"}),
]


def test_loss_and_who_took_part() -> None:
    text = rounds_svg(ROUNDS, "birds & bees")
    document = ElementTree.fromstring(text)
    titles = [title.text for title in document.iter("{http://www.w3.org/2000/svg}title")]
    assert "round 1: loss 0.7500, 2 devices, 9.0 s" in titles and "round 2: <attic>" in titles
    assert "round 2: cellar, its loss is nan" in titles
    assert "round 2: abandoned: 1 of 2 devices replied" in titles
    assert text.count('fill="none" stroke="var(--kept)"><title>') == 2, "rings"
    (points,) = (line.get("points") for line in document.iter("{http://www.w3.org/2000/svg}polyline"))
    assert points is not None and len(points.split()) == 2


def test_no_round_and_no_loss_divide_by_nothing() -> None:
    for rounds in ([], [ROUNDS[1]], [RoundMark(1, 1.0, 0.5, ("a",), {})] * 300):
        ElementTree.fromstring(rounds_svg(rounds, "x"))
