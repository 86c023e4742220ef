"""The models of the table on emulated cores: each keeps the limits that the table prints beside it."""

from pathlib import Path

import pytest

from benchmarks.mcu import CASES, Case, measure
from benchmarks.mcu_networks.target import missing_tools

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(missing_tools(counting=True) is not None, reason=str(missing_tools(counting=True))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.core.name}")
def test_every_model_keeps_its_limits(case: Case, tmp_path: Path) -> None:
    found = measure(case, tmp_path)
    assert found.ram_bytes <= case.ram_limit_bytes
    assert found.arena_bytes <= 1.02 * found.arena_lower_bound_bytes
    if case.speed_limits is not None:
        forward, backward = case.speed_limits
        assert found.forward_per_mac <= forward
        assert found.backward_per_mac <= backward
