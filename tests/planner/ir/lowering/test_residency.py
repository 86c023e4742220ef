"""Who is resident while each op runs, by hand; and every way in which somebody is missing or there twice."""

from dataclasses import replace

import pytest

from port_planner.ir.lowering.placement import Position, SlicedUpdates
from port_planner.ir.lowering.residency import ResidencyWalk
from port_planner.ir.plan import Action, Decision
from port_planner.ir.program import BudgetError, PlanError
from tests.planner.ir.lowering.small_graph import LOSS, SIZES, A, B, W, X, costs, graph

RETURN = Decision(A, 1, 4, Action.RECOMPUTE)


def walk(
    *changes: tuple[int, Position], starts_away: frozenset[int] = frozenset(), workspace: int = 0
) -> ResidencyWalk:
    """Walk the small step; without changes b is freed after its use and a at the end."""
    at = [Position(), Position(), Position(frees=[B]), Position(), Position(frees=[A])]
    for i, position in changes:
        at[i] = position
    return ResidencyWalk(graph(), costs(workspace=workspace), SlicedUpdates((), {}, SIZES), at, starts_away)


def test_without_decisions() -> None:
    found = walk()
    assert found.need.tolist() == [840, 1240, 1280, 880, 880]
    assert found.after_need.tolist() == [840, 1240, 880, 880, 480], "x and w stay, and the loss for the caller"
    assert found.fullest == (2, frozenset({X, W, A, B, LOSS}))
    assert found.reruns == {}


def test_workspace_counts_while_its_operator_runs() -> None:
    found = walk(workspace=7)
    assert found.need.tolist() == [847, 1247, 1287, 887, 887] and found.after_need.tolist() == [
        840,
        1240,
        880,
        880,
        480,
    ]


def test_what_is_written_is_gone_until_it_returns() -> None:
    found = walk((1, Position(writes=[A])), (4, Position(returns=[A], frees=[A])))
    assert found.need.tolist() == [840, 1240, 880, 480, 880]


def test_a_weight_that_starts_on_flash_comes_for_its_use() -> None:
    found = walk(
        (0, Position(returns=[W], writes=[W])),
        (4, Position(returns=[W], frees=[A], writes=[W])),
        starts_away=frozenset({W}),
    )
    assert found.need.tolist() == [840, 840, 880, 480, 880] and found.after_need.tolist()[-1] == 80


def test_a_rematerialization_runs_its_writers_again_before_the_op_that_needs_it() -> None:
    found = walk((1, Position(frees=[A])), (4, Position(rematerializations=[RETURN], frees=[A])), workspace=7)
    assert found.reruns == {4: [(0, ())]}
    assert found.need.tolist() == [847, 1247, 887, 487, 887]


def test_an_intermediate_is_freed_as_soon_as_it_was_read() -> None:
    """b comes back from a, and a only for that."""
    through = [Decision(A, 1, 3, Action.INTERMEDIATE), Decision(B, 2, 3, Action.RECOMPUTE)]
    found = walk(
        (1, Position(frees=[A])),
        (2, Position(frees=[B])),
        (3, Position(rematerializations=through, frees=[B])),
        (4, Position(rematerializations=[RETURN], frees=[A])),
    )
    assert found.reruns == {3: [(0, ()), (1, (A,))], 4: [(0, ())]}
    assert found.need.tolist()[3] == 480 + 400 + 400, "both for a moment"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (((1, Position(returns=[A])),), "storage 2 is read from flash at op 1 although it is resident"),
        (
            ((1, Position(frees=[A])),),
            r"op 4 \(aten::add_.Tensor\) reads storage 2 \(mul output \[100\]\), which is not",
        ),
        (((3, Position(frees=[B])),), "storage 3 is freed, packed or written at op 3, but it is not resident there"),
        (((3, Position(writes=[B])),), "storage 3 is freed, packed or written at op 3"),
        (
            ((4, Position(rematerializations=[RETURN])),),
            r"storages \[2\] are rematerialized at op 4 although they are resident",
        ),
        (
            (
                (1, Position(frees=[A])),
                (3, Position(rematerializations=[Decision(B, 2, 3, Action.RECOMPUTE)])),
            ),
            r"rematerializing at op 3 runs op 1 \(aten::relu\), but storage 2 is gone",
        ),
        (
            ((1, Position(frees=[A], writes=[W])), (4, Position(returns=[], rematerializations=[RETURN]))),
            r"rematerializing at op 4 runs op 0 \(aten::mul.Tensor\), but storage 1 is gone",
        ),
        (
            ((1, Position(frees=[A])), (4, Position(rematerializations=[Decision(A, -1, 4, Action.RECOMPUTE)]))),
            r"storages \[2\] cannot be rematerialized at op 4: nothing writes them",
        ),
    ],
)
def test_what_is_missing_or_there_twice_is_refused(changes: tuple[tuple[int, Position], ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        walk(*changes)


def test_an_input_that_was_changed_since_is_no_input() -> None:
    ops = graph().ops
    early = replace(graph(), ops=(ops[0], ops[1], ops[4], ops[2], ops[3]))
    again = Position(rematerializations=[Decision(B, 1, 4, Action.RECOMPUTE)])
    at = [Position(), Position(frees=[B]), Position(frees=[A]), Position(), again]
    reading_b = replace(early, ops=(*early.ops[:3], replace(ops[3], args=early.ops[0].args), replace(ops[2])))
    at[4] = Position(rematerializations=[Decision(A, 1, 4, Action.INTERMEDIATE), Decision(B, 1, 4, Action.RECOMPUTE)])
    with pytest.raises(PlanError, match=r"runs op 0 \(aten::mul.Tensor\), but storage 1 has changed since"):
        ResidencyWalk(reading_b, costs(), SlicedUpdates((), {}, SIZES), at, frozenset())


def test_a_budget_is_held_to_the_byte_and_names_the_largest_holders() -> None:
    found = walk()
    found.check(1280)
    with pytest.raises(BudgetError) as caught:
        found.check(1279)
    error = caught.value
    assert (error.op, error.needed_bytes, error.limit_bytes) == (2, 1280, 1279)
    assert error.holders == ((W, 400), (A, 400), (B, 400), (X, 40), (LOSS, 40))
