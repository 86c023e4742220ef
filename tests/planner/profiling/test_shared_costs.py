"""Costs of another machine: read with bounds, and believed after a sample."""

import random
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from port_planner.profiling import kept_costs
from port_planner.profiling.kept_costs import KEPT_DAYS, KeptCost
from port_planner.profiling.operator_profile import profile_operators
from port_planner.profiling.shared_costs import (
    CHECKED,
    MAX_COSTS,
    SharedCostsError,
    disputed,
    pack_shared,
    shared_name,
    to_check,
    unpack_shared,
)
from tests.planner.steps import tiny_step

NOW = 1.8e9
KEY = "0f" * 12


def test_read_as_written_as_far_as_it_is_young() -> None:
    costs = {f"{n:024x}": KeptCost(0.1 * n, n, NOW - 86400.0 * n) for n in range(40)}
    assert unpack_shared(pack_shared(costs), NOW) == {
        key: c for key, c in costs.items() if c.workspace_bytes < KEPT_DAYS
    }
    assert unpack_shared(pack_shared({KEY: KeptCost(1.0, 0, NOW + 90000.0)}), NOW) == {}
    many = {f"{n:024x}": KeptCost(0.1, n, NOW - n) for n in range(MAX_COSTS + 5)}
    assert len(unpack_shared(pack_shared(many), NOW)) == MAX_COSTS


@pytest.mark.parametrize(
    "wrong",
    [
        {KEY: [-1.0, 0, NOW]}, {KEY: [float("nan"), 0, NOW]}, {KEY: [4000.0, 0, NOW]}, {KEY: [1.0, -1, NOW]},
        {KEY: [1.0, 1 << 40, NOW]}, {KEY: [1.0, 0.5, NOW]}, {KEY: [1.0, 0, float("inf")]}, {KEY: [1.0, 0]},
        {KEY + "\n": [1.0, 0, NOW]}, {"../" + KEY: [1.0, 0, NOW]}, [], None,
        {f"{n:024x}": [0.1, 0, NOW] for n in range(MAX_COSTS + 1)},
    ],
)  # fmt: skip
def test_every_number_has_a_bound(wrong: object) -> None:
    with pytest.raises(SharedCostsError, match=r"not a table of operator costs|an invalid number"):
        unpack_shared(msgspec.msgpack.encode(wrong), NOW)


@pytest.mark.slow
def test_fuzzed_costs_are_read_or_refused() -> None:
    random_ = random.Random(23)
    whole = pack_shared({f"{n:024x}": KeptCost(0.1 * n, n, NOW - n) for n in range(20)})
    read = 0
    for _ in range(20_000):
        content = bytearray(whole)
        for _ in range(random_.randrange(1, 4)):
            content[random_.randrange(len(content))] = random_.randrange(256)
        try:
            costs = unpack_shared(bytes(content[: random_.randrange(len(content), len(content) + 2)]), NOW)
        except SharedCostsError:
            continue
        read += 1
        assert all(0 <= c.seconds < 3600 and 0 <= c.workspace_bytes < 1 << 40 for c in costs.values())
    assert 100 < read < 19_000


def test_names_differ_by_context_and_board() -> None:
    names = {shared_name(context, board) for context in ("a", "b") for board in ("Pi 5", "Pi 4")}
    assert len(names) == 4 and all(len(name) == 64 for name in names)


def test_a_sample_of_the_dearest_is_compared() -> None:
    costs = {f"{n:024x}": KeptCost(0.1 * n, 0, NOW) for n in range(40)}
    assert to_check(costs) == {f"{n:024x}" for n in range(40 - CHECKED, 40)}
    here = KeptCost(1e-2, 10 << 20, NOW)
    assert disputed([(replace_cost(here, 3.9), here), (replace_cost(here, 0.26), here)]) == ""
    costlier = (replace_cost(here, 5.0), here)
    assert "reported to take 0.05 s but takes 0.01 s" in disputed([(here, here), costlier, costlier])
    assert disputed([(here, here), costlier]) == "", "measured while something else ran"
    assert "bytes of workspace" in disputed([(KeptCost(1e-2, 0, NOW), here)] * 2)
    assert disputed([(KeptCost(9e-5, 0, NOW), KeptCost(1e-6, 500_000, NOW))] * 2) == "", "noise"


def replace_cost(cost: KeptCost, factor: float) -> KeptCost:
    return KeptCost(cost.seconds * factor, cost.workspace_bytes, cost.measured_at)


@pytest.mark.slow
def test_costs_of_another_machine_are_taken_over_unless_they_are_contradicted(tmp_path: Path) -> None:
    graph = tiny_step().graphs["step"]
    there = tmp_path / "there"
    measured = profile_operators([graph], compute_watts=1.0, kept_in=there)
    (file,) = there.iterdir()
    costs = kept_costs.read_costs(there, file.name, time.time())
    assert len(costs) > 3 * CHECKED
    again = profile_operators([graph], compute_watts=1.0, kept_in=tmp_path / "here", shared=costs)
    assert (again.taken_over, again.disputed) == (len(costs) - CHECKED, "")
    (file,) = (tmp_path / "here").iterdir()
    assert len(kept_costs.read_costs(tmp_path / "here", file.name, time.time())) == CHECKED
    lies = {key: KeptCost(50.0, 0, cost.measured_at) for key, cost in costs.items()}
    honest = profile_operators([graph], compute_watts=1.0, shared=lies)
    assert honest.taken_over == 0 and "reported to take 50 s" in honest.disputed
    assert max(op.seconds for op in honest.ops[0]) < 1.0
    assert replace(measured, ops=(), base_bytes=0, retained_bytes=0, released_bytes=0).taken_over == 0
