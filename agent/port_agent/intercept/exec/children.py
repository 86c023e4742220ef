"""A program's child processes (DataLoader workers and others), stopped while it is paused.

They are stopped by SIGSTOP, which no process can ignore. If the program is killed meanwhile, a guard lets them
continue: a shell that waits for the end of its input.
"""

import contextlib
import os
import signal
import subprocess
import threading

import psutil

_MAX_LOOKS = 5
"""Largest number of looks.

A process may fork between being listed and being stopped; one that forks faster than this is not caught.
"""

_GUARD = ["/bin/sh", "-c", 'trap "" INT TERM HUP; read -r end; kill -CONT "$@" 2>/dev/null', "port-agent-guard"]


class Children:
    """The descendants of this process. Any thread may call each method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped: dict[int, psutil.Process] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def stop(self) -> int:
        """Stop all running descendants; return how many are now stopped, without those that have ended."""
        with self._lock:
            for _ in range(_MAX_LOOKS):
                found = [process for process in _descendants() if process.pid not in self._stopped]
                if self._guard is not None:
                    found = [process for process in found if process.pid != self._guard.pid]
                if not found:
                    break
                self._watch([*self._stopped, *(process.pid for process in found)])
                for process in found:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(signal.SIGSTOP)  # checks that the id still belongs to that process
                        self._stopped[process.pid] = process
            return len(self._stopped)

    def go_on(self) -> None:
        """Let the stopped processes run again."""
        with self._lock:
            for process in self._stopped.values():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
            self._stopped.clear()
            self._dismiss()

    def _watch(self, pids: list[int]) -> None:
        """Start a guard for these processes, instead of the previous one."""
        self._dismiss()
        with contextlib.suppress(OSError):  # no process can be created: they are stopped anyway
            self._guard = subprocess.Popen(
                [*_GUARD, *map(str, pids)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _dismiss(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()


def _descendants() -> list[psutil.Process]:
    try:
        return psutil.Process(os.getpid()).children(recursive=True)
    except psutil.Error:
        return []
