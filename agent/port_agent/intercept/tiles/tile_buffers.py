"""Pieces of tensors that are away, read into buffers and written from them; pages are moved in checksummed chunks."""

from collections import deque

import torch

from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage, allocated_bytes, data_ptr, untyped_storage
from port_agent.paging.pager import CHUNK, Transfer

MAX_PENDING_WRITES = 2
"""Pieces of results that may wait for the medium; each keeps its buffer."""


class TileBuffers:
    """The pieces of a call's large operands: views where they are resident, buffers where they are away."""

    def __init__(self, residency: Residency, away: dict[int, Storage]) -> None:
        self._residency, self._away = residency, away
        self._writes: deque[Transfer] = deque()
        self._read_ends: dict[int, tuple[int, torch.Tensor]] = {}
        """By storage: the chunk that the last piece ended in, and where it begins: the next piece begins in it, too."""
        self._unwritten = torch.empty(0, dtype=torch.uint8)
        """The end of the last appended piece, less than a chunk."""

    def load(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a tensor's storage, in a buffer of whole chunks where it is away.

        One that begins in the chunk in which the one before ended does not read it again. Raises PageError, or RuntimeError where the tensor is away and has no page: a defect of the
        follower.
        """
        key, item_bytes = id(untyped_storage(tensor)), tensor.element_size()
        storage = self._away.get(key)
        if storage is None:
            return tensor.as_strided((stop - start,), (1,), start)
        if storage.region is None:
            raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page to read")
        first, last = start * item_bytes, stop * item_bytes
        begin = first // CHUNK * CHUNK
        end = min(-(-last // CHUNK) * CHUNK, storage.region.nbytes)  # a tensor may end before its storage
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        place, read = self._read_ends.pop(key, (None, buffer[:0]))
        known = len(read) if place == begin else 0
        buffer[:known] = read[:known]
        if begin + known < end:
            pager, address = self._residency.pager, data_ptr(untyped_storage(buffer)) + known
            pager.wait(pager.read(storage.region, address, buffer, begin + known, end - begin - known))
        if last % CHUNK:
            place = last // CHUNK * CHUNK
            self._read_ends[key] = place, buffer[place - begin :].clone()
        return buffer[first - begin : last - begin].view(tensor.dtype)

    def store(self, storage: Storage, tile: torch.Tensor, start: int) -> None:
        """Write the buffer that a piece of a result begins to the page of its storage, from element `start` on. Raises PageError."""
        self._write(storage, tile, start * tile.element_size(), allocated_bytes(untyped_storage(tile)))

    def append(self, storage: Storage, tile: torch.Tensor, start: int) -> None:
        """As `store`, of pieces that come in order and end anywhere: what is less than a chunk waits for the next."""
        begin = start * tile.element_size() - len(self._unwritten)
        end = begin + len(self._unwritten) + tile.numel() * tile.element_size()
        whole = end if end == storage.nbytes else end // CHUNK * CHUNK
        if whole < end or len(self._unwritten) > 0:
            tile = torch.cat([self._unwritten, tile.view(-1).view(torch.uint8)])
            self._unwritten = tile[whole - begin :].clone()
        if begin < whole:
            self._write(storage, tile, begin, whole - begin)

    def _write(self, storage: Storage, buffer: torch.Tensor, begin: int, nbytes: int) -> None:
        """Queue a write; raises PageError for an earlier one, or RuntimeError where there is no page: a defect of the follower."""
        if storage.region is None:
            raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes has no page to write")
        pager = self._residency.pager
        address = data_ptr(untyped_storage(buffer)) + int(buffer.storage_offset()) * buffer.element_size()
        self._writes.append(pager.write(storage.region, address, buffer, begin, nbytes))
        while len(self._writes) > MAX_PENDING_WRITES:
            pager.wait(self._writes.popleft())

    def finish(self) -> None:
        """Return when all that was stored is written. Raises PageError."""
        while self._writes:
            self._residency.pager.wait(self._writes.popleft())
