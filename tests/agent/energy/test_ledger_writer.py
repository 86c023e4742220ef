"""Batches on their way to the disk: one at a time, none lost, and what the whole disk wrote counted beside."""

import sqlite3
from concurrent.futures import Future
from pathlib import Path

import pytest

from port_agent.energy.issues import IssueList
from port_agent.energy.ledger import Ledger, LedgerError
from port_agent.energy.ledger_writer import LedgerWriter
from port_agent.energy.wear import DiskCounter
from port_agent.energy.wear_account import WearAccount
from tests.agent.energy.device_trees import STAT, disk

NOON = 1_760_000_000.0


class Later:
    """An executor whose disk answers when the test says so."""

    def __init__(self) -> None:
        self.asked = list[tuple[Future[int], tuple[object, ...]]]()

    def submit(self, function: object, *arguments: object) -> Future[int]:
        self.asked.append((Future(), (function, *arguments)))
        return self.asked[-1][0]

    def answer(self) -> None:
        future, (function, *arguments) = self.asked.pop(0)
        try:
            future.set_result(function(*arguments))  # type: ignore[operator]
        except LedgerError as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        while self.asked:
            self.answer()


class MeasurementWorker:
    def __init__(self, folder: Path, *, disk: DiskCounter | None = None, executor: object = None) -> None:
        self.path, self.issues, self.wear = folder / "energy.sqlite", IssueList(), WearAccount(lambda: NOON)
        self.ledger = Ledger(self.path, NOON)
        self.writer = LedgerWriter(self.ledger, self.issues, self.wear, disk, executor)  # type: ignore[arg-type]

    def meta(self, key: str) -> str | None:
        """Return a value as another process reads it."""
        database = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
        row = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        database.close()
        return None if row is None else str(row[0])


def test_without_a_thread_it_is_written_when_it_is_asked_for(tmp_path: Path) -> None:
    bench = MeasurementWorker(tmp_path)
    bench.ledger.set_meta("hello", "there")
    written = bench.writer.begin(NOON + 1)
    assert written.done() and written.result() > 0 and bench.meta("hello") == "there"
    assert bench.wear.today_bytes() == written.result(), "what the ledger writes wears the flash too"
    bench.writer.close(NOON + 2)


def test_a_disk_that_is_slow_holds_one_batch_and_the_next_gathers(tmp_path: Path) -> None:
    later = Later()
    bench = MeasurementWorker(tmp_path, executor=later)
    bench.ledger.set_meta("first", "1")
    one = bench.writer.begin(NOON + 1)
    bench.ledger.set_meta("second", "2")
    assert bench.writer.begin(NOON + 2) is one and len(later.asked) == 1 and not one.done()
    later.answer()
    assert (bench.meta("first"), bench.meta("second")) == ("1", None)
    two = bench.writer.begin(NOON + 3)
    assert two is not one
    later.answer()
    assert bench.meta("second") == "2"
    bench.writer.close(NOON + 4)
    assert bench.wear.today_bytes() >= one.result() + two.result()


def test_what_the_disk_refused_is_written_with_the_next_batch(tmp_path: Path) -> None:
    bench = MeasurementWorker(tmp_path)
    bench.ledger._database.execute("PRAGMA query_only = ON")
    bench.ledger.set_meta("kept", "yes")
    refused = bench.writer.begin(NOON + 1)
    with pytest.raises(LedgerError):
        refused.result()
    (issue,) = bench.issues.all()
    assert issue.code == "energy-ledger" and issue.reason and issue.remedy
    assert bench.wear.today_bytes() == 0
    bench.ledger._database.execute("PRAGMA query_only = OFF")
    bench.writer.begin(NOON + 2)
    assert bench.meta("kept") == "yes" and bench.issues.all() == ()
    bench.writer.close(NOON + 3)


def test_closing_waits_for_what_is_under_way_and_writes_the_rest(tmp_path: Path) -> None:
    bench = MeasurementWorker(tmp_path, executor=Later())
    bench.ledger.set_meta("first", "1")
    bench.writer.begin(NOON + 1)
    bench.ledger.set_meta("second", "2")
    bench.writer.close(NOON + 2)
    assert (bench.meta("first"), bench.meta("second")) == ("1", "2")


def test_a_gauge_that_fails_costs_no_count_of_what_was_written(tmp_path: Path) -> None:
    """The life estimate of an eMMC may be unreadable for a while; the sectors written meanwhile still count."""
    real = disk(tmp_path / "root", tmp_path)
    (real / "device").mkdir()
    (real / "device/life_time").write_text("0x01 0x02\n")
    bench = MeasurementWorker(tmp_path, disk=DiskCounter(tmp_path, tmp_path / "root"))
    bench.writer.begin(NOON + 1)
    assert bench.meta("flash_used_life") is not None
    (real / "device/life_time").write_text("torn")
    (real / "stat").write_text(STAT.replace("432176", "1432176"))
    bench.writer.begin(NOON + 2)
    (issue,) = bench.issues.all()
    assert issue.code == "energy-flash-wear"
    (real / "device/life_time").write_text("0x01 0x02\n")
    bench.writer.begin(NOON + 3)
    assert bench.issues.all() == ()
    bench.writer.close(NOON + 4)
    database = sqlite3.connect(bench.path)
    rows = database.execute("SELECT * FROM wear").fetchall()
    database.close()
    assert any(1_000_000 * 512 in row for row in rows), rows
