"""Pages of a device's storages in pinned memory of the host, which copies reach directly: several times the
speed of a ring of buffers.

Only where the host's memory has no budget, for pinned memory cannot leave; and at most that much of it.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from port_agent.backend.base import Backend, Event
from port_planner.base.process_memory import available_bytes

PINNED_CHUNK_BYTES = 16 << 20
"""A page is that many of these and a smaller chunk; a power of two, which torch's pinned memory is rounded up to."""
_SLAB_BYTES = 1 << 20
"""Pinned at once for smaller chunks."""
_MIN_CHUNK_BYTES = 1 << 10
SHARE = 1 / 4
"""Largest share of the host's memory, as available at the start, that is pinned."""


@dataclass(slots=True)
class PinnedPage:
    """The page of a device's storage in chunks of pinned memory, in order."""

    chunks: list[torch.Tensor]
    nbytes: int
    checksum: torch.Tensor | None = None
    """Checksum of the device's bytes when they were written; on the device."""


@dataclass(slots=True)
class DirectCopy:
    """The last of the copies of a page, on the device's copying stream. `contents` are held until it is waited for."""

    event: Event
    to_host: bool
    contents: torch.Tensor

    def landed(self) -> Event:
        """Return when the bytes are there; waits for those that go to the host."""
        if self.to_host:
            self.event.synchronize()
        return self.event

    def done(self) -> bool:
        """Return whether nothing has to be waited for by the host."""
        return not self.to_host or self.event.query()


class PinnedPages:
    """Takes pages of pinned memory, kept for the next storages once they are given back."""

    def __init__(self, backend: Backend, most_bytes: int | None = None) -> None:
        """`most_bytes`: largest number of pinned bytes; a share of the host's if None."""
        self._backend = backend
        self._left_bytes = int(available_bytes() * SHARE) if most_bytes is None else most_bytes
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> PinnedPage | None:
        """Return a page; None where no more memory may be pinned."""
        chunks: list[torch.Tensor] = []
        for start in range(0, nbytes, PINNED_CHUNK_BYTES):
            chunk = self._chunk(min(nbytes - start, PINNED_CHUNK_BYTES))
            if chunk is None:
                self.give_back(PinnedPage(chunks, nbytes))
                return None
            chunks.append(chunk)
        return PinnedPage(chunks, nbytes)

    def give_back(self, page: PinnedPage) -> None:
        """Keep a page's chunks for others; what is still being read from them is in order with what comes in."""
        for chunk in page.chunks:
            self._free[chunk.numel()].append(chunk)

    def release(self) -> None:
        """Let go of the memory of pages that were given back; no page is taken afterwards."""
        self._free.clear()
        self._left_bytes = 0

    def copy_out(self, page: PinnedPage, contents: torch.Tensor) -> DirectCopy:
        """Begin to copy device bytes to a page, after all work given to the device so far."""
        return self._copy(page, contents, to_host=True)

    def copy_in(self, page: PinnedPage, contents: torch.Tensor) -> DirectCopy:
        """Begin to copy a page to the device, after all work given to it so far."""
        return self._copy(page, contents, to_host=False)

    def _copy(self, page: PinnedPage, contents: torch.Tensor, *, to_host: bool) -> DirectCopy:
        event = self._backend.reached()
        for chunk, part in zip(page.chunks, contents.split(PINNED_CHUNK_BYTES), strict=True):
            there = chunk[: part.numel()]
            target, source = (there, part) if to_host else (part, there)
            event = self._backend.copy(target, source, event)
        return DirectCopy(event, to_host, contents)

    def _chunk(self, nbytes: int) -> torch.Tensor | None:
        size = max(_MIN_CHUNK_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._free[size]
        if not free:
            slab_bytes = max(size, _SLAB_BYTES)
            if self._left_bytes < slab_bytes:
                return None
            try:
                slab = self._backend.allocate_host(slab_bytes)
            except RuntimeError:  # the driver or the system gives no more, whatever is free
                self._left_bytes = 0
                return None
            self._left_bytes -= slab_bytes
            free.extend(slab.split(size))
        return free.pop()
