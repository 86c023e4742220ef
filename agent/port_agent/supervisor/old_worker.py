"""Workers that a killed supervisor left behind."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from port_agent.system.locks import LockFile

PATIENCE_S = 2.0
"""Seconds to wait: a worker whose supervisor died leaves within a second."""
_POLL_S = 0.02


async def clear_old_workers(locks: Iterable[Callable[[], LockFile]]) -> None:
    """Wait until all workers of a killed supervisor are gone."""
    await asyncio.gather(*(clear_old_worker(open_lock) for open_lock in locks))


async def clear_old_worker(open_lock: Callable[[], LockFile]) -> None:
    """Wait until the worker of a killed supervisor is gone, because there must never be two."""
    try:
        lock = open_lock()
    except OSError:
        return  # a read-only state directory: nothing can train there
    try:
        end = time.monotonic() + PATIENCE_S
        while not lock.try_lock() and time.monotonic() < end + PATIENCE_S:
            if time.monotonic() >= end:
                _kill_worker(lock.read())
            await asyncio.sleep(_POLL_S)
    finally:
        lock.close()


def _kill_worker(pid: str) -> None:
    """Kill the worker that an earlier supervisor recorded, if that process still is one of ours."""
    try:
        command = Path(f"/proc/{int(pid)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return
    if b"--control-fd" in command:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
