"""Files that a drawing is written to: the suffix chooses, and what cannot be written says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.draw import Bar, DrawError, Drawing, Mark, Shade, drawing, frontier_svg, page, svg, write_drawing
from planner.ir.plan import Plan
from planner.search.plan_step import plan_step
from tests.planner.estimated_steps import budget, captured

PICTURE = Drawing(
    lanes=(("hidden", 2048),), bars=(Bar(0, 0, 2, Shade.KEEP),), memory=(1024, 3072), moments=(0.0, 0.5, 1.0),
    budget_bytes=4096, title="two operators",
)  # fmt: skip


@pytest.mark.parametrize(("name", "start"), [("plan.svg", "<svg"), ("plan.html", "<!doctype html>"), ("P.HTM", "<!d")])
def test_the_suffix_chooses_the_format(tmp_path: Path, name: str, start: str) -> None:
    write_drawing(PICTURE, tmp_path / name)
    assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize(("name", "words"), [("plan.png", r"\.svg or \.html"), ("absent/plan.svg", "can be written")])
def test_other_suffixes_and_other_places_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DrawError, match=words):
        write_drawing(PICTURE, tmp_path / name)


def test_drawings_show_every_fate() -> None:
    graph, costs = captured()
    dear = replace(
        costs, ops=tuple(replace(c, joules=1.0) for c in costs.ops)
    )  # to make again what pages could bring back
    plan = plan_step(graph, dear, ram_bytes=budget(0.2), strategy="greedy").plan
    assert plan is not None
    picture = drawing(graph, costs, plan)
    assert {bar.shade for bar in picture.bars} >= {Shade.KEEP, Shade.PAGE_IN}
    assert all(0 <= bar.start < bar.stop <= len(graph.ops) for bar in picture.bars)
    assert max(picture.memory) <= plan.ram_bytes
    text = svg(picture)
    assert text.startswith("<svg") and text.count("<rect") > len(picture.bars)
    assert "<svg" in page(picture) and "http://www.w3.org" in text


def test_the_page_shows_the_frontier() -> None:
    graph, costs = captured()
    picture = drawing(graph, costs, Plan())
    marks = [Mark(0, 300 << 20, 1.0, 10.0), Mark(1, 200 << 20, 2.0, 12.5)]
    text = frontier_svg(marks, chosen=1)
    assert text.count("<circle") == 2 and "200.0 MiB" in text and "12.50 J" in text
    assert text in page(picture, marks, 1) and page(picture, marks[:1]).count("<svg") == 1
    assert frontier_svg([marks[0], marks[0]], 0).count("<circle") == 2  # equal figures divide by nothing
