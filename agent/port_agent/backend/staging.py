"""Transfers between a device's memory and a page file through two host buffers, filled and emptied in turn.

Only the page thread uses them. While it writes one buffer to the file, the device copies the next chunk into the other;
while the device takes one, the file is read into the other. Where memory is shared, pages that the host can address go
directly to the file and back without a copy, if that was measured to be faster.
"""

from collections.abc import Callable

import torch

from port_agent.backend.base import Backend, Event
from port_agent.backend.cpu import DONE
from port_agent.backend.host_copies import HostCopies
from port_planner.base.direct_io import BLOCK

BUFFERS = 2

address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
"""Address of a tensor by torch's own method; interception observes the pointers of a program by another one."""


class Staging:
    """Buffers of `chunk_bytes` each; no transfer moves more at once.

    `shares`: pages that the host can address are not copied.
    """

    def __init__(self, backend: Backend, chunk_bytes: int, *, shares: bool = False) -> None:
        self.backend, self.chunk_bytes, self.shares = backend, chunk_bytes, shares
        self.buffers = [backend.allocate_host(chunk_bytes) for _ in range(BUFFERS)]
        self.emptied: list[Event] = [DONE] * BUFFERS
        """Event for each buffer that occurs when the device has read its contents."""
        self._turn = 0
        self._pages: torch.Tensor | None = None
        self.copies = HostCopies(backend)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in the buffers."""
        return sum(buffer.numel() for buffer in self.buffers)

    def pages(self, nbytes: int) -> torch.Tensor:
        """Return the host's block of pages, at least `nbytes` long.

        All programs share it, and it grows when one needs more.
        """
        if self._pages is None or self._pages.numel() < nbytes:
            self._pages = None
            self._pages = self.backend.allocate_host(nbytes)
        return self._pages

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return device memory for a page."""
        return self.backend.allocate_shared(nbytes) if self.shares else self.backend.allocate(nbytes)

    def take(self) -> int:
        """Return the next buffer's number once the device has read its contents."""
        self._turn = (self._turn + 1) % BUFFERS
        self.emptied[self._turn].synchronize()
        self.emptied[self._turn] = DONE
        return self._turn

    def side(self, contents: torch.Tensor) -> "DeviceSide":
        """Return the device's side of a transfer of these bytes, which starts after all work given to
        the computing stream so far.
        """
        return DeviceSide(self, contents, self.backend.reached())


class DeviceSide:
    """Bytes on a device that a transfer fills or empties part by part, in order."""

    __slots__ = ("_after", "_ahead", "_contents", "_filling", "_host", "_staging", "landed")

    def __init__(self, staging: Staging, contents: torch.Tensor, after: Event) -> None:
        self._staging, self._contents, self._after = staging, contents, after
        self._ahead: dict[int, tuple[int, int, Event]] = {}
        """Place -> buffer, bytes and event of a copy to the host that is under way."""
        self._filling = 0
        self._host: torch.Tensor | None = None
        """The bytes themselves, if the host moves them without copies."""
        self.landed: Event = DONE
        """Event that occurs when the last delivered part is on the device."""

    def reach(self) -> bool:
        """Let the host move the bytes in place, if possible; return whether they are aligned for direct file access.

        If so, this waits until the device is done with them.
        """
        if self._staging.shares:
            self._after.synchronize()
            self._host = self._staging.backend.host_view(self._contents)
        return self._host is None or address(self._host) % BLOCK == 0

    def fetch(self, place: int, nbytes: int) -> int:
        """Return the host address of `nbytes` from byte `place`.

        If it is a copy, the next part is already under way on return.
        """
        if self._host is not None:
            return address(self._host) + place
        self._begin(place, nbytes)
        buffer, _, event = self._ahead.pop(place)
        event.synchronize()
        following = place + nbytes
        if following < self._contents.numel():
            self._begin(following, min(nbytes, self._contents.numel() - following))
        return address(self._staging.buffers[buffer])

    def _begin(self, place: int, nbytes: int) -> None:
        if place in self._ahead and self._ahead[place][1] >= nbytes:
            return
        buffer = self._staging.take()
        into, chunk = self._staging.buffers[buffer][:nbytes], self._contents[place : place + nbytes]
        event = self._staging.emptied[buffer] = self._staging.backend.copy(into, chunk, self._after)
        self._ahead[place] = buffer, nbytes, event

    def host_address(self, place: int) -> int:
        """Return the address of host memory to be filled and delivered to byte `place`."""
        if self._host is not None:
            return address(self._host) + place
        self._filling = self._staging.take()
        return address(self._staging.buffers[self._filling])

    def deliver(self, place: int, nbytes: int) -> None:
        """Send what was filled to byte `place` on the device, unless it is there already."""
        if self._host is not None:
            return
        source = self._staging.buffers[self._filling][:nbytes]
        self.landed = self._staging.backend.copy(self._contents[place : place + nbytes], source, self._after)
        self._staging.emptied[self._filling] = self.landed
