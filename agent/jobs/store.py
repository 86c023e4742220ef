"""Jobs and their history in SQLite, with a manifest beside each job from which a broken database is rebuilt.

Nothing here waits for the disk except `flush`, `add` and `history`, which any thread may call: an fsync on an SD card
can take half a second, and the loop that calls `save` must stop a worker within 100 ms.

WAL with synchronous=FULL: measured on ext4 with 200 commits of one job and one event, it writes 12.7 kB a commit
where a rollback journal writes 28.8 kB, and one fsync where that needs three. The lock is exclusive: no second
process can open it, and no shared-memory file is needed.
"""

import contextlib
import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent.jobs.model import (
    Job,
    JobNotFoundError,
    JobRequestError,
    JobSpec,
    JobState,
    check_spec,
    from_record,
    to_record,
)
from agent.system.atomic_file import write_atomically
from planner.ir.errors import PortError

HISTORY_ROWS = 5000
"""About 1 MB of text: years of a job a day."""

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
    """Something that happened, at Unix time `at`."""

    at: float
    job: int | None
    kind: str
    text: str


@dataclass(slots=True)
class _Pending:
    """What is in memory and not yet on disk."""

    jobs: dict[int, Job] = field(default_factory=dict)
    manifests: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    history: list[HistoryEntry] = field(default_factory=list)
    wear: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.jobs or self.forgotten or self.history or self.wear or self.settings)

    def put_back(self, older: "_Pending") -> None:
        """Take in what could not be written; what was changed meanwhile is newer and stays."""
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
    Only `add` insists on the disk, because an accepted job must never be lost.
    """

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "jobs"
        self.path = state_dir / "jobs.db"
        self.trouble: StoreError | None = None
        self.recovered_from: Path | None = None
        self.on_pending: Callable[[], None] = lambda: None
        """Called when something waits to be flushed."""
        self._jobs: dict[int, Job] = {}
        self._settings: dict[str, str] = {}
        self._wear: dict[str, int] = {}
        self._pending = _Pending()
        self._lock = threading.Lock()
        """Guards `_pending` for moments; `_disk` is held while the disk is written."""
        self._disk = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._next_id = 1
        self._open()

    # --- reading from memory

    def all(self) -> list[Job]:
        """Return all jobs by id."""
        return [job for _, job in sorted(self._jobs.items())]

    def get(self, job_id: int) -> Job:
        """Return one job; raises JobNotFoundError when there is none."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise JobNotFoundError(str(job_id), job_id) from None

    def find(self, text: str) -> Job:
        """Return the job with this id or name (the newest of that name); raises JobNotFoundError."""
        if text.isdigit():
            return self.get(int(text))
        named = [job for job in self.all() if job.spec.name == text]
        if not named:
            raise JobNotFoundError(repr(text))
        active = [job for job in named if not job.state.is_over]
        return (active or named)[-1]

    def job_dir(self, job_id: int) -> Path:
        """Return the directory that belongs to a job."""
        return self.directory / str(job_id)

    def written_on(self, day: str) -> int:
        """Return the bytes that were written to flash on `day` (YYYY-MM-DD)."""
        return self._wear.get(day, 0)

    def setting(self, key: str) -> str | None:
        """Return a remembered value such as the user's pause."""
        return self._settings.get(key)

    # --- changing, in memory first

    def save(self, job: Job, *, manifest: bool = True) -> None:
        """Keep `job`; progress alone (`manifest=False`) spares one file write."""
        self._jobs[job.id] = job
        with self._lock:
            self._pending.jobs[job.id] = job
            if manifest:
                self._pending.manifests.add(job.id)
        self.on_pending()

    def keep_in_memory(self, job: Job) -> None:
        """Keep progress that the next flush for another reason may take along."""
        self._jobs[job.id] = job
        with self._lock:
            self._pending.jobs[job.id] = job

    def note(self, at: float, job_id: int | None, kind: str, text: str) -> None:
        """Add to the history."""
        with self._lock:
            self._pending.history = [*self._pending.history, HistoryEntry(at, job_id, kind, text)][-HISTORY_ROWS:]
        self.on_pending()

    def add_wear(self, day: str, count_bytes: int) -> None:
        """Add to the bytes written on `day`; goes to disk with whatever is flushed next."""
        self._wear[day] = self._wear.get(day, 0) + count_bytes
        with self._lock:
            self._pending.wear[day] = self._pending.wear.get(day, 0) + count_bytes

    def remember(self, key: str, value: str | None) -> None:
        """Keep or forget a setting across restarts."""
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
        with self._lock:
            self._pending.jobs.pop(job_id, None)
            self._pending.manifests.discard(job_id)
            self._pending.forgotten.add(job_id)
        self.on_pending()

    # --- the disk; from any thread

    def add(self, spec: JobSpec, submitted_at: float, prepare: Callable[[Path], None] = lambda directory: None) -> Job:
        """Return the new job, durable on disk.

        `prepare` puts the job's files into its directory before the job exists. Raises JobRequestError for a name that is
        taken, StoreError when the disk refuses.
        """
        check_spec(spec)
        with self._disk:
            twins = [job for job in self.all() if job.spec.name == spec.name and not job.state.is_over]
            if twins:
                label = twins[0].label
                raise JobRequestError(f"job {label} has this name and is not over; choose another --name", twins[0].id)
            if self._connection is None:
                raise self.trouble or StoreError(self.path, "the database is not open")
            state = JobState.WAITING_DATA if spec.waits_for_data else JobState.QUEUED
            job = Job(id=self._next_id, spec=spec, submitted_at=submitted_at, state=state)
            try:
                self.job_dir(job.id).mkdir(parents=True, exist_ok=True)
                prepare(self.job_dir(job.id))
                self._write_manifest(job)
                _write_row(self._connection, job)
            except (OSError, sqlite3.Error) as error:
                self.trouble = StoreError(self.path, str(error))
                shutil.rmtree(self.job_dir(job.id), ignore_errors=True)
                raise self.trouble from error
            self._next_id += 1
            self._jobs = {**self._jobs, job.id: job}
            return job

    def flush(self) -> bool:
        """Write everything that is pending; returns whether the disk took it all."""
        with self._disk:
            with self._lock:
                pending, self._pending = self._pending, _Pending()
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
        try:
            self._connection = self._connect(self.path)
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._move_aside(str(error))
                return
            self.trouble = StoreError(self.path, str(error))
            self._read_only_view()
            return
        except OSError as error:
            self.trouble = StoreError(self.path, error.strerror or str(error))
            self._read_only_view()
            return
        if not self._jobs:
            self._load(self._connection)

    def _connect(self, path: Path) -> sqlite3.Connection:
        self.directory.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, timeout=2.0, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("database disk image is malformed")
            connection.executescript(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _load(self, connection: sqlite3.Connection) -> None:
        for (text,) in connection.execute("SELECT record FROM jobs"):
            job = from_record(json.loads(text))
            self._jobs[job.id] = job
        self._settings = dict(connection.execute("SELECT key, value FROM settings"))
        self._wear = dict(connection.execute("SELECT day, bytes FROM wear ORDER BY day DESC LIMIT 3"))
        self._recover_unlisted()
        highest = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        self._next_id = max([*self._jobs, highest[0] if highest else 0]) + 1

    def _recover_unlisted(self) -> None:
        """Take in jobs whose manifest is newer than the database: the cut came between the two writes."""
        for job in self._manifests():
            if job.id not in self._jobs:
                self._jobs[job.id] = job
                self._pending.jobs[job.id] = job

    def _manifests(self) -> Iterator[Job]:
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.glob("*/manifest.json")):
            try:
                job = from_record(json.loads(path.read_bytes()))
            except (OSError, ValueError, JobRequestError):
                continue  # torn before its first rename: such a job was never acknowledged
            if str(job.id) == path.parent.name:
                yield job

    def _move_aside(self, reason: str) -> None:
        """Keep the damaged database for a look, and build a new one from memory or the manifests."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns() // 1_000_000_000}")
        try:
            self.path.rename(aside)
            for suffix in ("-wal", "-shm", "-journal"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            self._connection = self._connect(self.path)
        except (OSError, sqlite3.Error) as error:
            self.trouble = StoreError(self.path, f"{reason}, and no new one can be made: {error}")
            return
        self.recovered_from = aside
        if not self._jobs:
            self._jobs = {job.id: job for job in self._manifests()}
        self._next_id = max([*self._jobs, self._next_id - 1]) + 1
        with self._lock:
            self._pending.jobs = {**self._jobs, **self._pending.jobs}
            self._pending.settings = {**self._settings, **self._pending.settings}
        self.on_pending()

    def _read_only_view(self) -> None:
        """Show the jobs of a state directory that cannot be written."""
        if not self._jobs:
            self._jobs = {job.id: job for job in self._manifests()}
            self._next_id = max(self._jobs, default=0) + 1

    def _write_manifest(self, job: Job) -> None:
        content = json.dumps(to_record(job), indent=1, sort_keys=True).encode()
        write_atomically(self.job_dir(job.id) / "manifest.json", content)

    def _write(self, pending: _Pending) -> bool:
        try:
            for job_id in pending.manifests:
                self._write_manifest(pending.jobs[job_id])
        except OSError as error:
            self.trouble = StoreError(self.directory, error.strerror or str(error))
            return False
        if self._connection is None:
            self._open()
        if self._connection is None:
            return False
        with self._database_errors():
            if pending or self.trouble is not None:
                _write_transaction(self._connection, pending)
            self.trouble = None
            for job_id in pending.forgotten:
                shutil.rmtree(self.job_dir(job_id), ignore_errors=True)
            return True
        return False

    @contextlib.contextmanager
    def _database_errors(self) -> Iterator[None]:
        """Turn a failing database into `trouble`; a damaged one is rebuilt."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                self._move_aside(str(error))
            else:
                self.trouble = StoreError(self.path, str(error))


def _write_row(connection: sqlite3.Connection, job: Job) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO jobs (id, name, state, record) VALUES (?, ?, ?, ?)",
        (job.id, job.spec.name, int(job.state), json.dumps(to_record(job))),
    )


def _write_transaction(connection: sqlite3.Connection, pending: _Pending) -> None:
    """Write everything or nothing; raises sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for job in pending.jobs.values():
            _write_row(connection, job)
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
        connection.execute("COMMIT")
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file itself is broken, as opposed to the disk being full, read-only or locked."""
    return error.sqlite_errorcode in _DAMAGE if hasattr(error, "sqlite_errorcode") else "malformed" in str(error)


_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
