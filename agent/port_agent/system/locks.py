"""One supervisor per state directory, and one worker: two locks that die with their holders."""

import fcntl
import os
from pathlib import Path

from port_planner.base.errors import ExitCode, PortError


class InstanceError(PortError):
    """Another agent already serves this state directory."""

    exit_code = ExitCode.LEFT

    def __init__(self, path: Path, pid: str) -> None:
        self.path, self.pid = path, pid
        super().__init__(
            f"another port-agent (process {pid or 'unknown'}) already serves {path.parent}; stop it, or give this one "
            "its own --state-dir and --runtime-dir"
        )


LOCK_NAME = "port-agent.lock"
"""Name of the lock in a directory that an agent works with."""


class LockFile:
    """An exclusive flock that the kernel releases when the last holder of the descriptor is gone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_lock(self) -> bool:
        """Return whether the lock is ours now."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def hold(self) -> str | None:
        """Take the lock and record this process as its holder.

        If another process has it, close this file and return what that one recorded, which may be empty.
        """
        if not self.try_lock():
            holder = self.read()
            self.close()
            return holder
        self.write(str(os.getpid()))
        return None

    def write(self, text: str) -> None:
        """Record the holder, for messages."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text.encode(), 0)

    def read(self) -> str:
        """Return what the holder recorded."""
        return os.pread(self.descriptor, 64, 0).decode("ascii", "replace").strip()

    def close(self) -> None:
        """Close the descriptor; a child that inherited it still holds the lock."""
        os.close(self.descriptor)


def lock_instance(runtime_dir: Path, state_dir: Path) -> list[LockFile]:
    """Return the locks of this supervisor; raises InstanceError when another one runs.

    The state directory's lock is the real one. It may be read-only, so the runtime directory has one as well.
    """
    locks: list[LockFile] = []
    for directory in (runtime_dir, state_dir):
        try:
            lock = LockFile(directory / LOCK_NAME)
        except OSError:
            if directory is runtime_dir:
                raise
            continue  # a read-only state directory: nothing is trained there, so nothing can collide
        holder = lock.hold()
        if holder is not None:
            for held in locks:
                held.close()
            raise InstanceError(lock.path, holder)
        locks.append(lock)
    return locks
