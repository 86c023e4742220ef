"""What torch says of devices: which kind a tensor lies on, and the states of their generators."""

import pytest
import torch

from port_planner.base.errors import CaptureError
from port_planner.ir.device_kinds import CPU, MPS
from port_planner.ir.torch_device import (
    device_name,
    generator_states,
    kind_of,
    kinds_of,
    known_kinds,
    restore_generators,
    synchronize,
)
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


def test_a_tensor_on_a_device_that_no_plan_can_name_is_refused() -> None:
    with pytest.raises(CaptureError, match="meta"):
        kind_of(torch.ones(2, device="meta"))
    assert kind_of(torch.ones(2)) == CPU


def test_a_backend_that_is_registered_is_known() -> None:
    SimBackend()
    assert NAME in known_kinds()
    assert kinds_of([torch.ones(2), torch.ones(2).to(NAME), "not a valid tensor"]) == {CPU, NAME}
    synchronize(NAME)


def test_generators_are_put_back() -> None:
    SimBackend()
    states = generator_states((NAME,))
    assert sorted(states) == [CPU, NAME]
    first = torch.rand(3)
    restore_generators(states)
    assert torch.equal(torch.rand(3), first)


def test_a_device_is_called_what_its_maker_calls_it() -> None:
    """Bits are those of one chip, so references name it."""
    there = torch.backends.mps.is_available()
    assert device_name(CPU) == CPU
    assert device_name(MPS).startswith("Apple ") if there else device_name(MPS) == MPS
