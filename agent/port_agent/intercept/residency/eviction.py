"""Which storage is evicted when memory is needed: the one needed last (Belady), or the least recently used if that is
unknown.

Choosing does not scan: an LSTM unrolled over a thousand steps keeps 100,000 storages alive. Storages whose next use is
known are in a heap, the others in the order of their last use.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from port_agent.intercept.residency.storages import Storage

_CANDIDATES = 6
"""Number of those needed last that are compared by the cost of evicting them."""

_EXPENSIVE_WEIGHT = 0.6
"""A storage that must be written first is evicted only if a storage that costs nothing is needed this much sooner."""

_COMPACT_BELOW = 4
"""The heap is rebuilt when less than one entry in this many is still valid."""

_IN_FILE = 1 << 39
"""Added to the next use of unwritten pages of a file: they go before storages that must be written, and come from the
page cache or, at worst, are read again.
"""

LEAVES = 1 << 40
"""Added to the next use of a storage that a plan evicts: it goes before all others."""


class EvictionPolicy:
    """Resident storages in the order in which they should be evicted."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Storage]] = []
        self._recent: OrderedDict[Storage, None] = OrderedDict()
        self._in_order = False

    def put_in_order(self, storages: Iterable[Storage]) -> None:
        """Start keeping an order, with `storages` by their last use; no order is needed before anything has to be
        evicted.
        """
        self._in_order = True
        for storage in sorted(storages, key=lambda s: s.last_use):
            self.touch(storage, storage.last_use, storage.next_use)

    def touch(self, storage: Storage, clock: int, next_use: int | None, rank: int | None = None) -> None:
        """Record that a storage was used at `clock`, and its next use (None: unknown).

        `rank`: the clock that decides instead of `next_use`, for a storage that a plan evicts, or that is not used
        again but freed then: evicting it earlier would cost a needless write. An evicted storage is not a candidate
        until it is touched again while resident.
        """
        storage.last_use = clock
        storage.order += 1
        storage.next_use = next_use
        if not storage.resident or not self._in_order:
            return
        if next_use is None:
            self._recent[storage] = None
            self._recent.move_to_end(storage, last=not storage.in_file)
            return
        if rank is None and storage.in_file:
            rank = min(next_use, _IN_FILE) + _IN_FILE
        self._recent.pop(storage, None)
        if len(self._heap) > 1024 and len(self._heap) > _COMPACT_BELOW * (len(self._recent) + 256):
            self._compact()
        heapq.heappush(self._heap, (-(next_use if rank is None else rank), storage.order, storage.number, storage))

    def forget(self, storage: Storage) -> None:
        """Remove a storage, for good or until its next touch."""
        self._recent.pop(storage, None)
        storage.order += 1

    def drop_predictions(self) -> None:
        """Discard all predicted next uses, because the program does something else."""
        known = {entry[3]: None for entry in self._heap if self._true(entry)}
        for storage in sorted(known, key=lambda s: (not s.in_file, s.last_use)):
            storage.order += 1
            storage.next_use = None
            self._recent[storage] = None
        self._heap.clear()

    def choose(
        self, clock: int, keep: Callable[[Storage], bool], goes_free: Callable[[Storage], bool]
    ) -> Storage | None:
        """Return the storage to evict first; None if all must stay. Storages for which `keep` is true are skipped."""
        oldest = next((s for s in self._recent if not keep(s)), None)
        furthest = self._furthest(clock, keep, goes_free)
        if furthest is None or oldest is None:
            return furthest or oldest
        if oldest.in_file or furthest.in_file:
            return oldest if oldest.in_file else furthest
        ahead = clock if furthest.next_use is None else furthest.next_use
        return furthest if ahead - clock >= clock - oldest.last_use else oldest

    def _furthest(
        self, clock: int, keep: Callable[[Storage], bool], goes_free: Callable[[Storage], bool]
    ) -> Storage | None:
        aside: list[tuple[int, int, int, Storage]] = []
        best: Storage | None = None
        best_score = -1.0
        found = 0
        while self._heap and found < _CANDIDATES:
            entry = heapq.heappop(self._heap)
            if not self._true(entry):
                continue
            aside.append(entry)
            storage = entry[3]
            if keep(storage):
                continue
            found += 1
            score = float(max(-entry[0] - clock, 0))
            if not goes_free(storage):
                score *= _EXPENSIVE_WEIGHT
            if score > best_score:
                best, best_score = storage, score
            if -entry[0] - clock < best_score:
                break
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return best

    @staticmethod
    def _true(entry: tuple[int, int, int, Storage]) -> bool:
        return entry[3].resident and entry[1] == entry[3].order

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._true(entry)]
        heapq.heapify(self._heap)
