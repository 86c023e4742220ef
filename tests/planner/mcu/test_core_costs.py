"""What a step costs on a core: every kernel of every program has a count, and boards without counts are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from port_planner.mcu.autodiff import StepKind, full_scheme, training_program
from port_planner.mcu.core_costs import GATED, M0, M4F, CoreError, Kernel, core_costs, kernel_of, work_of
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import OpKind
from tests.planner.mcu.networks import every_layer, joins, recurrent, transposed


@pytest.mark.parametrize("build", [every_layer, joins, transposed, recurrent])
def test_every_step_of_every_kind_has_a_count_and_work(build: Callable[[int], tuple[nn.Module, np.ndarray]]) -> None:
    module, data = build(2)
    graph = import_module(module, data.shape[1:])
    scheme = full_scheme(graph)
    for step in training_program(graph, scheme).steps:
        assert M0[kernel_of(graph, step)] > 0 and M4F[kernel_of(graph, step)] > 0
        assert work_of(graph, step, scheme) > 0


def test_the_nets_have_every_kind_of_op() -> None:
    builds = (every_layer(2), joins(2), transposed(2), recurrent(2))
    graphs = [import_module(module, data.shape[1:]) for module, data in builds]
    assert {op.kind for graph in graphs for op in graph.ops} == set(OpKind)


def test_seconds_are_instructions_by_the_boards_clock() -> None:
    module, data = every_layer(2)
    graph = import_module(module, data.shape[1:])
    step, core = training_program(graph, full_scheme(graph)).steps[0], core_costs("nrf52840")
    counted = core.step_instructions(graph, step, full_scheme(graph))
    assert core.seconds(graph, step, full_scheme(graph)) == pytest.approx(counted * 1.1 / 64e6)


def test_a_board_without_counts_is_named() -> None:
    with pytest.raises(CoreError, match="instructions were not counted for 'pi5'; choose one of mkr1000, nrf52840"):
        core_costs("pi5")


def test_the_documented_counts_are_those_that_reports_reckon_with() -> None:
    page = (Path(__file__).parents[3] / "docs" / "boards.md").read_text()
    for kind, form in [(kind, "") for kind in OpKind] + [(OpKind.GRU, GATED)]:
        back: Kernel = (StepKind.COPY, None, "") if kind is OpKind.ADD else (StepKind.INPUT, kind, form)
        steps: tuple[Kernel, ...] = ((StepKind.FORWARD, kind, form), back, (StepKind.WEIGHT, kind, form))
        row = "".join(f" | {core[step]:,.1f}" if step in core else " | " for step in steps for core in (M4F, M0))
        assert f"{row} |\n" in page, (kind, form)
