"""Memory plans: no two live buffers overlap, and the peak stays within 1.02 of the lower bound."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from port_planner.mcu.arena import Arena, Buffer, OverlapError, aligned, lower_bound, plan_arena, verify_plan
from port_planner.mcu.autodiff import full_scheme, last_layers, training_program
from port_planner.mcu.ir import Clamp, Graph, KernelCall, OpKind, Shape
from port_planner.mcu.memory import buffers_of, plan_memory


def random_graph(seed: int) -> Graph:
    """Return a random network of convolutions, depthwise layers, residuals and poolings."""
    choose = random.Random(seed)
    shape = Shape(choose.choice([16, 24, 32, 48]), choose.choice([16, 24, 32, 48]), choose.choice([1, 3]))
    ops: list[KernelCall] = []
    name, start = "input", shape
    for index in range(choose.randint(4, 24)):
        kind = choose.choice(["conv", "pointwise", "depthwise", "depthwise", "residual", "pool"])
        label = f"op{index}"
        if kind == "residual" and (earlier := [op for op in ops if op.out_shape == shape and op.name != name]):
            ops.append(KernelCall(label, OpKind.ADD, (choose.choice(earlier).name, name), shape, shape))
        elif kind == "pool" and shape.height >= 8 and shape.width >= 8:
            out = Shape(shape.height // 2, shape.width // 2, shape.channels)
            ops.append(KernelCall(label, OpKind.MAX_POOL, (name,), shape, out, (2, 2), (2, 2)))
        else:
            ops.append(_weighted(choose, label, kind, name, shape))
        name, shape = label, ops[-1].out_shape
    flat = Shape(1, 1, shape.elements)
    weight = np.zeros((5, 1, 1, flat.channels), np.float32)
    ops.append(
        KernelCall(
            "head", OpKind.CLASSIFIER, (name,), flat, Shape(1, 1, 5), weight=weight, bias=np.zeros(5, np.float32)
        )
    )
    return Graph("random", "input", start, tuple(ops))


def _weighted(choose: random.Random, label: str, kind: str, name: str, shape: Shape) -> KernelCall:
    stride = choose.choice([1, 1, 2]) if min(shape.height, shape.width) >= 8 else 1
    kernel = 1 if kind == "pointwise" else 3
    pad = kernel // 2
    channels = shape.channels if kind == "depthwise" else choose.choice([8, 12, 16, 24, 48])
    out = Shape(
        (shape.height + 2 * pad - kernel) // stride + 1, (shape.width + 2 * pad - kernel) // stride + 1, channels
    )
    dims = (kernel, kernel, channels) if kind == "depthwise" else (channels, kernel, kernel, shape.channels)
    return KernelCall(
        label,
        OpKind.DEPTHWISE if kind == "depthwise" else OpKind.CONV,
        (name,),
        shape,
        out,
        (kernel, kernel),
        (stride, stride),
        (pad, pad),
        Clamp.RELU,
        np.zeros(dims, np.float32),
        np.zeros(channels, np.float32),
    )


def brute_force_check(arena: Arena) -> None:
    """Mark every byte in every step, from the buffers alone."""
    for step in range(min(b.first for b in arena.buffers), max(last for b in arena.buffers for _, last in b.spans) + 1):
        taken = np.zeros(arena.peak_bytes, bool)
        for buffer in arena.buffers:
            if any(first <= step <= last for first, last in buffer.spans):
                span = taken[arena.offsets[buffer.name] : arena.offsets[buffer.name] + buffer.size_bytes]
                assert len(span) == buffer.size_bytes
                assert not span.any(), (step, buffer.name)
                span[:] = True


@pytest.mark.parametrize("seed", range(50))
def test_random_networks_plan_within_two_percent_of_the_bound(seed: int) -> None:
    graph = random_graph(seed)
    layers = graph.weighted()
    choose = random.Random(seed + 99)
    scheme = (
        full_scheme(graph)
        if seed % 3 == 0
        else last_layers(graph, choose.randint(1, len(layers)), biases=choose.randint(1, len(layers)))
    )
    memory = plan_memory(graph, scheme)
    arena = memory.arena
    assert arena.peak_bytes <= 1.02 * arena.lower_bound_bytes
    brute_force_check(arena)


again = st.none() | st.tuples(st.integers(2, 6), st.integers(0, 8))
"""Steps after the last one before a buffer is alive again, and how long."""
buffers = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(0, 20), st.integers(0, 8), again), min_size=1, max_size=14
).map(
    lambda rows: [
        Buffer(f"b{i}", size, first, first + length, spans(first + length, gap))
        for i, (size, first, length, gap) in enumerate(rows)
    ]
)


def spans(last: int, gap: tuple[int, int] | None) -> tuple[int, int] | None:
    return None if gap is None else (last + gap[0], last + sum(gap))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(buffers)
def test_no_plan_overlaps_and_none_is_below_the_bound(rows: list[Buffer]) -> None:
    arena = plan_arena(rows, rounds=40)
    brute_force_check(arena)
    by_step = max(
        sum(aligned(b.size_bytes) for b in rows if any(x <= t <= y for x, y in b.spans)) for t in range(0, 45)
    )
    assert lower_bound(rows) == arena.lower_bound_bytes == by_step
    assert arena.peak_bytes >= by_step


def test_the_verifier_sees_an_overlap() -> None:
    a, b = Buffer("a", 8, 0, 2), Buffer("b", 8, 2, 3)
    with pytest.raises(OverlapError, match="a and b"):
        verify_plan(Arena((a, b), {"a": 0, "b": 4}, 16, 16))
    verify_plan(Arena((a, Buffer("b", 8, 3, 3)), {"a": 0, "b": 4}, 16, 16))


def test_plans_are_repeatable() -> None:
    graph = random_graph(7)
    scheme = full_scheme(graph)
    rows = buffers_of(training_program(graph, scheme), scheme)
    assert plan_arena(rows).offsets == plan_arena(rows).offsets
