"""Write the ledger in batches, in a thread, because an SD card may take a second for a write."""

from concurrent.futures import Executor, Future

from port_agent.energy.issues import IssueList
from port_agent.energy.ledger import Batch, Ledger, LedgerError
from port_agent.energy.sources.power_source import SourceError
from port_agent.energy.wear import DiskCounter
from port_agent.energy.wear_account import WearAccount

_DISK_WRITER = "machine"


class LedgerWriter:
    """Writes one batch at a time; a batch that the disk rejects is kept for the next."""

    def __init__(
        self,
        ledger: Ledger,
        issues: IssueList,
        wear: WearAccount,
        disk: DiskCounter | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Without an `executor`, the caller's thread writes. `disk` counts what the whole machine writes."""
        self._ledger, self._issues, self._wear = ledger, issues, wear
        self._disk, self._executor = disk, executor
        self._writing: tuple[Batch, Future[int]] | None = None

    def begin(self, unix: float) -> Future[int]:
        """Begin to write what has accumulated, and return a future that completes when it is written.

        While the last batch is still being written, its future is returned. A disk that rejects
        a batch becomes an issue.
        """
        self.take_outcome()
        if self._writing is None:
            if self._disk is not None:
                self._count_disk(self._disk, unix)
            batch = self._ledger.take(unix)
            self._writing = batch, self._write(batch, unix)
        _, written = self._writing
        self.take_outcome()
        return written

    def take_outcome(self) -> None:
        """Record the outcome of the last write, if it has ended."""
        if self._writing is None or not self._writing[1].done():
            return
        (batch, written), self._writing = self._writing, None
        try:
            self._wear.add(written.result())
        except LedgerError as error:
            self._ledger.give_back(batch)
            self._issues.report("energy-ledger", error.problem, error.remedy)
        else:
            self._issues.clear("energy-ledger")

    def close(self, unix: float) -> None:
        """Wait for the current write, write the rest and close the ledger; raises `LedgerError`."""
        if self._executor is not None:
            self._executor.shutdown()
        self.take_outcome()
        self._ledger.close(unix)

    def _write(self, batch: Batch, unix: float) -> Future[int]:
        if self._executor is not None:
            return self._executor.submit(self._ledger.write, batch, unix)
        done: Future[int] = Future()
        try:
            done.set_result(self._ledger.write(batch, unix))
        except LedgerError as error:
            done.set_exception(error)
        return done

    def _count_disk(self, disk: DiskCounter, unix: float) -> None:
        try:
            used = disk.used_life()
            size = disk.flash_bytes()
            written = disk.written_since_last()  # last: its count is lost if one of the others fails
        except SourceError as error:
            self._issues.report("energy-flash-wear", error.problem, error.remedy)
            return
        self._issues.clear("energy-flash-wear")
        if written:
            self._ledger.add_wear(unix, f"{_DISK_WRITER}:{disk.name}", written)
        if used is not None:
            self._ledger.set_meta("flash_used_life", repr(used))
        if size is not None:
            self._ledger.set_meta("flash_bytes", str(size))
