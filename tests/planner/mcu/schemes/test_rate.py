"""The rate that recognises most of what it did not train on, and whether that is more than nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from port_planner.mcu.compile import compile_model, with_growth
from port_planner.mcu.schemes.rate import MeasuredRate, RateChoice, choose_rate
from port_planner.mcu.zoo import DigitsNet
from tests.planner.mcu.networks import bars, settled


@pytest.mark.slow
def test_a_rate_that_destroys_is_not_chosen() -> None:
    torch.manual_seed(1)
    data, labels = bars()
    model = compile_model(settled(DigitsNet(2), data), data)
    steps: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        steps.append((done, total))

    inputs = model.quantize_input(data)
    found = choose_rate(model, inputs, labels, epochs=6, rates=(30.0, 0.03), progress=note)
    assert found.best.rate == 0.03 and found.helps and found.best.accuracy > 0.8
    assert found == choose_rate(model, inputs, labels, epochs=6, rates=(30.0, 0.03)) and steps == [
        (0, 2),
        (1, 2),
        (2, 2),
    ]


def test_of_equals_the_slowest_is_taken_and_no_gain_is_said() -> None:
    rates = tuple(MeasuredRate(rate, (0.5, 0.7)) for rate in (0.1, 0.001, 0.01))
    found = RateChoice(rates, untrained=0.6)
    assert found.best.rate == 0.001 and found.best.accuracy == 0.6 and not found.helps


def waves(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return waves [N, 24, 3] of three frequencies, in noise, and which frequency each has."""
    chosen = np.random.default_rng(0)
    labels = chosen.integers(0, 3, samples)
    phase, size = chosen.uniform(0, 2 * np.pi, (samples, 1)), chosen.uniform(0.5, 1.0, (samples, 1))
    turned = 2 * np.pi * np.array([0.04, 0.12, 0.3])[labels][:, None] * np.arange(24)
    data = 0.1 * chosen.normal(size=(samples, 24, 3))
    data[:, :, 0] += size * np.sin(turned + phase)
    return data.astype(np.float32), labels


class Listener(nn.Module):
    """A recurrent layer and a head, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


@pytest.mark.slow
def test_random_weights_need_room_to_grow_and_the_layer_that_lacks_it_is_named() -> None:
    """Without room, a recurrent layer recognises three frequencies no better than chance; with room, all of them."""
    data, labels = waves(360)
    narrow = compile_model(Listener().eval(), data)
    learnt = []
    for model in (narrow, with_growth(narrow, data, 8.0)):
        assert model.quantized.input == narrow.quantized.input
        inputs = model.quantize_input(data)
        learnt.append(choose_rate(model, inputs, labels, epochs=12, rates=(0.1,)))
    cramped, roomy = learnt
    assert cramped.best.accuracy < 0.5 and "cell_ih" in cramped.cramped
    assert roomy.best.accuracy > 0.9 and not roomy.cramped
