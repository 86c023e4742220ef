"""The rate that recognises most of what it did not train on, and whether that is more than nothing."""

from __future__ import annotations

import pytest
import torch

from port_planner.mcu.compile import compile_model
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
