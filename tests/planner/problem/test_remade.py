"""What of a forward pass runs again for a segment of the backward pass: all that it needs, from what waits at a cut."""

import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import capture_step
from port_planner.ir.graph import Phase, Role, StepGraph
from port_planner.ir.lowering.rematerialize import effective_operands
from port_planner.problem.remade import RepeatedOperators

LAYERS, WIDTH, BATCH = 4, 16, 8


def recorded() -> StepGraph:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
    model = nn.Sequential(*layers)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    loss = lambda model, x, y: functional.mse_loss(model(x), y)  # noqa: E731
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, accumulate=2).graphs["last"]


def layer_by_layer(graph: StepGraph) -> list[int]:
    """Return the segment of every operator: of the weights' layer; the last layer's segment has the loss, too."""
    forward: list[int] = []
    layer = 0
    for i, op in enumerate(graph.ops):
        weights = [graph.storages[s].name for s in graph.reads[i] if graph.storages[s].role is Role.PARAMETER]
        if weights:
            named = int(weights[0].partition(".")[0])
            layer = named if op.phase is Phase.FORWARD or named == LAYERS - 1 else 2 * LAYERS - 2 - named
        forward.append(max(layer, *forward[-1:], 0))
    return forward


def test_a_segment_has_all_that_it_reads_and_makes_nothing_twice() -> None:
    graph = recorded()
    tiles = layer_by_layer(graph)
    before = RepeatedOperators(graph, tiles, range(len(graph.ops))).before()
    assert before and max(tiles) == 2 * LAYERS - 2
    made: dict[int, set[int]] = {}
    for i, again in before.items():
        assert list(again) == sorted(again) and all(graph.ops[r].phase is Phase.FORWARD for r in again)
        there = made.setdefault(tiles[i], set())
        assert not there & set(again)
        there |= set(again)
        for r in again:
            fresh = {s for q in there for s in graph.creates[q]}
            waits = {s for s in effective_operands(graph, r) if s not in fresh}
            assert all(graph.storages[s].nbytes <= BATCH * WIDTH * 4 or graph.storages[s].persistent for s in waits), (
                "what waits is what lies between layers, not what is inside of them"
            )


def test_what_the_last_segment_made_itself_is_not_made_again() -> None:
    graph = recorded()
    tiles = layer_by_layer(graph)
    turning = LAYERS - 1
    assert all(tiles[i] != turning for i in RepeatedOperators(graph, tiles, range(len(graph.ops))).before())
