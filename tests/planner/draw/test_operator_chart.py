"""The plot of a step's operators: calls alike together, areas by time, what lies under the pointer."""

import re
from dataclasses import replace

from port_planner.draw.operator_chart import Spot, operators_svg, spots_of
from port_planner.ir.graph import Tile
from tests.planner.steps import costs_of, tiny_step


def test_every_call_is_in_one_spot_and_tiles_are_apart() -> None:
    graph = tiny_step().graphs["step"]
    costs = costs_of(graph, workspace=1000)
    spots = spots_of(graph, costs)
    assert sum(spot.calls for spot in spots) == len(graph.ops)
    assert [s.seconds for s in spots] == sorted(s.seconds for s in spots)
    assert not any(spot.tiled for spot in spots)
    cut = replace(graph, ops=tuple(replace(op, tile=Tile(0, "all", 0, 2)) for op in graph.ops))
    assert all(spot.tiled for spot in spots_of(cut, costs))


def test_a_spot_lies_by_bytes_and_seconds_of_a_call_and_says_what_it_is() -> None:
    small, large = Spot("relu", False, 4096, 4, 4e-4), Spot("mm<b>", True, 8 << 20, 2, 0.02)
    text = operators_svg([small, large], "operators & tiles")
    assert (
        "operators &amp; tiles" in text
        and "mm&lt;b&gt; in tiles: 2 calls of 10 ms, 98.0% of the step, 8.0 MiB each" in text
    )
    spots = re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', text)
    (first, *of_large), (second, *of_small) = spots
    assert (first, second) == ("tile", "KEEP"), "the smaller lies above"
    assert float(of_large[0]) > float(of_small[0]) and float(of_large[1]) < float(of_small[1])
    assert float(of_large[2]) > float(of_small[2])


def test_a_plot_of_nothing_is_a_plot() -> None:
    assert operators_svg([], "nothing").startswith("<svg")
