"""Write files so that a power cut leaves the old or the new content, never a mixture."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: temporary file, fsync, rename, fsync of the directory.

    Raises OSError; the old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
    sync_directory(path.parent)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, durably. Raises OSError."""
    descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
