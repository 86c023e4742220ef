"""What `frontier` says about deadlines, and costs taken to a board that is not at hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.cli import main
from port_agent.cli.devices_and_plots import BITWISE, REORDERED, operator_sums
from port_agent.prepare.making.device_costs import other_board
from port_planner.base.errors import ExitCode
from port_planner.ir.boards import BoardError, load_board
from port_planner.ir.costs import OpCost
from port_planner.ir.graph import Phase, Tile
from port_planner.problem.placed_step import placed_step
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.placement.operator_devices import together_of
from tests.agent.jobs_small import small_bundle
from tests.planner.estimated_steps import captured
from tests.planner.steps import costs_of, tiny_step


@pytest.mark.slow
def test_costs_of_another_board_are_scaled_and_say_estimated() -> None:
    graph, costs = captured()
    measured = MeasuredCosts((costs.ops,), costs.device.base_bytes, 0)
    times = {}
    for name in ("pi4b", "jetson-orin"):
        scaled, device = other_board({"step": graph}, measured, costs.device, name)
        assert device.name.endswith("(estimated)") and device.base_bytes == costs.device.base_bytes
        assert device.static_watts == load_board(name)["static_watts"]
        assert [c.workspace_bytes for c in scaled.ops[0]] == [c.workspace_bytes for c in costs.ops]
        times[name] = sum(c.seconds for c in scaled.ops[0])
    assert 0 < times["jetson-orin"] < times["pi4b"]
    with pytest.raises(BoardError, match="pi4b"):
        other_board({"step": graph}, measured, costs.device, "abacus")


def test_operators_are_summed_by_name_and_device() -> None:
    graph, costs = captured()
    sums = operator_sums(graph, costs)
    assert sum(one.calls for one in sums) == len(graph.ops) and {one.device for one in sums} == {"cpu"}
    assert sum(one.seconds for one in sums) == pytest.approx(sum(cost.seconds for cost in costs.ops))
    assert [one.seconds for one in sums] == sorted((one.seconds for one in sums), reverse=True)
    assert "convolution_backward" in {one.name for one in sums[:3]}
    convolutions = next(one for one in sums if one.name == "convolution")
    assert convolutions.modules and sum(convolutions.modules.values()) == pytest.approx(convolutions.seconds)
    there = replace(graph, storages=tuple(replace(s, device="cuda") for s in graph.storages))
    assert {one.device for one in operator_sums(there, costs)} == {"cuda"}
    assert all(sum(one.phases.values()) == one.calls for one in sums)


def test_variants_of_an_operator_are_apart_and_what_is_reordered_says_so() -> None:
    graph, costs = captured()
    first = graph.ops[0]
    chunks = tuple(
        replace(op, tile=Tile(0, "all", i % 4, 4)) if op.name == first.name else op for i, op in enumerate(graph.ops)
    )
    cut = replace(graph, ops=(replace(first, tile=None), *chunks[1:]))
    sums = [one for one in operator_sums(cut, costs, (first.name,)) if f"aten::{one.name}" == first.name]
    assert {one.variant for one in sums} == {"whole", "4 tiles"}
    assert {one.exactness for one in sums} == {REORDERED}
    assert {one.exactness for one in operator_sums(graph, costs)} == {BITWISE}
    summed = replace(first, tile=Tile(0, "all", 0, 4, reordered=True))
    apart = [
        one
        for one in operator_sums(replace(cut, ops=(summed, *chunks[1:])), costs)
        if f"aten::{one.name}" == first.name
    ]
    assert {(one.variant, one.exactness) for one in apart} == {("4 tiles", REORDERED), ("4 tiles", BITWISE)}


@pytest.mark.slow
def test_the_plot_of_operators_is_written_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    job = str(small_bundle())
    assert main(["profile", "--ops", job, "--plot", str(tmp_path / "ops.svg")]) == 0
    assert "forward" in capsys.readouterr().out
    assert (tmp_path / "ops.svg").read_text().startswith("<svg")
    for wrong in (["--ops", job, "--plot", str(tmp_path / "ops.png")], ["--plot", str(tmp_path / "ops.svg")]):
        assert main(["profile", *wrong]) == ExitCode.IMPOSSIBLE
        assert "--plot" in capsys.readouterr().err


@pytest.mark.slow
def test_operators_of_a_divided_step_are_listed_by_device_beside_what_the_other_takes() -> None:
    recorded = tiny_step().graphs["step"]
    kinds = ["sim" if op.phase is Phase.FORWARD else "cpu" for op in recorded.ops]
    for group in together_of(recorded):
        for i in group:
            kinds[i] = kinds[group[0]]
    step = placed_step(recorded, kinds)
    costs = costs_of(step.graph)
    elsewhere = tuple(None if origin is None else OpCost(1.0, 0, 0.0) for origin in step.origin)
    lacking = next(i for i, op in enumerate(step.graph.ops) if op.name == "aten::addmm")
    elsewhere = tuple(None if i == lacking else cost for i, cost in enumerate(elsewhere))
    sums = operator_sums(step.graph, replace(costs, elsewhere=elsewhere))
    found = {(one.name, one.device): one for one in sums}
    assert found["transfer", "cpu"].calls + found["transfer", "sim"].calls == step.origin.count(None)
    assert found["convolution", "sim"].elsewhere_seconds == found["convolution", "sim"].calls
    assert found["addmm", "sim"].elsewhere_seconds is None and found["transfer", "cpu"].elsewhere_seconds is None
    assert sum(one.calls for one in sums) == len(step.graph.ops)
