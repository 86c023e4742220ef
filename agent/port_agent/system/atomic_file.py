"""Write files so that a power cut leaves the old or the new content, never a mixture."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: temporary file, fsync, rename, fsync of the directory.

    Raises OSError; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by an interruption, or a link that somebody put there
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def atomic_stream(path: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Yield a stream whose content becomes `path`, durably, when the block ends. Space for `nbytes` is reserved first.

    Raises OSError; after any exception, in the block or here, the old file is untouched and nothing is left next to it.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as stream:
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, nbytes)
            yield stream
            stream.truncate()
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def atomic_directory(path: Path, *, replaced: bool = False) -> Iterator[Path]:
    """Yield a directory to fill, which becomes `path`, durably, when the block ends. `replaced`: whether it
    may replace an existing one.

    Raises OSError, also if `path` exists, is not empty and is not to be replaced; after any exception, nothing of the
    new directory is left, and the old one stays.
    """
    building = path.with_name(f".{path.name}.new")
    shutil.rmtree(building, ignore_errors=True)  # left by an interruption
    try:
        building.mkdir()
        yield building
        for made in (*building.rglob("*"), building):
            sync_directory(made)
        if replaced and path.exists():
            _exchange(building, path)
        else:
            building.rename(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    sync_directory(path.parent)


def _exchange(building: Path, path: Path) -> None:
    """Replace an existing directory by a new one, and remove the old one."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # left by an interruption
    path.rename(old)
    try:
        building.rename(path)
    except BaseException:
        old.rename(path)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()


def sync_directory(path: Path) -> None:
    """Make the entries of a directory, or the content of a file, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
