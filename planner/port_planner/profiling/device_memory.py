"""The device memory that an operator takes beyond its results, from the statistics of torch's allocator there."""

from types import ModuleType

from port_planner.ir.device_kinds import CPU
from port_planner.ir.torch_device import module_of, synchronize

_STATISTICS = ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")
"""Functions that torch's module for a device must provide; the one for Apple's GPU has no peak."""


class DeviceWorkspaceMeter:
    """Measures one call at a time on a kind of device; returns 0 if torch records no peak there."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        module = None if kind == CPU else module_of(kind)
        self._module: ModuleType | None = module if all(hasattr(module, name) for name in _STATISTICS) else None
        self._before = 0

    @property
    def sees(self) -> bool:
        """Whether it can measure anything."""
        return self._module is not None

    def start(self) -> None:
        """Start measuring a call."""
        synchronize(self.kind)
        if self._module is not None:
            self._module.reset_peak_memory_stats()
            self._before = self._module.memory_allocated()

    def stop(self) -> int:
        """Return the bytes; the results of the call must still be alive."""
        synchronize(self.kind)
        if self._module is None:
            return 0
        now, peak = int(self._module.memory_allocated()), int(self._module.max_memory_allocated())
        return max(0, peak - max(now, self._before))
