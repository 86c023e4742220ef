"""Files that a drawing is written to: the suffix chooses, and what cannot be written says so."""

from pathlib import Path

import pytest

from planner.draw import Bar, DrawError, Drawing, Shade, write_drawing

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
