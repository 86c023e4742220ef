"""Jobs and their history in SQLite.

With a manifest next to each job from which a broken database is rebuilt.

Nothing here waits for the disk except `flush`, `add` and `history`, which any thread may call: an fsync on an SD card
can take half a second, and the loop that calls `save` must stop a worker within 100 ms.

WAL with synchronous=FULL: measured on ext4 with 200 commits of one job and one event, a commit writes 12.7 kB and needs
one fsync. A rollback journal writes 28.8 kB and needs three. The lock is exclusive: no second process can open it, and
no shared-memory file is needed.
"""

import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from port_agent.jobs.directories import JobDirectories
from port_agent.jobs.job import Job, JobKind, JobNotFoundError, JobRequestError, JobSpec, JobState, check_spec
from port_agent.jobs.records import DamagedRecordError, StoredRecord, seal, unseal
from port_agent.system.database import (
    DamagedDatabaseError,
    is_damage,
    open_database,
    read_sealed_values,
    seal_values,
    set_aside,
)
from port_planner.base.errors import PortError

HISTORY_ROWS = 5000
"""Rows of history that are kept: about 1 MB of text, or years of a job a day."""

_NUMBER = re.compile("[0-9]{1,15}")
_HIGHEST_ID = 10**15
"""Largest valid number of a job; a larger one is damage."""
_NO_DIRECTORY = (
    "its directory is missing: the disk was full, or it was deleted by hand; submit the job again if you need it"
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, state INTEGER NOT NULL,
  record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS history (id INTEGER PRIMARY KEY, at REAL NOT NULL, job INTEGER, kind TEXT NOT NULL,
  text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS history_of_job ON history (job, id);
CREATE TABLE IF NOT EXISTS wear (day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
PRAGMA user_version = 1;
"""


class StoreError(PortError):
    """The job store cannot be written; `reason` is the system's own."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} cannot be written ({reason}); free space or make it writable, then try again")


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An event of the history, at Unix time `at`."""

    at: float
    job: int | None
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class SetAsideJob:
    """A stored job that cannot be restored; its record and files stay as they are."""

    id: int
    name: str
    """Empty if its record is unreadable."""
    reason: str
    directory: Path


@dataclass(slots=True)
class _PendingWrites:
    """Changes in memory that are not on disk yet."""

    jobs: dict[int, Job] = field(default_factory=dict)
    manifests: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    history: list[HistoryEntry] = field(default_factory=list)
    wear: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.forgotten or self.history or self.wear or self.settings)

    def put_back(self, older: "_PendingWrites") -> None:
        """Put back what could not be written; newer changes are kept."""
        self.jobs = {**older.jobs, **self.jobs}
        self.manifests |= older.manifests
        self.forgotten |= older.forgotten
        self.history = [*older.history, *self.history][-HISTORY_ROWS:]
        for day, count in older.wear.items():
            self.wear[day] = self.wear.get(day, 0) + count
        self.settings = {**older.settings, **self.settings}


class JobStore:
    """All jobs in memory, and on disk as far as the disk allows.

    A write that fails is kept in memory and retried by the next `flush`; `trouble` says what is wrong until then.
    Only `add` insists on the disk, because an accepted job must never be lost. Of an attached program, only its
    number is stored, as taken.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directories = JobDirectories(state_dir / "jobs")
        self.path = state_dir / "jobs.db"
        self.trouble: StoreError | None = None
        self.recovered_from: Path | None = None
        self.lost = False
        """Whether the database was missing or damaged at the start, so that the jobs were
        read from their directories.
        """
        self.set_aside: dict[int, SetAsideJob] = {}
        """Jobs that are stored but cannot be restored, by id."""
        self.on_pending: Callable[[], None] = lambda: None
        """Called when something waits to be flushed."""
        self._jobs: dict[int, Job] = {}
        self._settings: dict[str, str] = {}
        self._wear: dict[str, int] = {}
        self._pending = _PendingWrites()
        self._lock = threading.Lock()
        """Lock that guards `_pending` for short moments; `_disk` is held while the disk is written."""
        self._disk = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._next_id = 1
        self._written = 0
        self._open()

    # --- reading from memory

    def all(self) -> list[Job]:
        """Return all jobs by id."""
        return [job for _, job in sorted(self._jobs.items())]

    def get(self, job_id: int) -> Job:
        """Return one job; raises JobNotFoundError if there is none, JobRequestError if it is set aside."""
        try:
            return self._jobs[job_id]
        except KeyError:
            if job_id in self.set_aside:
                reason = self.set_aside[job_id].reason
                raise JobRequestError(
                    f"job {job_id} is set aside ({reason}); `port-agent job cancel {job_id}` removes it", job_id
                ) from None
            raise JobNotFoundError(str(job_id), job_id) from None

    def find(self, text: str) -> Job:
        """Return the job with this id or name (the newest of that name); raises JobNotFoundError."""
        if _NUMBER.fullmatch(text):
            return self.get(int(text))
        named = [job for job in self.all() if job.spec.name == text]
        if not named:
            raise JobNotFoundError(repr(text))
        active = [job for job in named if not job.state.is_over]
        return (active or named)[-1]

    def job_dir(self, job_id: int) -> Path:
        """Return the directory that belongs to a job."""
        return self._directories.of(job_id)

    def written_on(self, day: str) -> int:
        """Return the bytes that were written to flash on `day` (YYYY-MM-DD)."""
        return self._wear.get(day, 0)

    def setting(self, key: str) -> str | None:
        """Return a remembered value such as the user's pause."""
        return self._settings.get(key)

    # --- changing, in memory first

    def save(self, job: Job, *, manifest: bool = True) -> None:
        """Save `job`; progress alone (`manifest=False`) avoids one file write."""
        self._jobs[job.id] = job
        if job.spec.kind is JobKind.ATTACHED:
            return
        with self._lock:
            self._pending.jobs[job.id] = job
            if manifest:
                self._pending.manifests.add(job.id)
        self.on_pending()

    def keep_in_memory(self, job: Job) -> None:
        """Keep progress in memory until something else causes a flush."""
        self._jobs[job.id] = job
        if job.spec.kind is JobKind.ATTACHED:
            return
        with self._lock:
            self._pending.jobs[job.id] = job

    def note(self, at: float, job_id: int | None, kind: str, text: str) -> None:
        """Add an entry to the history."""
        if job_id in self._jobs and self._jobs[job_id].spec.kind is JobKind.ATTACHED:
            return
        with self._lock:
            self._pending.history = [*self._pending.history, HistoryEntry(at, job_id, kind, text)][-HISTORY_ROWS:]
        self.on_pending()

    def add_wear(self, day: str, count_bytes: int) -> None:
        """Add to the bytes written on `day`; saved with the next flush."""
        self._wear[day] = self._wear.get(day, 0) + count_bytes
        with self._lock:
            self._pending.wear[day] = self._pending.wear.get(day, 0) + count_bytes

    def remember(self, key: str, value: str | None) -> None:
        """Remember a setting across restarts, or forget it."""
        if value is None:
            self._settings.pop(key, None)
        else:
            self._settings[key] = value
        with self._lock:
            self._pending.settings[key] = value
        self.on_pending()

    def forget(self, job_id: int) -> None:
        """Remove a job with all its files."""
        self._jobs = {key: job for key, job in self._jobs.items() if key != job_id}
        self.set_aside.pop(job_id, None)
        with self._lock:
            self._pending.jobs.pop(job_id, None)
            self._pending.manifests.discard(job_id)
            self._pending.forgotten.add(job_id)
        self.on_pending()

    # --- the disk; from any thread

    def add(self, spec: JobSpec, submitted_at: float, prepare: Callable[[Path], None] = lambda directory: None) -> Job:
        """Return the new job, durable on disk.

        `prepare` puts the job's files into its directory before the job exists. Raises JobRequestError for a name that
        is taken, StoreError if the disk rejects the write.
        """
        with self._disk:
            self.check_new(spec)
            waits = spec.waits_for_data or spec.federated
            state = JobState.WAITING_DATA if waits else JobState.QUEUED
            reason = "waiting for a round of its federation" if spec.federated else ""
            job = Job(id=self._next_id, spec=spec, submitted_at=submitted_at, state=state, reason=reason)
            self._written += 1
            try:
                self._directories.create(job.id, seal(job, self._written), prepare)
                self._insist(lambda connection: _write_row(connection, job, self._written))
            except (OSError, StoreError) as error:
                self.trouble = error if isinstance(error, StoreError) else StoreError(self.path, str(error))
                self._directories.discard(job.id)
                raise self.trouble from error
            self._next_id += 1
            self._jobs = {**self._jobs, job.id: job}
            return job

    def check_new(self, spec: JobSpec) -> None:
        """Raise JobRequestError if no job can be made from `spec`, or if another has its name."""
        check_spec(spec)
        twin = next((job for job in self.all() if job.spec.name == spec.name and not job.state.is_over), None)
        if twin is not None:
            raise JobRequestError(f"job {twin.label} has this name and has not ended; choose another --name", twin.id)

    def add_attached(self, spec: JobSpec, submitted_at: float, known_as: int | None) -> Job:
        """Return the job of a program that attached itself; it is kept only in memory.

        Its number is that from an earlier run of this agent (`known_as`) or a new one, reserved on disk because the
        ledger keeps its joules under it. Raises JobRequestError for an invalid name, StoreError when the disk rejects
        the write.
        """
        check_spec(spec)
        with self._disk:
            number = known_as
            if number is None or not 0 < number < self._next_id or self._is_taken(number):
                number = taken = self._next_id
                self._insist(lambda connection: _take_number(connection, taken))
                self._next_id += 1
            job = Job(id=number, spec=spec, submitted_at=submitted_at)
            self._jobs = {**self._jobs, job.id: job}
            return job

    def _insist(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """Write now, into a new database if this one proves to be damaged.

        Raises StoreError.
        """
        rebuilt = False
        while True:
            if self._connection is None:
                raise self.trouble or StoreError(self.path, "the database is not open")
            try:
                return write(self._connection)
            except sqlite3.Error as error:
                if rebuilt or not is_damage(error):
                    self.trouble = StoreError(self.path, str(error))
                    raise self.trouble from error
                self._rebuild(str(error))
                rebuilt = True

    def _is_taken(self, number: int) -> bool:
        twin = self._jobs.get(number)
        ended = twin is not None and twin.spec.kind is JobKind.ATTACHED and twin.state.is_over
        return number in self.set_aside or (twin is not None and not ended)

    def flush(self) -> bool:
        """Write everything that is pending; return whether the disk accepted all of it."""
        with self._disk:
            with self._lock:
                pending, self._pending = self._pending, _PendingWrites()
            if self._write(pending):
                return True
            with self._lock:
                self._pending.put_back(pending)
            return False

    def history(self, job_id: int | None = None, limit: int = 100) -> list[HistoryEntry]:
        """Return the newest entries, oldest first."""
        self.flush()
        if self._connection is None:
            with self._lock:
                return self._pending.history[-limit:]
        where, values = ("WHERE job = ?", (job_id,)) if job_id is not None else ("", ())
        query = f"SELECT at, job, kind, text FROM history {where} ORDER BY id DESC LIMIT {int(limit)}"
        with self._disk, self._database_errors():
            rows = self._connection.execute(query, values).fetchall()
            return [HistoryEntry(*row) for row in reversed(rows)]
        return []

    def close(self) -> None:
        """Write what is pending and close the database."""
        self.flush()
        with self._disk:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # --- inside

    def _open(self) -> None:
        was_there = self.path.exists()
        try:
            self._connection = self._connect(self.path)
            if not self._jobs:
                self._load(self._connection)
                self.lost = not was_there and bool(self._jobs or self.set_aside)
        except (sqlite3.DatabaseError, DamagedDatabaseError) as error:
            if is_damage(error):
                self.lost = True
                self._rebuild(str(error))
                self._pending.wear = dict(self._wear)
                return
            self.trouble = StoreError(self.path, str(error))
            self._read_only_view()
        except OSError as error:
            self.trouble = StoreError(self.path, error.strerror or str(error))
            self._read_only_view()

    def _connect(self, path: Path) -> sqlite3.Connection:
        self._directories.root.mkdir(parents=True, exist_ok=True)
        connection = open_database(
            path,
            _SCHEMA,
            ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"),
            timeout_s=2.0,
            autocommit=True,
        )
        try:
            connection.executescript(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _load(self, connection: sqlite3.Connection) -> None:
        """Load what is stored; raises DamagedDatabaseError after loading the intact part."""
        rows, damage = _rows(connection)
        settings = read_sealed_values(connection, "settings")
        self._settings = settings or {}
        wear = connection.execute("SELECT day, bytes FROM wear ORDER BY day DESC LIMIT 3").fetchall()
        self._wear = {
            day: count for day, count in wear if isinstance(day, str) and isinstance(count, int) and count >= 0
        }
        self._restore(rows, damage)
        self._directories.remove_remains(but=self._pending.forgotten)
        highest = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        if highest and isinstance(highest[0], int) and highest[0] < _HIGHEST_ID:
            self._next_id = max(self._next_id, highest[0] + 1)
        wrong = [*damage.values(), *(["a stored setting is damaged"] if settings is None else [])]
        if wrong:
            raise DamagedDatabaseError("; ".join(wrong))

    def _restore(self, rows: dict[int, StoredRecord], damage: dict[int, str]) -> None:
        """Restore jobs from rows and manifests, using the later record of each; set aside
        those that cannot be restored.
        """
        manifests, damaged_manifests = self._directories.manifests()
        for number in sorted({*rows, *manifests, *damage, *damaged_manifests}):
            row, manifest = rows.get(number), manifests.get(number)
            record = manifest if row is None or (manifest and manifest.written > row.written) else row
            if record is None:
                self._set_aside(number, "", damaged_manifests.get(number) or damage[number])
                continue
            self._written = max(self._written, record.written)
            if not self.job_dir(number).is_dir() and self._directories.taken_away(number):  # the row was to go next
                self._pending.forgotten.add(number)
                continue
            if not self.job_dir(number).is_dir():  # its manifest could never be written, nor anything after it
                self._set_aside(number, record.name, _NO_DIRECTORY)
                continue
            try:
                self._jobs[number] = record.job()
            except JobRequestError as error:
                self._set_aside(number, record.name, str(error))
                continue
            if record is manifest:  # the interruption came between the two writes
                self._pending.jobs[number] = self._jobs[number]
            elif manifest is None:
                self._pending.jobs[number] = self._jobs[number]
                self._pending.manifests.add(number)
        numbers = (number for number in self._directories.numbers() if number < _HIGHEST_ID)
        self._next_id = max([0, *self._jobs, *self.set_aside, *numbers]) + 1

    def _set_aside(self, number: int, name: str, reason: str) -> None:
        self.set_aside[number] = SetAsideJob(number, name, reason, self.job_dir(number))

    def _rebuild(self, reason: str) -> None:
        """Move the damaged database aside, and build a new one from memory or the manifests."""
        history = [] if self._connection is None else _sound_history(self._connection)
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        try:
            self.recovered_from = set_aside(self.path, f"{self.path.name}.corrupt-{time.time_ns() // 1_000_000_000}")
            self._connection = self._connect(self.path)
        except (OSError, sqlite3.Error, DamagedDatabaseError) as error:
            self.trouble = StoreError(self.path, f"{reason}, and no new one can be created: {error}")
            return
        if not self._jobs:
            self._restore({}, {})
        with self._lock:
            stored = {key: job for key, job in self._jobs.items() if job.spec.kind is not JobKind.ATTACHED}
            self._pending.jobs = {**stored, **self._pending.jobs}
            self._pending.settings = {**self._settings, **self._pending.settings}
            self._pending.history = [*history, *self._pending.history][-HISTORY_ROWS:]
        self.on_pending()

    def _read_only_view(self) -> None:
        """Read the jobs of a state directory that cannot be written."""
        if not self._jobs:
            self._restore({}, {})

    def _write(self, pending: _PendingWrites) -> bool:
        self._written += 1
        try:
            for job_id in pending.manifests:
                self._directories.write_manifest(job_id, seal(pending.jobs[job_id], self._written))
            for (
                job_id
            ) in pending.forgotten:  # first, otherwise an interruption after the row is deleted restores the job
                self._directories.take_away(job_id)
        except OSError as error:
            self.trouble = StoreError(self._directories.root, error.strerror or str(error))
            return False
        if self._connection is None:
            self._open()
        if self._connection is None:
            return False
        with self._database_errors():
            if pending or self.trouble is not None:
                _write_transaction(self._connection, pending, self._written)
            self.trouble = None
            for job_id in pending.forgotten:
                self._directories.remove_taken(job_id)
            return True
        return False

    @contextlib.contextmanager
    def _database_errors(self) -> Iterator[None]:
        """Turn database errors into `trouble`; a damaged database is rebuilt."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self.lost = True
                self._rebuild(str(error))
            else:
                self.trouble = StoreError(self.path, str(error))


def _rows(connection: sqlite3.Connection) -> tuple[dict[int, StoredRecord], dict[int, str]]:
    """Return the intact rows by job id, and the faults of the others by row id."""
    sound: dict[int, StoredRecord] = {}
    damaged: dict[int, str] = {}
    for number, content in connection.execute("SELECT id, CAST(record AS BLOB) FROM jobs").fetchall():
        try:
            record = unseal(content or b"")
        except DamagedRecordError as error:
            damaged[number] = str(error)
            continue
        if record.id != number:
            damaged[record.id] = f"the row of job {record.id} is numbered {number}"
        sound[record.id] = record
    return sound, damaged


def _sound_history(connection: sqlite3.Connection) -> list[HistoryEntry]:
    """Return what can be read of the history of a damaged database."""
    entries = []
    try:
        rows = connection.execute(
            "SELECT at, job, kind, text FROM history WHERE typeof(at) = 'real' AND typeof(job) IN ('integer', 'null')"
            " AND typeof(kind) = 'text' AND typeof(text) = 'text' ORDER BY id"
        )
        for row in rows:
            entries.append(HistoryEntry(*row))
    except sqlite3.Error:
        return entries  # as far as it goes
    return entries


def _write_row(connection: sqlite3.Connection, job: Job, written: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO jobs (id, name, state, record) VALUES (?, ?, ?, ?)",
        (job.id, job.spec.name, int(job.state), seal(job, written)),
    )


def _take_number(connection: sqlite3.Connection, number: int) -> None:
    """Reserve this number, so that no later job gets it, even after a restart of the agent; raises sqlite3.Error."""
    connection.executescript(
        "BEGIN IMMEDIATE; DELETE FROM sqlite_sequence WHERE name = 'jobs';"
        f"INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', {number:d}); COMMIT"
    )


def _write_transaction(connection: sqlite3.Connection, pending: _PendingWrites, written: int) -> None:
    """Write everything or nothing; raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for job in pending.jobs.values():
            _write_row(connection, job, written)
        connection.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in pending.forgotten])
        connection.executemany(
            "INSERT INTO history (at, job, kind, text) VALUES (?, ?, ?, ?)",
            [(entry.at, entry.job, entry.kind, entry.text) for entry in pending.history],
        )
        if pending.history:
            connection.execute("DELETE FROM history WHERE id <= (SELECT max(id) FROM history) - ?", (HISTORY_ROWS,))
        connection.executemany(
            "INSERT INTO wear VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET bytes = bytes + excluded.bytes",
            list(pending.wear.items()),
        )
        for key, value in pending.settings.items():
            if value is None:
                connection.execute("DELETE FROM settings WHERE key = ?", (key,))
            else:
                connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (key, value))
        if pending.settings:
            seal_values(connection, "settings")
        connection.execute("COMMIT")
        if pending.settings:  # the log may lose its end to one flipped bit, and no manifest knows of a pause
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
