"""The compiler's graph: what a layer costs, and what no kernel of the firmware could run."""

from dataclasses import replace

import numpy as np
import pytest

from port_planner.mcu.ir import Graph, KernelCall, McuCompileError, OpKind, Shape, verify_mcu_graph

IMAGE, SMALL = Shape(8, 8, 3), Shape(4, 4, 6)


def weighted(
    name: str, kind: OpKind, source: str, shapes: tuple[Shape, Shape], kernel: int = 1, stride: int = 1
) -> KernelCall:
    inside, out = shapes
    dims = (
        (kernel, kernel, out.channels) if kind is OpKind.DEPTHWISE else (out.channels, kernel, kernel, inside.channels)
    )
    weight, bias = np.zeros(dims, np.float32), np.zeros(out.channels, np.float32)
    return KernelCall(
        name,
        kind,
        (source,),
        inside,
        out,
        (kernel, kernel),
        (stride, stride),
        (kernel // 2,) * 2,
        weight=weight,
        bias=bias,
    )


CONV = weighted("conv", OpKind.CONV, "x", (IMAGE, SMALL), 3, 2)
DEPTHWISE = weighted("depthwise", OpKind.DEPTHWISE, "conv", (SMALL, SMALL), 3)
ADD = KernelCall("add", OpKind.ADD, ("conv", "depthwise"), SMALL, SMALL)
FLAT = Shape(1, 1, SMALL.elements)
HEAD = weighted("head", OpKind.CLASSIFIER, "add", (FLAT, Shape(1, 1, 5)))
GRAPH = Graph("net", "x", IMAGE, (CONV, DEPTHWISE, ADD, HEAD))


def test_a_layer_costs_its_products_for_each_output_element() -> None:
    assert CONV.macs == 4 * 4 * 6 * 3 * 3 * 3 and DEPTHWISE.macs == 4 * 4 * 6 * 3 * 3
    assert (ADD.macs, HEAD.macs) == (0, 96 * 5) and GRAPH.macs == CONV.macs + DEPTHWISE.macs + HEAD.macs
    assert (CONV.weight_count, DEPTHWISE.weight_count, ADD.weight_count) == (162, 54, 0)
    assert str(IMAGE) == "8x8x3" and IMAGE.elements == 192


def test_a_graph_finds_its_tensors_by_name() -> None:
    verify_mcu_graph(GRAPH)
    assert (GRAPH.shape("x"), GRAPH.shape("conv"), GRAPH.classes, GRAPH.index("add")) == (IMAGE, SMALL, 5, 2)
    assert [op.name for op in GRAPH.weighted()] == ["conv", "depthwise", "head"]
    with pytest.raises(KeyError, match="nobody"):
        GRAPH.op("nobody")


def with_op(old: KernelCall, **changes: object) -> Graph:
    return replace(GRAPH, ops=tuple(replace(op, **changes) if op is old else op for op in GRAPH.ops))  # type: ignore[arg-type]


WIDE = Shape(1, 1, 70_000)


@pytest.mark.parametrize(
    ("graph", "layer", "problem"),
    [
        (replace(GRAPH, ops=GRAPH.ops[:-1]), "net", "does not end in a linear layer; end it with nn.Linear"),
        (replace(GRAPH, ops=()), "net", "does not end in a linear layer"),
        (
            replace(GRAPH, ops=(*GRAPH.ops, replace(HEAD, name="again", inputs=("head",), in_shape=Shape(1, 1, 5)))),
            "net",
            "a classifier in the middle of the graph",
        ),
        (with_op(ADD, inputs=("conv",)), "add", "1 inputs"),
        (with_op(ADD, inputs=("conv", "head")), "add", "reads head before it is written"),
        (with_op(DEPTHWISE, in_shape=IMAGE), "depthwise", "reads 4x4x6 as 8x8x3"),
        (with_op(DEPTHWISE, name="conv"), "conv", "two ops have this name"),
        (with_op(HEAD, out_shape=WIDE), "head", "over 65535; pool before the linear layer"),
        (with_op(CONV, kernel=(256, 1)), "conv", "over 255; use a smaller kernel"),
        (with_op(CONV, kernel=(105, 105)), "conv", "33075 products in one sum can overflow 32 bits; narrow the layer"),
    ],
)
def test_what_no_kernel_could_run_is_refused_by_its_layer(graph: Graph, layer: str, problem: str) -> None:
    with pytest.raises(McuCompileError, match=problem) as caught:
        verify_mcu_graph(graph)
    assert caught.value.layer == layer


def test_the_numbers_of_kernels_are_those_of_the_firmware() -> None:
    assert {kind.name: int(kind) for kind in OpKind} == {
        "CONV": 1,
        "DEPTHWISE": 2,
        "ADD": 3,
        "AVERAGE_POOL": 4,
        "MAX_POOL": 5,
        "CLASSIFIER": 6,
        "GROUPED": 7,
        "TABLE": 8,
        "CONCAT": 9,
        "UPSAMPLE": 10,
        "MULTIPLY": 11,
        "SCALE": 12,
        "TRANSPOSED": 13,
        "GRU": 14,
    }
