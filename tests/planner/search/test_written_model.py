"""The written model of a captured step: its rows by name under a legend of its stages, tensors and gaps."""

from pathlib import Path

import pytest

from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.milp.highs import ModelFileError
from port_planner.search.written_model import write_model
from tests.planner.steps import costs_of, wide_step


def test_a_person_finds_tensors_stages_and_rows(tmp_path: Path) -> None:
    graph = wide_step()
    costs = costs_of(graph)
    budget = round(0.7 * lower(graph, costs, Plan()).peak_bytes)
    write_model(tmp_path / "model.lp", graph, costs, Plan(ram_bytes=budget))
    text = (tmp_path / "model.lp").read_text()
    legend = [line for line in text.splitlines() if line.startswith("\\")]
    assert any("i = " in line and "weight" in line for line in legend)
    assert any("s = 0: operators 0 to" in line for line in legend)
    assert " eq1_one_decision(" in text and " eq6_memory_after(" in text and " eq7_total_stall:" in text


def test_a_path_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    graph = wide_step()
    with pytest.raises(ModelFileError, match="nowhere"):
        write_model(tmp_path / "nowhere" / "model.lp", graph, costs_of(graph), Plan(ram_bytes=100_000))
