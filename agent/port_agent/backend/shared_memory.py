"""Host memory that a device reaches at the same address, so that its contents need not be copied.

Used for a GPU that computes in the host's memory. torch's own allocator there returns memory
that the host cannot address.
"""

import weakref
from collections.abc import Callable

import torch

from port_agent.backend.base import Event
from port_planner.torch_compat.devices import storage_over


class SharedMemory:
    """Device tensors over host memory, which is kept until the device has finished all work that it was
    given before they were freed.

    `take`: allocates host memory that the device reaches; `reached`: the point up to which the device has been given
    work. `changed`: called whenever `live_bytes` has changed.
    """

    def __init__(
        self,
        device: torch.device,
        take: Callable[[int], torch.Tensor],
        reached: Callable[[], Event],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._take, self._reached, self._changed = device, take, reached, changed
        self._held: dict[int, torch.Tensor] = {}
        """The device's storage -> the host memory behind it."""
        self.live_bytes = self.peak_bytes = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return at least `nbytes` bytes as a tensor on the device."""
        host = self._take(nbytes)
        size = host.numel()
        storage = storage_over(host.data_ptr(), self._device, size)
        key = id(storage)
        self._held[key] = host
        self._count(size)
        gone = weakref.finalize(storage, self._release, key, size)  # when the last tensor on it goes
        gone.atexit = False
        made: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (size,), (1,))
        return made

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        """Return the host's view of these bytes; None for other device memory."""
        host = self._held.get(id(memory.untyped_storage()))
        begin = memory.storage_offset()
        return None if host is None else host[begin : begin + memory.numel()]

    def reset_peak(self) -> None:
        """Restart the peak."""
        self.peak_bytes = self.live_bytes

    def _release(self, key: int, size: int) -> None:
        self._reached().synchronize()
        del self._held[key]
        self._count(-size)

    def _count(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._changed()
