"""The choice of the backend that computes a step.

Devices of other packages come in through the entry point group `port_agent.backends`: the name of the kind, and a class
that is a `Backend`. torch must know the device by then; torch's own group `torch.backends` is for that.
"""

from collections.abc import Callable, Mapping

from port_agent.backend.base import Backend, DeviceAbsentError
from port_agent.backend.cpu import CpuBackend
from port_agent.backend.cuda import CudaBackend
from port_agent.backend.mps import MpsBackend
from port_planner.ir.device_kinds import BACKEND_GROUP, CPU, CUDA, MPS

_MADE_BY: Mapping[str, Callable[[], Backend]] = {CPU: CpuBackend, CUDA: CudaBackend, MPS: MpsBackend}


def shares_host_memory(kind: str) -> bool:
    """Return whether memory of a kind of device is the host's memory; False for a device
    that the agent does not know.
    """
    try:
        return backend_of(kind).unified
    except DeviceAbsentError:
        return False


def backend_of(kind: str) -> Backend:
    """Return the backend of a kind of device; raises DeviceAbsentError if this machine has none."""
    if kind in _MADE_BY:
        return _MADE_BY[kind]()
    from importlib.metadata import entry_points  # which programs under a budget need not load

    others = entry_points(group=BACKEND_GROUP)
    if kind not in others.names:
        known = ", ".join((*_MADE_BY, *sorted(others.names)))
        raise DeviceAbsentError(
            f"this step is for the device {kind!r}; this agent computes on {known}: plan it again on one of them"
        )
    made: Backend = others[kind].load()()
    return made
