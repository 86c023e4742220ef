"""What trace and plan predict for the storages that an operator touched: which are evicted,
recomputed or prefetched.
"""

from collections.abc import Sequence

from port_agent.intercept.decisions.rematerialization import MAX_REMAT_SHARE
from port_agent.intercept.decisions.rematerialization import SMALLEST_BYTES as REMAT_BYTES
from port_agent.intercept.decisions.step_planner import StepPlanner
from port_agent.intercept.residency.eviction import LEAVES
from port_agent.intercept.residency.pools import MemoryPools
from port_agent.intercept.residency.storages import NEVER, Storage, StorageTable
from port_agent.intercept.residency.trace import AHEAD, NOTHING, Entry, TraceBook, Use

_WORTH_PREPARING_S = 5e-3
"""Least paging seconds of a result whose call is kept before a plan names it.

Keeping takes 0.12 ms, in guarded memory mostly to protect the result against writes, and one in thirty was
recomputed (GPT-2 in 1,240 MiB).
"""


class Prefetcher:
    """Reports to the residency what the `book` predicts for the next operators."""

    def __init__(self, table: StorageTable, pools: MemoryPools, planner: StepPlanner, book: TraceBook) -> None:
        self._table, self._pools, self._planner, self._book = table, pools, planner, book
        self.fetched_to = 0
        """Position of the matched trace up to which storages were fetched."""

    def touch(self, entry: Entry, touched: Sequence[Storage]) -> None:
        """Report when each storage is needed next, and begin to write those that the plan evicts here."""
        clock, book = self._pools.host.clock, self._book
        plan = book.plan
        leaving = None if plan is None else plan.leaving.get(book.position, NOTHING)
        for operand, (storage, local, position) in enumerate(
            zip(touched, entry.operands, entry.next_uses, strict=True)
        ):
            next_use = book.next_clock(storage, position)
            if storage.dependents and next_use is not None:
                next_use = min(next_use, storage.awaited_at)
            rank = None
            if leaving is not None and operand in leaving:
                rank = LEAVES + min(next_use or 0, LEAVES)
            elif next_use == NEVER and not storage.clean:
                rank = book.end_clock(storage, local) if leaving is None else clock
            self._pools.of(storage).eviction.touch(storage, clock, next_use, rank)
        for operand, recomputed in (leaving or NOTHING).items():
            if not recomputed and operand < len(touched):
                self._pools.of(touched[operand]).write_early(touched[operand])

    def remade(self, entry: Entry | None, made: Storage, seconds: float) -> bool:
        """Return whether a result may be recomputed instead of paged."""
        plan = self._book.plan
        if plan is not None and entry is not None:
            return self._book.position in plan.remade
        paging_s = self._planner.paging_seconds(made.nbytes)
        return made.nbytes >= REMAT_BYTES and paging_s >= _WORTH_PREPARING_S and seconds < MAX_REMAT_SHARE * paging_s

    def learn(self, touched: Sequence[Storage]) -> None:
        """Record each storage's use, and begin to write those that were evicted after this use the last time."""
        entry = self._book.entry_run()
        leaving = entry.leaving
        for operand, storage in enumerate(touched):
            storage.left_at = Use(entry, operand)
            residency = self._pools.of(storage)
            if leaving is not None and operand in leaving:
                residency.write_early(storage)
            residency.keep_smaller(storage)

    def fetch_ahead(self) -> None:
        """Begin to read what the next operators of the trace need, as far as memory allows."""
        book = self._book
        trace = book.matched
        if trace is None:
            return
        place = max(self.fetched_to, book.position)
        stop = min(book.position + AHEAD, len(trace.entries))
        if place >= stop:
            return
        reserve_bytes = trace.entries[book.position].reserve_bytes
        while place < stop:
            for local in trace.entries[place].operands:
                number = book.number_of(local)
                storage = None if number is None else self._table.numbered(number)
                if storage is None or storage.resident:
                    continue
                if not self._pools.of(storage).prefetch(storage, reserve_bytes, book.start_clock + place):
                    self.fetched_to = place
                    return
            place += 1
        self.fetched_to = place
