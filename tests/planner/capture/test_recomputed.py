"""What gradient checkpointing computes twice is in the graph once, with the same numbers drawn."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from port_planner.base.errors import CaptureError
from port_planner.capture.step import Repetition, capture_step
from port_planner.ir.graph import StepGraph


class Layers(nn.Module):
    """Two halves with dropout, the first checkpointed if asked for."""

    def __init__(self, checkpointed: bool, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.GELU())
        self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            x = checkpoint(self.first, x.requires_grad_(self.reentrant), use_reentrant=self.reentrant)
        else:
            x = self.first(x)
        result: torch.Tensor = self.second(x)
        return result


def captured(model: nn.Module) -> StepGraph:
    torch.manual_seed(1)
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = [(torch.randn(5, 4), torch.randint(0, 3, (5,)))]
    entropy = lambda m, x, y: functional.cross_entropy(m(x.clone()), y)  # noqa: E731
    return capture_step(model, entropy, optimizer, batch, repetition=Repetition(others)).graphs["step"]


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_step_is_the_step_without_checkpoints(reentrant: bool) -> None:
    plain, twice = captured(Layers(False)), captured(Layers(True, reentrant=reentrant))
    names = Counter(op.name for op in plain.ops)
    more = Counter(op.name for op in twice.ops) - names
    assert set(more) <= {"aten::mm", "aten::add_.Tensor"}  # a reentrant one also wants the gradient of its input
    assert names["aten::bernoulli_.float"] == 2
    assert not Counter(op.name for op in twice.ops if op.random) - Counter(op.name for op in plain.ops if op.random)


def test_what_is_written_to_afterwards_is_not_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = checkpoint(lambda t: (t @ self.weight).sin().mul_(2).cos(), x, use_reentrant=False)
            result: torch.Tensor = inner[:, :3]
            return result

    graph = captured(Twice())
    assert sum(op.name == "aten::sin" for op in graph.ops) == 2


def test_seeding_inside_the_step_is_refused_with_its_line() -> None:
    class Seeding(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"the step sets torch's random generator before aten::bernoulli_"):
        captured(Seeding(False))
