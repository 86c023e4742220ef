"""A step's device is found by its kind, or refused."""

import pytest

from agent.backend.base import DeviceAbsentError
from agent.backend.choose import backend_of
from agent.backend.cpu import CpuBackend


def test_the_cpu_is_everywhere() -> None:
    assert isinstance(backend_of("cpu"), CpuBackend)


def test_a_device_that_this_agent_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(DeviceAbsentError, match=r"'xla'.*cpu, cuda, mps"):
        backend_of("xla")
