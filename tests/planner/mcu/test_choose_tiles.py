"""Bands are chosen where a stage's own operands are too large, and only there."""

from __future__ import annotations

import numpy as np
import pytest

from port_planner.mcu.autodiff import full_scheme
from port_planner.mcu.choose_tiles import choose_tiles, stage_loads
from port_planner.mcu.core_costs import core_costs
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph
from port_planner.mcu.memory import program_of
from port_planner.mcu.zoo import CameraNet
from tests.planner.mcu.networks import every_layer

CORE = core_costs("nrf52840")


@pytest.fixture(scope="module")
def graph() -> Graph:
    module, data = every_layer(2)
    return import_module(module, data.shape[1:])


def test_no_bands_where_every_stage_fits(graph: Graph) -> None:
    scheme = full_scheme(graph)
    plain = choose_tiles(program_of(graph, scheme), scheme, CORE, 10**9)
    assert plain.groups == () and len(plain.starts) == len(plain.program.steps)
    fitting = choose_tiles(plain.program, scheme, CORE, max(stage_loads(plain.problem)))
    assert fitting.groups == ()


@pytest.mark.parametrize("share", [0.95, 0.9, 0.5])
def test_bands_bring_every_stage_within_the_budget_or_as_low_as_they_can(graph: Graph, share: float) -> None:
    scheme = full_scheme(graph)
    plain = choose_tiles(program_of(graph, scheme), scheme, CORE, 10**9)
    limit = int(share * max(stage_loads(plain.problem)))
    found = choose_tiles(plain.program, scheme, CORE, limit)
    assert found.groups and max(stage_loads(found.problem)) < max(stage_loads(plain.problem))
    assert all(a.stop <= b.start for a, b in zip(found.groups, found.groups[1:], strict=False))
    assert found.problem.base_seconds < 1.5 * plain.problem.base_seconds


@pytest.mark.slow
def test_a_camera_net_fits_half_of_its_fullest_stage_for_little() -> None:
    graph = import_module(CameraNet().eval(), np.zeros((1, 3, 80, 80)).shape[1:])
    scheme = full_scheme(graph)
    program = program_of(graph, scheme)
    plain = choose_tiles(program, scheme, CORE, 10**9)
    limit = max(stage_loads(plain.problem)) // 2
    found = choose_tiles(program, scheme, CORE, limit)
    assert max(stage_loads(found.problem)) <= limit
    assert found.problem.base_seconds < 1.3 * plain.problem.base_seconds
