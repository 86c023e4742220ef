"""Copies between ordinary host memory and a device's memory, through a ring of pinned buffers.

A separate thread fills and empties the buffers, so that neither host nor device waits for a copy that is not needed
yet. Pinned memory is slow to allocate and is never paged; the ring is allocated once.
"""

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.staging import DeviceSide, Staging, address

MIN_BYTES = 64 << 10
"""Smallest copy through the ring: CUDA copies less from ordinary memory at once and without waiting (its notes on
synchronisation behaviour).
"""


class RingCopy:
    """The event of a copy through the ring, issued part by part by the ring's thread."""

    __slots__ = ("_issued",)

    def __init__(self, issued: "Future[Event]") -> None:
        self._issued = issued

    def landed(self) -> Event:
        """Return once the last part has been issued and has arrived; raises an error of the transfer."""
        return self._issued.result()

    def done(self) -> bool:
        """Return whether all of it is issued; a copy to the host has then arrived."""
        return self._issued.done()

    def query(self) -> bool:
        """Return whether everything has arrived."""
        return self.done() and self.landed().query()

    def synchronize(self) -> None:
        """Return once everything has arrived."""
        self.landed().synchronize()


class TransferRing:
    """The ring and its thread, shared by all steps of a job.

    `chunk_bytes`: size of each buffer. `around`: context in which its thread copies.
    """

    def __init__(
        self,
        backend: Backend,
        chunk_bytes: int,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.staging, self._around = Staging(backend, chunk_bytes), around
        self._thread = ThreadPoolExecutor(1, "transfer-ring")

    def close(self) -> None:
        """End the thread after all its copies are issued."""
        self._thread.shutdown()

    def into_device(self, target: torch.Tensor, source: torch.Tensor) -> RingCopy:
        """Begin to copy host bytes to the device, after all work given to the device so far."""
        return RingCopy(self._thread.submit(self._deliver, self.staging.side(target), source))

    def out_of_device(self, target: torch.Tensor, source: torch.Tensor) -> RingCopy:
        """Begin to copy device bytes to the host, after all work given to the device so far."""
        return RingCopy(self._thread.submit(self._fetch, self.staging.side(source), target))

    def _deliver(self, side: DeviceSide, source: torch.Tensor) -> Event:
        with self._around():
            for place, nbytes in self._chunks(source):
                ctypes.memmove(side.host_address(place), address(source) + place, nbytes)
                side.deliver(place, nbytes)
        return side.landed

    def _fetch(self, side: DeviceSide, target: torch.Tensor) -> Event:
        with self._around():
            for place, nbytes in self._chunks(target):
                ctypes.memmove(address(target) + place, side.fetch(place, nbytes), nbytes)
        return side.landed

    def _chunks(self, contents: torch.Tensor) -> list[tuple[int, int]]:
        total, chunk = contents.numel(), self.staging.chunk_bytes
        return [(place, min(chunk, total - place)) for place in range(0, total, chunk)]
