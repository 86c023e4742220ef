"""A graph whose weights are decoded keeps its other operators, and every number of its draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Role, StepGraph, verify_graph
from port_planner.ir.operands.verify import verify_operands
from port_planner.problem.decoded_weights import PAIRS, CodedWeight, decoded_bytes, with_decoded

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


def test_without_any_the_graph_is_the_same() -> None:
    graph = step()
    assert with_decoded(graph, {}) == graph and not decoded_bytes(graph)
