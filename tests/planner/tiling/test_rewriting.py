"""A graph in the making keeps the numbers of the one it is made of."""

from port_planner.ir.graph import Value, verify_graph
from port_planner.tiling.rewriting import GraphBuilder, compacted, row_major
from tests.planner.steps import tiny_step


def test_a_draft_of_the_same_ops_is_the_same_graph() -> None:
    graph = tiny_step().graphs["step"]
    builder = GraphBuilder(graph)
    for op in graph.ops:
        builder.add(op)
    assert builder.graph() == graph


def test_values_are_added_once_and_storages_at_the_end() -> None:
    graph = tiny_step().graphs["step"]
    builder = GraphBuilder(graph)
    s = builder.storage(64)
    assert s == len(graph.storages)
    fresh = Value(s, "float32", (4, 4), (4, 1), 0)
    assert builder.value(fresh) == builder.value(fresh) == len(graph.values)
    assert builder.value(graph.values[3]) == 3
    for op in graph.ops:
        builder.add(op)
    verify_graph(builder.graph())


def test_strides_of_contiguous_tensors() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major((2, 0, 4)) == (4, 4, 1)
    assert row_major(()) == ()


def test_what_nothing_touches_is_left_out_and_the_rest_stays_a_graph() -> None:
    graph = tiny_step().graphs["step"]
    builder = GraphBuilder(graph)
    builder.value(Value(builder.storage(64), "float32", (4, 4), (4, 1), 0))
    for op in graph.ops:
        builder.add(op)
    small = compacted(builder.graph())
    verify_graph(small)
    assert small == compacted(graph) and len(small.storages) <= len(graph.storages)
    assert [op.name for op in small.ops] == [op.name for op in graph.ops]
