"""The recorded step that several modules change."""

import pytest

from port_planner.ir.graph import StepGraph
from tests.planner.ir.operands.recorded_step import recorded_step


@pytest.fixture(scope="session")
def graph() -> StepGraph:
    return recorded_step()
