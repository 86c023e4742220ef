"""What a leader makes of averages, by hand and by the round's process, over rounds that are separate processes."""

from pathlib import Path

import numpy as np
import pytest

from tests.agent.federate.jobs import gestures_bundle, needs_flower

pytest.importorskip("flwr")

from port_agent.federate.orders import ServerStrategy, StrategySettings
from port_agent.federate.tensors import federated_tensors
from tests.agent.federate.supervisor import Led

pytestmark = [needs_flower, pytest.mark.process]

VARIANCE = "norm.running_var"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gestures_bundle(tmp_path_factory.mktemp("bundles"), 0)


def led(root: Path, bundle: Path, step: float) -> Led:
    """Return two devices with equal data, of which each adds `step` in each round."""
    made = Led(root, [bundle, bundle])
    for member in made.members.values():
        member.step = step
    return made


def test_server_momentum_goes_on_over_rounds(tmp_path: Path, bundle: Path) -> None:
    made, settings = (
        led(tmp_path, bundle, 1.0),
        StrategySettings(strategy=ServerStrategy.FEDAVGM, rate=0.5, momentum=0.8),
    )
    weights = {name: array.astype(np.float64) for name, array in federated_tensors(bundle).initial().items()}
    velocity = 0.0
    for number in (1, 2, 2, 3):  # the second is cut before it is noted, and done again
        made.round(number=number, server=settings)
    for _ in range(3):
        velocity = 0.8 * velocity + 1.0
        weights = {name: array + 0.5 * velocity for name, array in weights.items()}
    averaged = made.averaged()
    assert all(np.allclose(averaged[name], weights[name], atol=1e-5) for name in weights)


def test_adam_takes_the_average_change_for_its_gradient(tmp_path: Path, bundle: Path) -> None:
    made = led(tmp_path, bundle, -2.0)
    settings = StrategySettings(strategy=ServerStrategy.FEDADAM, rate=0.25, betas=(0.9, 0.99), tau=1e-3)
    weights = {name: array.astype(np.float64) for name, array in federated_tensors(bundle).initial().items()}
    first = second = 0.0
    for number in (1, 2):
        made.round(number=number, server=settings)
        first, second = 0.9 * first + 0.1 * -2.0, 0.99 * second + 0.01 * 4.0
        rate = 0.25 * np.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
        weights = {name: array + rate * first / (np.sqrt(second) + 1e-3) for name, array in weights.items()}
    averaged = made.averaged()
    assert all(np.allclose(averaged[name], weights[name], atol=1e-4) for name in weights)


def test_a_running_variance_gets_no_negative_numbers(tmp_path: Path, bundle: Path) -> None:
    made = Led(tmp_path, [bundle, bundle])
    for member in made.members.values():
        member.changed = lambda arrays: {name: np.multiply(array, np.float32(0.25)) for name, array in arrays.items()}
    made.round(server=StrategySettings(strategy=ServerStrategy.FEDAVGM, rate=2.0, momentum=0.0))
    averaged, initial = made.averaged(), federated_tensors(bundle).initial()
    assert VARIANCE in averaged and np.array_equal(averaged[VARIANCE], np.multiply(initial[VARIANCE], np.float32(0.25)))
    assert np.allclose(averaged["head.weight"], np.multiply(initial["head.weight"], np.float32(-0.5)), atol=1e-6)
