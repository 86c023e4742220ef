"""SQLite files on media that wear out.

Distinguishes a damaged file from a disk that rejects writes, and moves the damaged file out of the way.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from port_agent.system.checksum import values_checksum
from port_planner.base.errors import PortError

_MAGIC = b"SQLite format 3\0"
_FORMAT_BYTES = slice(18, 20)
"""Offsets of the write and read versions of the file format: 1 is a rollback journal, 2 a write-ahead log
(sqlite.org/fileformat2.html).
"""
_KNOWN_FORMATS = (1, 2)
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SEAL = "seal"
"""The key under which a table of keys and values keeps the checksum of all its other rows."""
_COMPANIONS = ("-wal", "-shm", "-journal")


class DamagedDatabaseError(PortError):
    """The contents of a database differ from what was written."""


def is_damage(error: sqlite3.Error | DamagedDatabaseError) -> bool:
    """Return whether the file itself is broken, as opposed to the disk being full, read-only or locked."""
    if isinstance(error, DamagedDatabaseError):
        return True
    if hasattr(error, "sqlite_errorcode"):
        return error.sqlite_errorcode & 0xFF in _DAMAGE  # the low byte of an extended code is its kind
    return "malformed" in str(error)


def open_database(
    path: Path, schema: str, pragmas: Sequence[str], *, timeout_s: float, autocommit: bool = False
) -> sqlite3.Connection:
    """Open or create a database for one thread at a time, with these settings and its content
    checked (`check_content`).

    Text that is not UTF-8 is read with replacement characters. Raises DamagedDatabaseError, also for a format that
    SQLite would open read-only, OSError, sqlite3.Error.
    """
    if path.is_file():
        with open(path, "rb") as stream:
            header = stream.read(100)
        if header.startswith(_MAGIC) and not set(header[_FORMAT_BYTES]) <= set(_KNOWN_FORMATS):
            raise DamagedDatabaseError(f"its header names file formats {tuple(header[_FORMAT_BYTES])}")
    connection = sqlite3.connect(path, timeout=timeout_s, check_same_thread=False)
    connection.text_factory = lambda content: content.decode(errors="replace")
    if autocommit:
        connection.isolation_level = None
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        check_content(connection, schema)
    except UnicodeDecodeError as error:  # SQLite's own message, which cites the damaged table
        connection.close()
        raise DamagedDatabaseError("its tables' names are not text") from error
    except (sqlite3.Error, DamagedDatabaseError):
        connection.close()
        raise
    return connection


def check_content(connection: sqlite3.Connection, schema: str) -> None:
    """Check every page against SQLite's rules and the tables against those of `schema`.

    A database that is not created yet (`user_version` 0), or whose version differs from the schema's, keeps its own
    tables. Raises DamagedDatabaseError, sqlite3.Error.
    """
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(3)")]
    if found != ["ok"]:
        raise DamagedDatabaseError("; ".join(found))
    model = sqlite3.connect(":memory:")
    try:
        model.executescript(schema)
        if _version(connection) == _version(model) and (lacking := _layout(model) - _layout(connection)):
            raise DamagedDatabaseError(f"its tables are not those that were created: {sorted(lacking)[0]}")
    finally:
        model.close()


def read_sealed_values(connection: sqlite3.Connection, table: str) -> dict[str, str] | None:
    """Return the values of a key-value table as `seal_values` left them; None if they changed. Raises sqlite3.Error."""
    rows = connection.execute(f"SELECT CAST(key AS BLOB), CAST(value AS BLOB) FROM {table}").fetchall()
    try:
        values = {key.decode(): value.decode() for key, value in rows}
    except (UnicodeDecodeError, AttributeError):
        return None
    seal = values.pop(_SEAL, None)
    return values if seal is None or seal == values_checksum(values) else None


def seal_values(connection: sqlite3.Connection, table: str) -> None:
    """Keep the checksum of all other values of a table with them; raises sqlite3.Error."""
    values = dict(connection.execute(f"SELECT key, value FROM {table} WHERE key <> ?", (_SEAL,)).fetchall())
    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (_SEAL, values_checksum(values)))


def set_aside(path: Path, name: str) -> Path:
    """Rename a damaged database to `name` in the same directory, with its log; return its new path. Raises OSError."""
    aside = path.with_name(name)
    path.rename(aside)
    for suffix in _COMPANIONS:
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(aside.with_name(aside.name + suffix))
    return aside


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _layout(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Return the columns, types and constraints of each table, and what the indices cover, as SQLite spells them."""
    layout = set()
    for kind, name in connection.execute("SELECT type, name FROM sqlite_master").fetchall():
        pragma = "table_info" if kind == "table" else "index_info"
        for row in connection.execute(f"SELECT * FROM pragma_{pragma}(?)", (name,)):
            layout.add((f"{kind} {name}", repr(row)))
    return layout
