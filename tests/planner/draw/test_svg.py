"""The drawing as SVG: names whole, words for what lies under the pointer, the budget where it is near."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from port_planner.draw.drawing import Bar, Shade, TileRun
from port_planner.draw.svg import TILED, svg
from port_planner.ir.graph import Tile
from tests.planner.draw.pictures import PICTURE


def test_it_is_xml_and_has_every_bar() -> None:
    text = svg(PICTURE)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert (
        text.count("<title>hidden: 2.0 KiB kept\nfrom operator 0 (addmm) to operator 1 (relu), 0 ms to 1.0 s</title>")
        == 1
    )
    assert "7 further tensors" in text and "process 512 B" in text and "budget 4.0 KiB" in text and ">forward<" in text


def test_names_are_never_cut_or_markup() -> None:
    name = "transformer.h.11.<" + "x" * 80
    text = svg(replace(PICTURE, lanes=((name, 2048),)))
    assert f"transformer.h.11.&lt;{'x' * 80}  2.0 KiB</text>" in text
    width = float(text.partition('viewBox="0 0 ')[2].partition(" ")[0])
    assert width > float(svg(PICTURE).partition('viewBox="0 0 ')[2].partition(" ")[0]) + 300


def test_a_budget_that_is_far_away_is_no_line() -> None:
    assert "budget" not in svg(replace(PICTURE, budget_bytes=1 << 40)).partition("</style>")[2]


def test_steps_of_nothing_and_short_bars_are_drawn() -> None:
    ElementTree.fromstring(svg(replace(PICTURE, lanes=(), bars=(), memory=(), moments=(0.0,), phases=())))
    short = svg(replace(PICTURE, moments=(0.0, 0.0, 1e9), bars=(Bar(0, 0, 1, Shade.RECOMPUTE),)))
    assert 'width="0.8"' in short


def test_tiles_have_blocks_words_and_a_place_in_the_legend() -> None:
    runs = tuple(TileRun(Tile(0, "mm along dimension 0 of [4, <8]", k, 2), k, k + 1) for k in range(2))
    text = svg(replace(PICTURE, runs=runs))
    ElementTree.fromstring(text)
    assert text.count('class="tile"') == 3 and f">{TILED}<" in text
    assert "mm along dimension 0 of [4, &lt;8]: tile 2 of 2\nfrom operator 1 (relu)" in text
    assert TILED not in svg(PICTURE) and 'class="tile"' not in svg(PICTURE)
