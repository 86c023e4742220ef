"""Every backend has all words of the protocol."""

import inspect
from typing import Any

import pytest

from port_agent.backend.base import Backend
from port_agent.backend.cpu import CpuBackend
from port_agent.backend.cuda import CudaBackend
from port_agent.backend.mps import MpsBackend
from tests.simulated_device import SimBackend

WORDS = [name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [CpuBackend, CudaBackend, MpsBackend, SimBackend])
def test_a_backend_takes_what_the_protocol_says(kind: Any) -> None:
    assert len(WORDS) > 8
    for word in WORDS:
        taken, meant = inspect.signature(getattr(kind, word)), inspect.signature(getattr(Backend, word))
        assert list(taken.parameters) == list(meant.parameters), word
    assert isinstance(kind.kind, str) and isinstance(kind.addressable, bool)
    assert "unified" in kind.__dict__ or "unified" in inspect.getsource(kind.__init__)
