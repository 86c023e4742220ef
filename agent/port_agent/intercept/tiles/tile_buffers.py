"""Tiles of paged-out tensors, read into buffers and written from them; pages are moved in checksummed chunks."""

from collections import deque

import torch

from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Moving, Storage, allocated_bytes, untyped_storage
from port_agent.paging.pager import CHUNK

MAX_PENDING_WRITES = 2
"""Tiles of results that may wait for the medium; each keeps its buffer."""


class TileBuffers:
    """The tiles of a call's large operands: views if they are resident, buffers on their `device` (None: the
    host) if they are paged out.
    """

    def __init__(self, residency: Residency, away: dict[int, Storage], device: torch.device | None = None) -> None:
        self._residency, self._away, self._device = residency, away, device
        self._writes: deque[Moving] = deque()
        self._read_ends: dict[int, tuple[int, torch.Tensor]] = {}
        """For each storage, the chunk in which the last tile ended, and its offset, because the
        next tile also begins in it.
        """
        self._unwritten = torch.empty(0, dtype=torch.uint8, device=device)
        """The end of the last appended tile, which is less than a chunk."""

    def load(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a tensor's storage, in a buffer of whole chunks if it is paged out.

        A tile that begins in the chunk in which the previous one ended does not read it again. Raises PageError, or
        RuntimeError if the tensor is paged out without a page, a defect of the interceptor.
        """
        key, item_bytes = id(untyped_storage(tensor)), tensor.element_size()
        storage = self._away.get(key)
        if storage is None:
            return tensor.as_strided((stop - start,), (1,), start)
        memory = _memory(storage)
        first, last = start * item_bytes, stop * item_bytes
        begin = first // CHUNK * CHUNK
        end = min(-(-last // CHUNK) * CHUNK, storage.nbytes)  # a tensor may end before its storage
        buffer = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        place, read = self._read_ends.pop(key, (None, buffer[:0]))
        known = len(read) if place == begin else 0
        buffer[:known] = read[:known]
        backing = self._residency.backing
        if begin + known < end:
            part = buffer[known:]
            backing.wait(backing.read_part(storage, memory, part, begin + known, len(part)))
        if last % CHUNK:
            place = last // CHUNK * CHUNK
            self._read_ends[key] = place, buffer[place - begin :].clone()
        return buffer[first - begin : last - begin].view(tensor.dtype)

    def store(self, storage: Storage, tile: torch.Tensor, start: int) -> None:
        """Write the buffer of a tile of a result to the page of its storage, from element `start`. Raises PageError."""
        self._write(storage, tile, start * tile.element_size(), allocated_bytes(untyped_storage(tile)))

    def append(self, storage: Storage, tile: torch.Tensor, start: int) -> None:
        """Write as `store` does, for tiles that come in order and may end anywhere; a partial
        chunk waits for the next tile.
        """
        begin = start * tile.element_size() - len(self._unwritten)
        end = begin + len(self._unwritten) + tile.numel() * tile.element_size()
        whole = end if end == storage.nbytes else end // CHUNK * CHUNK
        if whole < end or len(self._unwritten) > 0:
            tile = torch.cat([self._unwritten, tile.view(-1).view(torch.uint8)])
            self._unwritten = tile[whole - begin :].clone()
        if begin < whole:
            self._write(storage, tile, begin, whole - begin)

    def _write(self, storage: Storage, buffer: torch.Tensor, begin: int, nbytes: int) -> None:
        """Queue a write.

        Raises PageError for an earlier one, or RuntimeError if there is no page, a defect of the interceptor.
        """
        backing = self._residency.backing
        self._writes.append(backing.write_part(storage, _memory(storage), buffer, begin, nbytes))
        while len(self._writes) > MAX_PENDING_WRITES:
            backing.wait(self._writes.popleft())

    def finish(self) -> None:
        """Return once everything stored is written. Raises PageError."""
        while self._writes:
            self._residency.backing.wait(self._writes.popleft())


def _memory(storage: Storage) -> torch.UntypedStorage:
    memory = storage.ref()
    if memory is None:
        raise RuntimeError(f"storage {storage.number} of {storage.nbytes} bytes is used after its end")
    return memory
