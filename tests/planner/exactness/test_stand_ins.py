"""What stands for contents is of the kind that operators read."""

import torch

from port_planner.exactness.stand_ins import as_bytes, made_up, stand_in
from port_planner.ir.graph import Op, Phase, Ref, Role, StepGraph, Storage, Value


def looked_up() -> StepGraph:
    """Return a step that looks eight rows of five up."""
    storages = (
        Storage(5 * 3 * 4, Role.PARAMETER, "table"),
        Storage(8 * 8, Role.BATCH, "rows"),
        Storage(8 * 3 * 4, Role.TEMPORARY, ""),
    )
    values = (
        Value(0, "float32", (5, 3), (3, 1), 0),
        Value(1, "int64", (8,), (1,), 0),
        Value(2, "float32", (8, 3), (3, 1), 0),
    )
    op = Op("aten::embedding", (Ref(0), Ref(1)), (), (2,), (), Phase.FORWARD)
    return StepGraph(storages, values, (op,), batch=(1,), loss=2, aux=(), scalars=0, draws=())


def test_indices_are_within_their_table_and_edges_among_them() -> None:
    graph = looked_up()
    rows = made_up(graph, 1, (0,), edges=(4, 7)).view(torch.int64)
    assert int(rows.min()) >= 0 and int(rows.max()) < 5
    assert rows[0] == 4 and not (rows == 7).any()


def test_numbers_are_the_same_each_time_and_different_for_each_storage() -> None:
    graph = looked_up()
    numbers = made_up(graph, 0, (0,), edges=()).view(torch.float32)
    assert torch.equal(numbers, made_up(graph, 0, (0,), edges=()).view(torch.float32))
    assert 0.1 < float(numbers.std()) < 1


def test_what_stands_in_is_laid_out_alike() -> None:
    layout = torch.empty_strided((3, 4), (1, 5), device="meta", dtype=torch.bfloat16)
    numbers = stand_in(layout, 1)
    assert (numbers.shape, numbers.stride(), numbers.dtype) == (layout.shape, layout.stride(), layout.dtype)
    assert not torch.equal(numbers, stand_in(layout, 2))
    assert as_bytes(torch.ones(2), Storage(8, Role.TEMPORARY, "")).numel() == 8
