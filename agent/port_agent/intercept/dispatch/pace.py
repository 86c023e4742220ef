"""A CPU share for a program that no cgroup limits: pauses between operators."""

import os
import time

LOOK_S = 0.02
"""Seconds between checks of CPU time: less than cpu.max's period of 100 ms, and rare enough to cost nothing."""


class CpuPace:
    """Keeps this process at `cpu_percent` of all CPUs on average; unused time is not saved up."""

    def __init__(self, cpu_percent: float) -> None:
        self._cpus = cpu_percent / 100 * (os.cpu_count() or 1)
        self._next_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._before_s = self._next_s

    def delay_s(self) -> float:
        """Return for how many seconds no operator should start."""
        now_s = time.perf_counter()
        if now_s < self._next_s:
            return self._next_s - now_s
        if now_s - self._before_s < LOOK_S:
            return 0.0
        cpu_s = time.process_time()
        delay_s = max(0.0, (cpu_s - self._cpu_s) / self._cpus - (now_s - self._before_s))
        self._cpu_s, self._before_s = cpu_s, now_s + delay_s
        self._next_s = self._before_s
        return delay_s
