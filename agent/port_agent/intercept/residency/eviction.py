"""Who leaves when room is needed.

What is needed last (Belady), or least recently used where nobody knows.

Choosing does not scan: an LSTM unrolled over a thousand steps keeps 100,000 storages alive. Storages whose next use is
known stand in a heap, the others in the order of their last use.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from port_agent.intercept.residency.storages import Storage

_CANDIDATES = 6
"""So many of those needed last are compared by what it costs to let them go."""

_EXPENSIVE_WEIGHT = 0.6
"""A storage that must be written first goes only when one that goes for nothing is needed this much sooner."""

_COMPACT_BELOW = 4
"""The heap is built anew when less than one entry in so many is still true."""

_IN_FILE = 1 << 39
"""Added to the next use of a file's pages that nobody wrote: they go before what must be written, and come from the page
cache or, at worst, are read once more."""

LEAVES = 1 << 40
"""Added to the next use of one that a plan lets leave: it goes before all others."""


class EvictionPolicy:
    """Resident storages in the order in which they should leave."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Storage]] = []
        self._recent: OrderedDict[Storage, None] = OrderedDict()
        self._in_order = False

    def put_in_order(self, storages: Iterable[Storage]) -> None:
        """Keep an order from here on, of `storages` by their last use: before anything has to leave, nobody asks for one."""
        self._in_order = True
        for storage in sorted(storages, key=lambda s: s.last_use):
            self.touch(storage, storage.last_use, storage.next_use)

    def touch(self, storage: Storage, clock: int, next_use: int | None, rank: int | None = None) -> None:
        """Note that a storage was used at `clock`, and when it will be again (None: nobody knows).

        `rank`: the clock that decides in place of `next_use`, of one that a plan lets leave, or that is not used again but
        given up then: until then leaving costs a write for nothing.
        One that is away is no victim until it is touched again, resident.
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
        """Take a storage out, for good or until its next touch."""
        self._recent.pop(storage, None)
        storage.order += 1

    def drop_predictions(self) -> None:
        """Believe no next use any more: the program does something else."""
        known = {entry[3]: None for entry in self._heap if self._true(entry)}
        for storage in sorted(known, key=lambda s: (not s.in_file, s.last_use)):
            storage.order += 1
            storage.next_use = None
            self._recent[storage] = None
        self._heap.clear()

    def choose(
        self, clock: int, keep: Callable[[Storage], bool], goes_free: Callable[[Storage], bool]
    ) -> Storage | None:
        """Return the storage that should leave first, None when all must stay.

        Those that `keep` are passed over.
        """
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
