"""The count from one capture against the planner's own for captures of the sets themselves."""

from __future__ import annotations

import pytest
import torch

from port_planner.capture.step import Capture, capture_step
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.sparse.bytes import GraphBytes, TrainedBytes, trained_parameters
from tests.planner.residual_network import Residual, classify, sets
from tests.planner.steps import costs_of

BASE = 1000


def capture(trained: frozenset[str] | None = None, **options: float) -> Capture:
    torch.manual_seed(0)
    model = Residual()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)
    batch = torch.randn(16, 3, 12, 12), torch.randint(0, 10, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return capture_step(model, classify, optimizer, batch, **options)  # type: ignore[arg-type]


def kept(made: Capture) -> int:
    return max(
        lower(graph, costs_of(graph, base=BASE), Plan(), check_budget=False).peak_bytes
        for graph in made.graphs.values()
    )


def test_parameters_come_in_the_order_of_the_forward_pass() -> None:
    names = trained_parameters(capture().graphs["step"])
    assert [name for name in names if name.endswith("weight")] == [
        "stem.weight",
        "norm.weight",
        "body.weight",
        "groups.weight",
        "down.weight",
        "layer.weight",
        "up.weight",
        "head.weight",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"accumulate": 2}], ids=str)
def test_the_count_is_that_of_a_capture_of_the_set(options: dict[str, float]) -> None:
    full = capture(None, **options)
    needed = TrainedBytes(full.graphs, {name: costs_of(graph, base=BASE) for name, graph in full.graphs.items()})
    assert needed(frozenset(trained_parameters(next(iter(full.graphs.values()))))) == kept(full)
    for trained in sets(4):
        real = kept(capture(trained, **options))
        assert real <= needed(trained) <= 1.02 * real, sorted(trained)


def test_less_trained_never_needs_more() -> None:
    graph = capture().graphs["step"]
    counted = GraphBytes(graph, costs_of(graph, base=BASE, workspace=50))
    for trained in sets(40):
        for name in trained:
            assert counted.peak(trained - {name}) <= counted.peak(trained)
            assert counted.seconds(trained - {name}) <= counted.seconds(trained)
            assert counted.joules(trained - {name}) <= counted.joules(trained)
    everything = frozenset(trained_parameters(graph))
    assert counted.seconds(everything) == pytest.approx(1e-4 * len(graph.ops))
    assert counted.joules(everything) == pytest.approx(2e-4 * len(graph.ops))  # half of it by the device at rest
    assert counted.peak(frozenset({"head.bias"})) < counted.peak(frozenset({"stem.bias"})) < counted.peak(everything)
