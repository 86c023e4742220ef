"""The energy ledger on disk: SQLite, written in batches, bounded, readable while the agent runs.

Everything is summed in memory and written once per flush (300 s unless configured) in one transaction of
the write-ahead log. This writes a few MB per day to an SD card. A crash loses at most that time; the next
start records it as a gap.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from port_agent.energy.attribution.one_job import Charge, EnergyPhase, StepEnergy
from port_agent.energy.attribution.timeline import GpuShare
from port_agent.energy.sources.power_source import Kind
from port_agent.system.clock import day_start_s, local_clock_s
from port_agent.system.database import (
    DamagedDatabaseError,
    is_damage,
    open_database,
    read_sealed_values,
    seal_values,
    set_aside,
)
from port_planner.base.errors import PortError

FILE_NAME = "energy.sqlite"
SCHEMA_VERSION = 2
"""Version of the tables.

Version 1 had no table `gpu`; it gets one when the agent starts, and can be read without it.
"""
READABLE_VERSIONS = (1, SCHEMA_VERSION)
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
KEEP_S = {MINUTE_S: 2 * DAY_S, HOUR_S: 62 * DAY_S, DAY_S: 3660 * DAY_S}
"""Seconds for which roll-ups are kept, by period: 2 days of minutes are at most 35,000 rows of one job's phases, and
ten years of days 40,000.
"""
KEEP_ROWS = {"step": 20_000, "gap": 2_000, "event": 2_000, "epoch": 20_000, "wear": 4_000}
STEP_ROW_S = 5.0
"""Length in seconds below which steps share a row; otherwise a day of 20 ms steps would be 4 million rows."""
_MAX_WAITING = 20_000
"""Largest number of sums kept while the disk rejects them; beyond this, minutes are summed to hours.

A day of one job has 16,000.
"""

_GPU_TABLE = """
CREATE TABLE gpu (
    period_s INTEGER, start_unix INTEGER, job TEXT, covers TEXT, seconds REAL NOT NULL, joules REAL NOT NULL,
    PRIMARY KEY (period_s, start_unix, job, covers)) WITHOUT ROWID;
"""
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rollup (
    period_s INTEGER, start_unix INTEGER, job TEXT, phase TEXT, kind TEXT,
    seconds REAL NOT NULL, gross_joules REAL NOT NULL, net_joules REAL NOT NULL, unsplit_joules REAL NOT NULL,
    PRIMARY KEY (period_s, start_unix, job, phase, kind)) WITHOUT ROWID;
CREATE TABLE step (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL,
    epoch INTEGER NOT NULL, plan INTEGER NOT NULL, end_unix REAL NOT NULL, wall_s REAL NOT NULL, kind TEXT NOT NULL,
    gross_joules REAL, net_joules REAL, planned_s REAL, planned_joules REAL, loss REAL, phases TEXT NOT NULL);
CREATE TABLE epoch (
    job TEXT, epoch INTEGER, kind TEXT, steps INTEGER NOT NULL, measured_steps INTEGER NOT NULL, wall_s REAL NOT NULL, gross_joules REAL NOT NULL,
    net_joules REAL NOT NULL, unmeasured_s REAL NOT NULL, planned_s REAL NOT NULL, planned_joules REAL NOT NULL,
    paged_in_bytes INTEGER NOT NULL, paged_out_bytes INTEGER NOT NULL, end_unix REAL NOT NULL,
    PRIMARY KEY (job, epoch, kind)) WITHOUT ROWID;
CREATE TABLE gap (id INTEGER PRIMARY KEY, start_unix REAL NOT NULL, end_unix REAL NOT NULL,
    source TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE event (id INTEGER PRIMARY KEY, unix REAL NOT NULL, code TEXT NOT NULL, text TEXT NOT NULL);
CREATE TABLE wear (day_unix INTEGER, writer TEXT, written_bytes INTEGER NOT NULL,
    PRIMARY KEY (day_unix, writer)) WITHOUT ROWID;
{_GPU_TABLE}
PRAGMA user_version = {SCHEMA_VERSION};
"""


class LedgerError(PortError):
    """A ledger that cannot be opened or read; `path` says which."""

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"energy ledger {path}: {problem}; {remedy}")
        self.path = path
        self.problem = problem
        self.remedy = remedy


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    gross_joules: float = 0.0
    net_joules: float = 0.0
    unsplit_joules: float = 0.0


@dataclass(frozen=True, slots=True)
class MeterGap:
    """A period without figures, in wall-clock time."""

    start_unix: float
    end_unix: float
    source: str
    reason: str


_Key = tuple[int, str, EnergyPhase, Kind]


@dataclass(slots=True)
class Batch:
    """Figures that are not in the file yet. Once taken from the ledger, they may be written by a thread."""

    sums: dict[_Key, _Sum] = field(default_factory=dict)
    """Sums by start of the minute, job, phase and kind; hours and days are computed from them on writing."""
    step_rows: list[tuple[object, ...]] = field(default_factory=list)
    epochs: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    gaps: list[MeterGap] = field(default_factory=list)
    events: list[tuple[float, str, str]] = field(default_factory=list)
    wear: dict[tuple[int, str], int] = field(default_factory=dict)
    meta: dict[str, str] = field(default_factory=dict)
    gpu: dict[tuple[int, str, str], tuple[float, float]] = field(default_factory=dict)
    """Seconds and joules by start of the minute, job, and what the GPU's figure covers."""

    def append(self, newer: "Batch") -> None:
        """Add newer figures."""
        for key, total in newer.sums.items():
            _merge(self.sums, key, total)
        self.step_rows += newer.step_rows
        for epoch, values in newer.epochs.items():
            old = self.epochs.get(epoch, [0.0] * len(values))
            self.epochs[epoch] = [a + b for a, b in zip(old[:-1], values[:-1], strict=True)] + values[-1:]
        self.gaps += newer.gaps
        self.events += newer.events
        for day, count in newer.wear.items():
            self.wear[day] = self.wear.get(day, 0) + count
        self.meta |= newer.meta
        _add_gpu(self.gpu, newer.gpu)

    def shed(self) -> None:
        """Discard the oldest details if a disk rejects writes for long: minutes are summed to hours."""
        del self.step_rows[: -KEEP_ROWS["step"]]
        del self.gaps[: -KEEP_ROWS["gap"]]
        del self.events[: -KEEP_ROWS["event"]]
        if len(self.sums) > _MAX_WAITING:
            coarse: dict[_Key, _Sum] = {}
            for (minute, job, phase, kind), total in self.sums.items():
                _merge(coarse, (period_start(minute, HOUR_S), job, phase, kind), total)
            self.sums = coarse
        if len(self.gpu) > _MAX_WAITING:
            self.gpu = _gpu_sums(self.gpu, HOUR_S)


class Ledger:
    """Sums up charges, steps, gaps, events and wear, and writes them on request.

    One thread at a time may add; `write` may run in another one meanwhile.
    """

    def __init__(self, path: Path, now_unix: float) -> None:
        """Open or create the ledger at `path`. A damaged one is moved aside, which is recorded as an event."""
        self.path = path
        self._waiting = Batch()
        self._block: _StepBlock | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = self._open(now_unix)
        self._note_lost_time(now_unix)

    def _open(self, now_unix: float) -> sqlite3.Connection:
        try:
            return _connect(self.path)
        except (sqlite3.DatabaseError, DamagedDatabaseError) as error:
            if not is_damage(error):
                raise LedgerError(self.path, str(error), "check permissions and free space") from error
            aside = set_aside(self.path, f"{self.path.name}.damaged-{int(now_unix)}")
            self.add_event(now_unix, "energy-ledger-damaged", f"{error}; moved to {aside.name}, a new ledger begins")
            return _connect(self.path)

    def _note_lost_time(self, now_unix: float) -> None:
        """Record the time since the last flush as a gap, unless the ledger was closed properly."""
        meta = read_sealed_values(self._database, "meta")
        if meta is None:
            self._database.execute("DELETE FROM meta")
            self._database.commit()
            self.add_event(
                now_unix, "energy-ledger-damaged", "the stored values of earlier runs are damaged; measuring again"
            )
            meta = {}
        last = float(meta.get("flushed_unix", "nan"))
        if meta.get("closed") == "0" and last < now_unix:
            self.add_gap(MeterGap(last, now_unix, "agent", "the agent stopped without closing its ledger"))
        self._waiting.meta["closed"] = "0"

    def add_charges(self, charges: Iterable[Charge], unix_minus_clock_s: float) -> None:
        """Add charges to the sums of their minute."""
        for charge in charges:
            # A charge that ends on the stroke of a minute belongs to the minute before.
            minute = int((charge.end_s + unix_minus_clock_s - 1e-6) // MINUTE_S) * MINUTE_S
            key = (minute, charge.job, charge.phase, charge.kind)
            total = self._waiting.sums.get(key)
            if total is None:
                total = self._waiting.sums[key] = _Sum()
            total.seconds += charge.seconds
            total.gross_joules += charge.gross_joules
            if charge.net_joules is None:
                total.unsplit_joules += charge.gross_joules
            else:
                total.net_joules += charge.net_joules

    def add_gpu(self, end_unix: float, seconds: float, gpu: GpuShare, shares: Mapping[str, float]) -> None:
        """Add the GPU's energy in an interval of `seconds`, divided among jobs by their shares of 1."""
        minute = int((end_unix - 1e-6) // MINUTE_S) * MINUTE_S
        fresh = {(minute, job, gpu.covers): (seconds, gpu.joules * share) for job, share in shares.items()}
        _add_gpu(self._waiting.gpu, fresh)

    def add_steps(self, steps: Iterable[StepEnergy], unix_minus_clock_s: float) -> None:
        """Add finished steps to the rows of steps and of epochs."""
        for step in steps:
            if self._block is None or not self._block.takes(step):
                self._close_block()
                self._block = _StepBlock(step)
            self._block.add(step, step.end_s + unix_minus_clock_s)
            if self._block.wall_s >= STEP_ROW_S:
                self._close_block()
            self._add_to_epoch(step, unix_minus_clock_s)

    def _close_block(self) -> None:
        if self._block is not None:
            self._waiting.step_rows.append(self._block.row())
            self._block = None

    def _add_to_epoch(self, step: StepEnergy, unix_minus_clock_s: float) -> None:
        event = step.event
        sums = self._waiting.epochs.setdefault((step.job, event.epoch, step.kind.value), [0.0] * (len(_EPOCH_SUMS) + 1))
        planned_joules = event.planned_joules if step.known_joules is not None else None
        values = (
            1,
            0 if step.known_joules is None else 1,
            event.wall_s,
            step.gross_joules,
            step.net_joules or 0.0,
            step.unmeasured_s,
            event.planned_s or 0.0,
            planned_joules or 0.0,
            event.paged_in_bytes,
            event.paged_out_bytes,
        )
        for index, value in enumerate(values):
            sums[index] += value
        sums[-1] = step.end_s + unix_minus_clock_s

    def add_gap(self, gap: MeterGap) -> None:
        """Record a gap; one that follows directly on the last gap extends it."""
        last = self._waiting.gaps[-1] if self._waiting.gaps else None
        if last and (last.source, last.reason) == (gap.source, gap.reason) and gap.start_unix - last.end_unix < 1:
            self._waiting.gaps[-1] = MeterGap(last.start_unix, gap.end_unix, gap.source, gap.reason)
        else:
            self._waiting.gaps.append(gap)

    def add_event(self, unix: float, code: str, text: str) -> None:
        """Record an event that belongs next to the figures."""
        self._waiting.events.append((unix, code, text))

    def add_wear(self, unix: float, writer: str, written_bytes: int) -> None:
        """Add bytes that `writer` wrote to flash on its local date, stored as that date's midnight in UTC."""
        key = (local_clock_s(unix) // DAY_S * DAY_S, writer)
        self._waiting.wear[key] = self._waiting.wear.get(key, 0) + written_bytes

    def set_meta(self, key: str, value: str) -> None:
        """Store a value for the next run."""
        self._waiting.meta[key] = value

    def meta(self, key: str) -> str | None:
        """Return a value stored by an earlier run or this one."""
        if key in self._waiting.meta:
            return self._waiting.meta[key]
        row = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def take(self, now_unix: float) -> Batch:
        """Return all waiting figures, and reset."""
        self._close_block()
        self._waiting.meta["flushed_unix"] = repr(now_unix)
        batch, self._waiting = self._waiting, Batch()
        return batch

    def write(self, batch: Batch, now_unix: float) -> int:
        """Write a batch in one transaction and delete what has expired; return the bytes written.

        An SD card may take a second. Raises `LedgerError` if the disk rejects the batch; then nothing of it is in the
        file, and `give_back` keeps it for the next try.
        """
        wal = self.path.with_name(self.path.name + "-wal")
        before = wal.stat().st_size if wal.exists() else 0
        try:
            with self._database as database:
                _write(database, batch)
                _expire(database, now_unix)
        except sqlite3.Error as error:
            raise LedgerError(self.path, str(error), "free some space; figures are kept in memory meanwhile") from error
        after = wal.stat().st_size if wal.exists() else 0
        # the log is later merged into the main file, which writes its pages once more
        return 2 * max(after - before, 0)

    def give_back(self, batch: Batch) -> None:
        """Put back a batch that could not be written, before what has arrived since."""
        batch.append(self._waiting)
        batch.shed()
        self._waiting = batch

    def flush(self, now_unix: float) -> int:
        """Write all waiting figures in this thread; return the bytes written.

        Raises `LedgerError` as `write` does.
        """
        batch = self.take(now_unix)
        try:
            return self.write(batch, now_unix)
        except LedgerError:
            self.give_back(batch)
            raise

    def close(self, now_unix: float) -> None:
        """Write the waiting figures, mark the ledger as closed properly, and close the file."""
        self._waiting.meta["closed"] = "1"
        try:
            self.flush(now_unix)
        finally:
            self._database.close()


def _write(database: sqlite3.Connection, batch: Batch) -> None:
    for period_s in KEEP_S:
        database.executemany(_ADD_ROLLUP, _rollups(batch.sums, period_s))
        rows = _gpu_sums(batch.gpu, period_s)
        database.executemany(_ADD_GPU, ((period_s, *key, *figures) for key, figures in rows.items()))
    database.executemany(_ADD_STEP, batch.step_rows)
    database.executemany(_ADD_EPOCH, ((*key, *sums) for key, sums in batch.epochs.items()))
    database.executemany(
        "INSERT INTO gap (start_unix, end_unix, source, reason) VALUES (?, ?, ?, ?)",
        ((gap.start_unix, gap.end_unix, gap.source, gap.reason) for gap in batch.gaps),
    )
    database.executemany("INSERT INTO event (unix, code, text) VALUES (?, ?, ?)", batch.events)
    database.executemany(
        "INSERT INTO wear VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET"
        " written_bytes = written_bytes + excluded.written_bytes",
        ((*key, count) for key, count in batch.wear.items()),
    )
    database.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", batch.meta.items())
    seal_values(database, "meta")


def _merge(sums: dict[_Key, _Sum], key: _Key, more: _Sum) -> None:
    total = sums.setdefault(key, _Sum())
    total.seconds += more.seconds
    total.gross_joules += more.gross_joules
    total.net_joules += more.net_joules
    total.unsplit_joules += more.unsplit_joules


def _add_gpu(
    sums: dict[tuple[int, str, str], tuple[float, float]], more: Mapping[tuple[int, str, str], tuple[float, float]]
) -> None:
    for key, (seconds, joules) in more.items():
        before = sums.get(key, (0.0, 0.0))
        sums[key] = before[0] + seconds, before[1] + joules


def period_start(unix: float, period_s: int) -> int:
    """Return when the minute, hour or day that contains `unix` began by the local clock, in Unix time."""
    return int(day_start_s(unix) if period_s == DAY_S else unix - local_clock_s(unix) % period_s)


def _gpu_sums(
    minutes: Mapping[tuple[int, str, str], tuple[float, float]], period_s: int
) -> dict[tuple[int, str, str], tuple[float, float]]:
    """Return sums by minute combined into one longer period."""
    sums: dict[tuple[int, str, str], tuple[float, float]] = {}
    for (minute, job, covers), figures in minutes.items():
        _add_gpu(sums, {(period_start(minute, period_s), job, covers): figures})
    return sums


def _rollups(minutes: Mapping[_Key, _Sum], period_s: int) -> Iterator[tuple[object, ...]]:
    """Yield the rows of sums by minute combined into one longer period."""
    sums: dict[_Key, _Sum] = {}
    for (minute, job, phase, kind), total in minutes.items():
        _merge(sums, (period_start(minute, period_s), job, phase, kind), total)
    for (start, job, phase, kind), total in sums.items():
        figures = (total.seconds, total.gross_joules, total.net_joules, total.unsplit_joules)
        yield (period_s, start, job, phase.value, kind.value, *figures)


_ADD_ROLLUP = """
INSERT INTO rollup VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    seconds = seconds + excluded.seconds, gross_joules = gross_joules + excluded.gross_joules,
    net_joules = net_joules + excluded.net_joules, unsplit_joules = unsplit_joules + excluded.unsplit_joules
"""
_ADD_GPU = """
INSERT INTO gpu VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    seconds = seconds + excluded.seconds, joules = joules + excluded.joules
"""
_ADD_STEP = """
INSERT INTO step (job, first_step, last_step, epoch, plan, end_unix, wall_s, kind, gross_joules, net_joules,
    planned_s, planned_joules, loss, phases) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_EPOCH_SUMS = (
    "steps", "measured_steps", "wall_s", "gross_joules", "net_joules", "unmeasured_s", "planned_s", "planned_joules",
    "paged_in_bytes", "paged_out_bytes",
)  # fmt: skip
_ADD_EPOCH = (
    "INSERT INTO epoch VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _EPOCH_SUMS)
    + ", end_unix = excluded.end_unix"
)


class _StepBlock:
    """Consecutive steps of one job, epoch, plan and kind that share a row."""

    def __init__(self, step: StepEnergy) -> None:
        self._first = step
        self._last = step
        self._count = 0
        self.wall_s = 0.0
        self._gross: float | None = 0.0
        self._net: float | None = 0.0
        self._planned_s: float | None = 0.0
        self._planned_joules: float | None = 0.0
        self._phases: dict[EnergyPhase, float] = {}
        self._end_unix = 0.0

    def takes(self, step: StepEnergy) -> bool:
        """Return whether `step` continues this block."""
        return (
            step.job == self._first.job
            and step.event.epoch == self._first.event.epoch
            and step.event.plan == self._first.event.plan
            and step.event.step == self._last.event.step + 1
            and step.kind is self._first.kind
        )

    def add(self, step: StepEnergy, end_unix: float) -> None:
        """Add a step that belongs to this block."""
        self._last, self._end_unix = step, end_unix
        self.wall_s += step.event.wall_s
        self._gross = _plus(self._gross, step.known_joules)
        self._net = _plus(self._net, None if step.known_joules is None else step.net_joules)
        self._planned_s = _plus(self._planned_s, step.event.planned_s)
        self._planned_joules = _plus(self._planned_joules, step.event.planned_joules)
        for phase, joules in step.phases.items():
            self._phases[phase] = self._phases.get(phase, 0.0) + joules

    def row(self) -> tuple[object, ...]:
        """Return the row for the table of steps."""
        first, last = self._first.event, self._last.event
        phases = json.dumps({phase.value: round(joules, 6) for phase, joules in self._phases.items()})
        return (
            self._first.job, first.step, last.step, first.epoch, first.plan, self._end_unix, self.wall_s,
            self._first.kind.value, self._gross, self._net, self._planned_s, self._planned_joules, last.loss, phases,
        )  # fmt: skip


def _plus(total: float | None, value: float | None) -> float | None:
    """Return the sum, or None if one part is unknown."""
    return None if total is None or value is None else total + value


def _connect(path: Path) -> sqlite3.Connection:
    # One thread at a time, but not always the same one: the supervisor has a thread for writing.
    # A power cut may lose the last flush, never the file.
    database = open_database(path, _SCHEMA, ("journal_mode = WAL", "synchronous = NORMAL"), timeout_s=5.0)
    try:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with database:
                database.executescript(_SCHEMA)
        elif version in READABLE_VERSIONS[:-1]:
            with database:
                database.executescript(f"{_GPU_TABLE}PRAGMA user_version = {SCHEMA_VERSION};")
        elif version != SCHEMA_VERSION:
            raise LedgerError(path, f"has format {version}, but this agent writes {SCHEMA_VERSION}", "update the agent")
    except (sqlite3.Error, LedgerError):
        database.close()
        raise
    return database


def _expire(database: sqlite3.Connection, now_unix: float) -> None:
    for period_s, keep_s in KEEP_S.items():
        for table in ("rollup", "gpu"):
            past = (period_s, int(now_unix - keep_s))
            database.execute(f"DELETE FROM {table} WHERE period_s = ? AND start_unix < ?", past)
    for table, keep in KEEP_ROWS.items():
        if table in ("step", "gap", "event"):
            database.execute(f"DELETE FROM {table} WHERE id <= (SELECT MAX(id) FROM {table}) - ?", (keep,))
    database.execute("DELETE FROM wear WHERE day_unix < ?", (int(now_unix - KEEP_S[DAY_S]),))
    database.execute(
        "DELETE FROM epoch WHERE end_unix < (SELECT end_unix FROM epoch ORDER BY end_unix DESC LIMIT 1 OFFSET ?)",
        (KEEP_ROWS["epoch"],),
    )


@contextmanager
def open_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Return a read-only connection to the ledger at `path`.

    Raises `LedgerError` if the file is missing or not a ledger.
    """
    if not path.exists():
        raise LedgerError(path, "does not exist yet", "it is created once the agent has run; see port-agent status")
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5.0)
        try:
            database.row_factory = sqlite3.Row
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in READABLE_VERSIONS:
                raise LedgerError(
                    path, f"has format {version}, but this agent reads {SCHEMA_VERSION}", "update the agent"
                )
            yield database
        finally:
            database.close()
    except sqlite3.OperationalError as error:
        raise LedgerError(path, str(error), "run as the agent's user, or ask the agent with --runtime-dir") from error
    except sqlite3.DatabaseError as error:
        raise LedgerError(path, str(error), "the agent moves a damaged ledger aside when it starts") from error
