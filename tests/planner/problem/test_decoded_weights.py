"""A graph whose weights are decoded keeps its other operators, and every number of its draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Role, StepGraph, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.problem.decoded_weights import (
    PAIRS,
    CodedWeight,
    ShortWeight,
    decoded_bytes,
    widened_bytes,
    with_decoded,
)

WIDTH = 128


def step() -> StepGraph:
    """Return the step of a net with two frozen layers."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    batch = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    return capture_step(model, lambda m, x, y: functional.mse_loss(m(x), y), optimizer, batch).graphs["step"]


def names_of(graph: StepGraph) -> list[str]:
    return [storage.name for storage in graph.storages]


@pytest.mark.parametrize(("dtype", "ops"), [("float32", (2, 3)), ("bfloat16", (3, 4))])
def test_weights_become_temporaries_of_one_operator_each(dtype: str, ops: tuple[int, int]) -> None:
    graph = step()
    items = graph.storages[0].nbytes // 4 if dtype == "float32" else graph.storages[0].nbytes // 2
    weights = {
        "parameter/0.weight": CodedWeight("0.weight", dtype, items, 128, paired=False),
        "parameter/2.weight": CodedWeight("2.weight", dtype, items, 64, paired=True),
    }
    assert {s.key for s in graph.storages} >= weights.keys()
    decoded = with_decoded(graph, weights)
    verify_graph(decoded)
    verify_operands(decoded)
    uses = [len(graph.uses[s]) for name in ("0.weight", "2.weight") for s in [names_of(graph).index(name)]]
    assert uses == [1, 2], "nothing is trained behind the first"
    assert len(decoded.ops) == len(graph.ops) + sum(n * count for n, count in zip(ops, uses, strict=True))
    kept = iter(op.name for op in decoded.ops)
    assert all(op.name in kept for op in graph.ops), "in their order"
    names = {s.name: s for s in decoded.storages if s.role is Role.BUFFER}
    assert names.keys() == {"0.weight codes", "0.weight scales", "2.weight codes", "2.weight scales", PAIRS}
    assert names["0.weight codes"].nbytes == items and names["2.weight codes"].nbytes == items // 2
    size = graph.storages[names_of(graph).index("0.weight")].nbytes
    assert decoded_bytes(decoded) == {
        "0.weight": (size, items + items // 128 * 4),
        "2.weight": (size, items // 2 + items // 64 * 4),
    }
    made = [s for s, name in enumerate(names_of(decoded)) if name in ("0.weight", "2.weight")]
    assert len(made) == sum(uses)
    for s in made:
        assert decoded.storages[s].role is Role.TEMPORARY and decoded.creates[decoded.uses[s][0]] == (s,)
        assert decoded.uses[s][-1] - decoded.uses[s][0] < max(ops), "it lives for one operator"


def test_a_weight_in_16_bits_is_widened_before_each_use() -> None:
    graph = step()
    weights = {f"parameter/{k}.weight": ShortWeight(f"{k}.weight", "bfloat16", WIDTH * WIDTH) for k in (0, 2)}
    widened = with_decoded(graph, weights)
    verify_graph(widened)
    verify_operands(widened)
    assert len(widened.ops) == len(graph.ops) + 3, "nothing is trained behind the first"
    assert widened_bytes(widened) == {f"{k}.weight": (4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH) for k in (0, 2)}
    for s, storage in enumerate(widened.storages):
        if storage.name in ("0.weight", "2.weight"):
            assert storage.role is Role.TEMPORARY and len(widened.uses[s]) == 2, "it lives for one operator"


def test_of_a_table_in_16_bits_only_the_rows_that_are_looked_up_are_widened() -> None:
    model = nn.Sequential(nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, 4))
    model[0].requires_grad_(False)
    batch = torch.randint(0, 1000, (8,)), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    graph = capture_step(model, lambda m, x, y: functional.mse_loss(m(x), y), optimizer, batch).graphs["step"]
    widened = with_decoded(graph, {"parameter/0.weight": ShortWeight("0.weight", "float16", 1000 * WIDTH)})
    verify_graph(widened)
    verify_operands(widened)
    lookup = next(i for i, op in enumerate(widened.ops) if op.name == "aten::embedding")
    assert widened.ops[lookup + 1].name == "aten::_to_copy" and len(widened.ops) == len(graph.ops) + 1
    made = [value for value in widened.values if value.shape == (8, WIDTH) and value.dtype == "float16"]
    assert len(made) == 1 and widened.storages[made[0].storage].nbytes == 8 * WIDTH * 2
    whole = [s for s, storage in enumerate(widened.storages) if storage.name == "0.weight"]
    assert not any(widened.uses[s] for s in whole)


def test_without_any_the_graph_is_the_same() -> None:
    graph = step()
    assert with_decoded(graph, {}) == graph and not decoded_bytes(graph) and not widened_bytes(graph)
