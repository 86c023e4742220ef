"""What packing would take, of a step's own tensors: sizes with a margin, nothing that is not worth it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_agent import packing
from port_agent.training.packing_probe import MARGIN, WORTH_PACKING, PackingProbe
from port_agent.training.step_values import StepValues
from port_planner.capture.step import capture_step
from port_planner.ir.costs import Codec, PackingCost
from port_planner.ir.graph import StepGraph

ROWS, WIDTH = 128, 512
"""A quarter of a megabyte a tensor: large enough to be decided about."""


def step() -> StepGraph:
    """Return the step of a net with ReLU, whose outputs may be sparse, and linear layers, whose outputs are not."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 2)
    )
    loss = lambda m, x, y: functional.cross_entropy(m(x), y)  # noqa: E731
    batch = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).graphs["step"]


GRAPH = step()


def shown(*densities: float) -> tuple[PackingCost, ...]:
    """Return what a probe finds whose graph's tensors have these densities, one step after the other."""
    probe = PackingProbe(GRAPH)
    for density in densities:
        values = StepValues(GRAPH)
        for s, storage in enumerate(GRAPH.storages):
            count = storage.nbytes // 4
            contents = torch.zeros(count)
            contents[: round(density * count)] = 1.5
            values.base[s] = contents
        for look in probe.watchers().values():
            look(values)
    return probe.costs()


def test_the_densest_step_counts_and_a_margin_is_kept() -> None:
    found = shown(0.5, 0.25)
    assert found
    for cost in found:
        nbytes = GRAPH.storages[cost.storage].nbytes
        assert cost.codec is Codec.BITMAP and cost.density == pytest.approx(0.5, abs=1e-3)
        expected = nbytes / 32 + (1 + MARGIN) * 0.5 * nbytes
        assert cost.reserved_bytes == pytest.approx(expected, rel=1e-3)
        assert cost.pack_seconds > 0 and cost.unpack_seconds > 0 and cost.joules == 0.0


def test_what_is_dense_in_any_step_is_left_alone() -> None:
    assert not shown(0.95) and not shown(0.5, 0.95)
    assert not shown(WORTH_PACKING / (1 + MARGIN)), "with its margin it is not worth it"


def test_without_the_library_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "available", lambda: False)
    assert not PackingProbe(GRAPH).watchers() and not PackingProbe(GRAPH).costs()
