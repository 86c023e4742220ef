"""What a step costs on a core: every kernel of every program has a count, and boards without counts are named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from torch import nn

from port_planner.mcu.autodiff import full_scheme, training_program
from port_planner.mcu.core_costs import M0, M4F, CoreError, core_costs, kernel_of, work_of
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import OpKind
from tests.planner.mcu.networks import every_layer, joins, transposed


@pytest.mark.parametrize("build", [every_layer, joins, transposed])
def test_every_step_of_every_kind_has_a_count_and_work(build: Callable[[int], tuple[nn.Module, np.ndarray]]) -> None:
    module, data = build(2)
    graph = import_module(module, data.shape[1:])
    scheme = full_scheme(graph)
    for step in training_program(graph, scheme).steps:
        assert M0[kernel_of(graph, step)] > 0 and M4F[kernel_of(graph, step)] > 0
        assert work_of(graph, step, scheme) > 0


def test_the_nets_have_every_kind_of_op() -> None:
    graphs = [import_module(module, data.shape[1:]) for module, data in (every_layer(2), joins(2), transposed(2))]
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
