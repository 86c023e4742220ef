"""Which backend computes a step."""

from collections.abc import Callable

from agent.backend.base import Backend, DeviceAbsentError
from agent.backend.cpu import CpuBackend
from agent.backend.cuda import CudaBackend
from agent.backend.mps import MpsBackend
from planner.ir.devices.kinds import CPU, CUDA, MPS

_MADE_BY: dict[str, Callable[[], Backend]] = {CPU: CpuBackend, CUDA: CudaBackend, MPS: MpsBackend}


def backend_of(kind: str) -> Backend:
    """Return the backend of a kind of device; raises DeviceAbsentError where this machine has none."""
    if kind not in _MADE_BY:
        raise DeviceAbsentError(
            f"this step is for the device {kind!r}; this agent computes on {', '.join(_MADE_BY)}: plan it again on one of them"
        )
    return _MADE_BY[kind]()
