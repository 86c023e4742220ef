"""The page and the files that drawings are written to: the suffix chooses, and what cannot be written says so."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from port_planner.draw.frontier import Mark, frontier_svg
from port_planner.draw.page import DrawError, page, write_drawing
from tests.planner.draw.pictures import PICTURE


@pytest.mark.parametrize(("name", "start"), [("plan.svg", "<svg"), ("plan.html", "<!doctype html>"), ("P.HTM", "<!d")])
def test_the_suffix_chooses_the_format(tmp_path: Path, name: str, start: str) -> None:
    write_drawing(PICTURE, tmp_path / name)
    assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize(
    ("name", "words"), [("plan.png", r"\.svg or \.html"), ("absent/plan.svg", "choose a writable file")]
)
def test_other_suffixes_and_other_places_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DrawError, match=words):
        write_drawing(PICTURE, tmp_path / name)


def test_the_page_has_the_figures_and_the_frontier() -> None:
    marks = [Mark(0, 300 << 20, 1.0, 10.0), Mark(1, 200 << 20, 2.0, 12.5)]
    text = page(PICTURE, marks, 1)
    assert frontier_svg(marks, 1) in text and page(PICTURE, marks[:1]).count("<svg") == 2
    assert "<dt>peak</dt><dd>3.0 KiB</dd>" in text and text.count("two operators") == 2, (
        "its title, and once on the page"
    )


def test_a_phone_shows_a_drawing_of_its_width() -> None:
    text = page(PICTURE)
    wide, narrow = (found.split() for found in re.findall(r'viewBox="0 0 (\d+ \d+)"', text))
    assert int(narrow[0]) < 400 < int(wide[0]) and "figure.narrow{display:block}figure.wide{display:none}" in text


def test_what_the_pointer_shows_is_data_and_no_markup() -> None:
    text = page(replace(PICTURE, operators=("</script><b>", "relu")))
    found = re.search(r'<script type="application/json" id="step">(.*?)</script>', text)
    assert found is not None
    assert json.loads(found[1]) == {
        "moments": [0.0, 0.5, 1.0],
        "memory": [1024, 3072],
        "operators": ["</script><b>", "relu"],
    }
