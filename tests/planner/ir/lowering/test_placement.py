"""Where a sliced update begins and ends, and what it holds besides whole tensors."""

import pytest

from port_planner.ir.lowering.placement import SlicedUpdates
from port_planner.ir.lowering.update_slices import SLICE_BYTES
from port_planner.ir.program import UpdateGroup

GROUP = UpdateGroup(
    parameter=0, first=3, last=5, storages=(0, 1, 2, 7), temporaries=(7,), whole=(), nbytes=3 * SLICE_BYTES + 4
)


def updates(count: int, streamed: set[int]) -> SlicedUpdates:
    made = SlicedUpdates((GROUP,), {0: count}, ())
    made.group_at.update(dict.fromkeys(range(3, 6), 0))
    made.streamed[0] = streamed
    return made


def test_a_group_begins_at_its_first_op_and_ends_at_its_last() -> None:
    made = updates(2, set())
    assert [made.starts(op) for op in range(2, 7)] == [None, 0, None, None, None]
    assert [made.ends(op) for op in range(2, 7)] == [None, None, None, 0, None]


@pytest.mark.parametrize(
    ("count", "streamed", "slices"),
    [
        (4, set(), 1),
        (4, {7}, 1),
        (4, {0, 7}, 3),
        (4, {0, 1, 2, 7}, 7),
    ],
)
def test_it_holds_two_buffers_for_each_streamed_tensor_and_one_for_each_temporary(
    count: int, streamed: set[int], slices: int
) -> None:
    assert updates(count, streamed).resident_bytes(0) == slices * SLICE_BYTES
    assert updates(2, streamed).resident_bytes(0) == slices * 2 * SLICE_BYTES, "larger slices, larger buffers"
