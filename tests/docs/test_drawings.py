"""The drawings of the concepts are those that their script draws, one for each page."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.docs.pages import ROOT, script


@pytest.fixture(scope="module")
def drawings() -> Iterator[ModuleType]:
    with script("drawings") as module:
        yield module


def test_each_concept_has_its_drawing_as_it_is_drawn_now(drawings: ModuleType) -> None:
    pages = {page.stem for page in (ROOT / "docs" / "concepts").glob("*.md")}
    assert set(drawings.DRAWINGS) == pages
    stale = [
        name
        for name, drawing in drawings.DRAWINGS.items()
        if (ROOT / "docs" / "images" / f"{name}.svg").read_text() != drawings.svg(drawing)
    ]
    assert not stale, "run: python docs/drawings.py"


def test_a_note_is_text_and_nothing_else(drawings: ModuleType) -> None:
    box = drawings.Box(0, 0, ("<a & b>",))
    assert "&lt;a &amp; b&gt;" in drawings.svg(drawings.Drawing("t", {"one": box}))
