"""What autograd saves may lie in the host's memory: the same numbers, the same recording, and
less of the device's memory.
"""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.capture.saved_on_host import SavedOnHost
from port_planner.capture.step import Repetition, capture_step
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

torch.set_num_threads(1)  # with more, plain PyTorch's own products do not round alike in every run

ROWS = 512


class Model(nn.Module):
    """Layers whose saved tensors are results, operands, views of both and masks; one storage is saved by several."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.norm(self.first(x)))
        left, right = h.chunk(2, -1)
        return self.second(functional.dropout(torch.tanh(left) * right.sigmoid() + left, 0.1))


@pytest.fixture
def backend() -> Iterator[SimBackend]:
    made = SimBackend()
    made.races()
    yield made
    assert made.races() == []


def model_and_batch() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return Model().to(NAME), (torch.randn(ROWS, 256).to(NAME), torch.randint(0, 10, (ROWS,)).to(NAME))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def gradients(backend: SimBackend, *, saved: bool) -> tuple[list[torch.Tensor], int]:
    model, batch = model_and_batch()
    gc.collect()
    before = backend.allocated_bytes()
    backend.reset_peak()
    if saved:
        with SavedOnHost(model.parameters(), lambda: True):
            loss_of(model, *batch).backward()
    else:
        loss_of(model, *batch).backward()
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return found, backend.peak_bytes() - before


def test_gradients_are_the_same_to_the_bit_and_the_device_holds_less(backend: SimBackend) -> None:
    expected, plain_bytes = gradients(backend, saved=False)
    found, bytes_held = gradients(backend, saved=True)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert bytes_held < 0.75 * plain_bytes, (bytes_held, plain_bytes)


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_is_recorded_the_same_whether_what_is_saved_leaves_or_not(every: int, backend: SimBackend) -> None:
    def recorded(*, saved: bool) -> tuple[object, float]:
        model, batch = model_and_batch()
        leaves = partial(next, cycle([True] if every == 1 else [True, False]))  # no code of a program that counts
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not saved:
            capture = capture_step(model, loss_of, optimizer, batch, repetition=Repetition([batch]))
        else:
            with SavedOnHost(model.parameters(), leaves):
                capture = capture_step(model, loss_of, optimizer, batch, repetition=Repetition([batch]))
        return capture.graphs, capture.loss

    assert recorded(saved=True) == recorded(saved=False)
