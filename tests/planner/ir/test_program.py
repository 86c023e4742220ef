"""Idle gaps of a storage, and the error of a step that has too little memory."""

from port_planner.base.errors import ExitCode
from port_planner.ir.program import BudgetError, idle_gaps
from tests.planner.ir.lowering.small_graph import LOSS, A, B, W, X, graph


def test_a_storage_is_idle_between_uses_that_are_not_neighbours() -> None:
    found = {s: list(idle_gaps(graph(), s)) for s in (X, W, A, B, LOSS)}
    assert found == {X: [], W: [(0, 4)], A: [(1, 4)], B: [], LOSS: []}


def test_a_budget_that_is_missed_says_by_how_much_and_what_to_do() -> None:
    error = BudgetError(7, "aten::mm", 3 << 20, 2 << 20, ((4, 1 << 20),))
    assert str(error) == (
        "the step needs 3.0 MiB at op 7 (aten::mm), but the budget is 2.0 MiB; "
        "raise the budget to at least 3.0 MiB or use a smaller batch"
    )
    assert (error.op, error.needed_bytes, error.limit_bytes, error.holders) == (7, 3 << 20, 2 << 20, ((4, 1 << 20),))
    assert error.exit_code is ExitCode.IMPOSSIBLE
