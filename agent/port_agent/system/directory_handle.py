"""Directories that others may write into.

Files in them are opened relative to a handle, never through a symbolic link.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REGULAR_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags for opening a regular file, without blocking: opening a pipe would otherwise wait until somebody writes."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryHandle:
    """An open directory, and a context manager that closes it.

    A name denotes one entry in it; a name with a slash is rejected.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        """Path for messages; the directory may have another name by now."""
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return a handle of a directory whose whole path is trusted. Raises OSError."""
        return cls(path, os.open(path, _DIRECTORY))

    def below(self, name: str, *, make: bool = False) -> "DirectoryHandle":
        """Return a handle of a directory in this one; if it is missing and `make` is true, create it.

        Raises OSError.
        """
        if make:
            with contextlib.suppress(FileExistsError):  # opening it shows whether it is a directory
                os.mkdir(_entry(name), dir_fd=self.descriptor)
        try:
            found = os.open(_entry(name), _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link is either, by system
                raise OSError(error.errno, "not a directory, or a link, which is not followed", name) from error
            raise
        return DirectoryHandle(self.path / name, found)

    def create(self, name: str) -> BinaryIO:
        """Create a file and open it for writing. Raises OSError; FileExistsError also if the name is a link."""
        return os.fdopen(os.open(_entry(name), _NEW_FILE, 0o666, dir_fd=self.descriptor), "wb")

    def read(self, name: str) -> BinaryIO:
        """Open a regular file for reading. Raises OSError, also for a link, a pipe or a device."""
        descriptor = os.open(_entry(name), _REGULAR_FILE, dir_fd=self.descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is not a valid regular file", name)
        return os.fdopen(descriptor, "rb")

    def rename(self, name: str, to: str) -> None:
        """Give an entry of this directory another name in it. Raises OSError."""
        os.rename(_entry(name), _entry(to), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; of a link, remove the link and not its target. Raises OSError."""
        os.unlink(_entry(name), dir_fd=self.descriptor)

    def link(self, name: str, target: "DirectoryHandle") -> None:
        """Link a regular file into another directory under the same name. Raises OSError, also for a link."""
        os.link(_entry(name), name, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor, follow_symlinks=False)
        if not stat.S_ISREG(os.stat(name, dir_fd=target.descriptor, follow_symlinks=False).st_mode):
            target.remove(name)
            raise OSError(errno.ELOOP, "is not a valid regular file", name)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield name and status of each regular file; links, devices and pipes are skipped.

        Raises OSError.
        """
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)

    def sync(self) -> None:
        """Make the entries durable. Raises OSError."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the directory."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_sample_file(path: Path) -> BinaryIO:
    """Open a regular file of a data directory.

    The file may be a link, but not a link to another link. The directory of its target must not be a link either: the
    target's owner could replace it at any time. Raises OSError.
    """
    try:
        target = Path(os.path.abspath(path.parent / path.readlink()))  # noqa: PTH100 resolve() would follow links
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with DirectoryHandle.open(path.parent) as directory:
            return directory.read(path.name)
    with DirectoryHandle.open(target.parent.parent) as above, above.below(target.parent.name) as directory:
        return directory.read(target.name)


def _entry(name: str) -> str:
    """Return `name` if it is one entry of a directory; raises OSError for a path."""
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "is not a valid plain name of a file", name)
    return name
