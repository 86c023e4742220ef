"""What tells a damaged SQLite file from a disk that refuses."""

import sqlite3
from pathlib import Path

import pytest

from port_agent.system.database import (
    DamagedDatabaseError,
    check_content,
    is_damage,
    open_database,
    read_sealed_values,
    seal_values,
    set_aside,
)

SCHEMA = "CREATE TABLE IF NOT EXISTS one (id INTEGER PRIMARY KEY, text TEXT NOT NULL); PRAGMA user_version = 1;"


def made(path: Path, schema: str = SCHEMA) -> sqlite3.Connection:
    """Return a database of this schema."""
    connection = sqlite3.connect(path)
    connection.executescript(schema)
    return connection


def test_a_sound_database_passes(tmp_path: Path) -> None:
    with made(tmp_path / "a.db") as connection:
        check_content(connection, SCHEMA)
    for name in ("a.db", "new.db"):
        check_content(open_database(tmp_path / name, SCHEMA, (), timeout_s=1.0), SCHEMA)


@pytest.mark.parametrize(
    "other", ["CREATE TABLE ome (id INTEGER PRIMARY KEY, text TEXT NOT NULL)", "CREATE TABLE one (id, text TEXT)"]
)
def test_other_tables_are_damage(tmp_path: Path, other: str) -> None:
    connection = made(tmp_path / "a.db", f"{other}; PRAGMA user_version = 1")
    with pytest.raises(DamagedDatabaseError, match="tables"):
        check_content(connection, SCHEMA)


def test_tables_of_another_version_are_not_judged(tmp_path: Path) -> None:
    with made(tmp_path / "a.db", "CREATE TABLE other (id); PRAGMA user_version = 2") as connection:
        check_content(connection, SCHEMA)


def test_a_format_that_sqlite_opens_read_only_is_damage(tmp_path: Path) -> None:
    made(tmp_path / "a.db").close()
    content = bytearray((tmp_path / "a.db").read_bytes())
    content[18] ^= 4
    (tmp_path / "a.db").write_bytes(content)
    with pytest.raises(DamagedDatabaseError, match="formats"):
        open_database(tmp_path / "a.db", SCHEMA, (), timeout_s=1.0)


def test_values_are_what_was_sealed_or_none(tmp_path: Path) -> None:
    connection = made(tmp_path / "a.db", "CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    connection.execute("INSERT INTO kept VALUES ('pause', 'for ever')")
    assert read_sealed_values(connection, "kept") == {"pause": "for ever"}, "of an agent that did not seal"
    seal_values(connection, "kept")
    seal_values(connection, "kept")
    assert read_sealed_values(connection, "kept") == {"pause": "for ever"}
    for damage in ("'for evil'", "CAST(x'ff' AS TEXT)"):
        connection.execute(f"UPDATE kept SET value = {damage} WHERE key = 'pause'")
        assert read_sealed_values(connection, "kept") is None


def test_extended_codes_count_as_their_kind() -> None:
    error = sqlite3.DatabaseError("index")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT_INDEX
    full = sqlite3.OperationalError("full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    assert is_damage(error) and not is_damage(full) and is_damage(DamagedDatabaseError("x"))


def test_a_database_is_set_aside_with_its_log(tmp_path: Path) -> None:
    for name in ("a.db", "a.db-wal"):
        (tmp_path / name).write_text(name)
    assert set_aside(tmp_path / "a.db", "a.db.damaged") == tmp_path / "a.db.damaged"
    assert {path.name for path in tmp_path.iterdir()} == {"a.db.damaged", "a.db.damaged-wal"}
