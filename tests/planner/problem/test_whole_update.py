"""All micro-batches of an update in one graph: the operators of each, in an order that uses a
weight's bytes for all of them.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.step import Capture, capture_step
from port_planner.ir.graph import Op, Phase, Role, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.operands.verify import verify_operands
from port_planner.problem.whole_update import WholeUpdate, whole_update
from port_planner.search.plan_step import plan_step
from tests.agent.exactness import flat_costs

COUNT, WIDTH, BATCH = 4, 256, 4
ROOM = 8 * WIDTH * WIDTH * 4
"""Bytes for about one layer's weight, its gradients and what a micro-batch has of it."""


class Tied(nn.Module):
    """A language model in small: the embedding is the head, too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.layers(self.embed(x)), self.embed.weight)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def recorded(dropout: float = 0.0, clip: float | None = None, count: int = COUNT) -> list[StepGraph]:
    torch.manual_seed(0)
    model = Tied(dropout)
    batch = torch.randint(0, WIDTH, (BATCH,)), torch.randint(0, WIDTH, (BATCH,))
    made = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return micro_batches(capture_step(model, loss_of, made, batch, accumulate=count, clip_grad_norm=clip), count)


def micro_batches(capture: Capture, count: int) -> list[StepGraph]:
    graphs = capture.graphs
    return [graphs["first"], *[graphs["next"]] * (count - 2), graphs["last"]] if count > 2 else [*graphs.values()]


def whole(graphs: list[StepGraph], free_bytes: int = ROOM, *, remake: bool = False) -> WholeUpdate:
    found = whole_update(graphs, free_bytes, remake=remake)
    assert found is not None
    verify_operands(found.graph)
    return found


def moved_bytes(graph: StepGraph) -> int:
    costs = flat_costs(graph)
    plan = plan_step(graph, costs, ram_bytes=ROOM, strategy="greedy").plan
    assert plan is not None
    program = lower(graph, costs, plan)
    return program.read_bytes + program.written_bytes


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_every_operator_of_every_micro_batch_is_there_once(clip: float | None, count: int) -> None:
    graphs = recorded(clip=clip, count=count)
    update = whole(graphs)
    dropped = len([op for op in graphs[0].ops if op.name == "aten::copy_"])
    assert len(update.origin) == len(set(update.origin)) == sum(len(graph.ops) for graph in graphs) - dropped
    for op, (m, i) in zip(update.graph.ops, update.origin, strict=True):
        assert (op.name, op.phase) == (graphs[m].ops[i].name, graphs[m].ops[i].phase)
    assert len(update.graph.batch) == 2 * count and len(update.graph.aux) == count - 1
    assert update.graph.scalars == graphs[-1].scalars


@pytest.mark.slow
def test_fewer_bytes_move_than_for_one_micro_batch_after_the_other() -> None:
    graphs = recorded()
    alone = sum(moved_bytes(graph) for graph in graphs)
    assert moved_bytes(whole(graphs).graph) < 0.6 * alone


def test_gradients_are_summed_in_the_step_in_the_order_of_micro_batches() -> None:
    update = whole(recorded())
    assert not any(storage.role is Role.GRADIENT for storage in update.graph.storages)
    sums: dict[int, list[int]] = {}
    for op, (m, _) in zip(update.graph.ops, update.origin, strict=True):
        if op.phase is Phase.BACKWARD and op.name == "aten::add_.Tensor":
            sums.setdefault(op.writes[0], []).append(m)
    of_weights = [order for order in sums.values() if len(order) >= COUNT - 1]
    assert len(of_weights) == 9 and all(order == sorted(order) for order in of_weights)


def test_a_tied_weights_first_gradient_is_made_when_the_second_is() -> None:
    """What it is made of is smaller than it is."""
    graph = whole(recorded()).graph
    sums = [k for k, op in enumerate(graph.ops) if op.name == "aten::embedding_dense_backward"]
    assert len(sums) == COUNT
    assert all({graph.ops[k + 1].name, graph.ops[k + 2].name} == {"aten::mm", "aten::add_.Tensor"} for k in sums)


def test_random_operators_name_the_order_in_which_they_draw() -> None:
    graphs = recorded(dropout=0.5)
    update = whole(graphs)
    drawing = [update.origin[together[0]] for together in update.graph.draws]
    assert len(drawing) == 4 * COUNT and drawing == sorted(drawing)
    places = [together[0] for together in update.graph.draws]
    assert places != sorted(places) and min(places) == places[0], "the first draws first, others in another order"


def test_what_the_backward_pass_needs_is_made_again_in_its_segment() -> None:
    graphs = recorded(dropout=0.5)
    update = whole(graphs, remake=True)
    again = {origin: n for origin, n in Counter(update.origin).items() if n > 1}
    assert again and {graphs[m].ops[i].phase for m, i in again} == {Phase.FORWARD}
    repeated = [op for op, origin in zip(update.graph.ops, update.origin, strict=True) if origin in again]
    assert {op.name for op in repeated} >= {"aten::mul.Tensor", "aten::bernoulli_.float"}
    assert any(len(together) > 1 for together in update.graph.draws), "a mask that is made again is the same mask"
    assert _waiting(update.graph) < _waiting(whole(graphs).graph)


def _waiting(graph: StepGraph) -> int:
    """Return how many tensors of the forward pass are there when the backward pass needs them."""
    phases = (
        [graph.ops[u].phase for u in uses]
        for s, uses in enumerate(graph.uses)
        if graph.storages[s].role is Role.TEMPORARY
    )
    return sum(used[0] is Phase.FORWARD and Phase.BACKWARD in used for used in phases if used)


@pytest.mark.slow
def test_no_graph_where_a_number_would_be_another() -> None:
    graphs = recorded(dropout=0.5)
    assert whole_update([*graphs[:-1], recorded()[-1]], ROOM, remake=False) is None, "another model's step"

    def sampling(op: Op) -> Op:
        return replace(op, name="aten::multinomial") if op.random else op

    sampled = [replace(graph, ops=tuple(map(sampling, graph.ops))) for graph in graphs]
    assert whole_update(sampled, ROOM, remake=False) is None, "how much it draws depends on values"


@pytest.mark.slow
def test_no_graph_where_a_micro_batch_reads_what_the_one_before_changes_later() -> None:
    """A counter that the beginning of the model reads and its end advances."""

    class Counted(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.seen: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layers(self.embed(x) + self.seen)
            with torch.no_grad():
                self.seen += hidden.detach().mean()
            return functional.linear(hidden, self.embed.weight)

    torch.manual_seed(0)
    model = Counted()
    batch = torch.randint(0, WIDTH, (BATCH,)), torch.randint(0, WIDTH, (BATCH,))
    capture = capture_step(model, loss_of, torch.optim.AdamW(model.parameters()), batch, accumulate=COUNT)
    assert whole_update(micro_batches(capture, COUNT), ROOM, remake=False) is None
    assert whole_update(micro_batches(capture, COUNT), 1 << 30, remake=False) is not None, "one after the other"
