"""A share of the CPUs for a program that no cgroup holds: time between operators in which none begins."""

import os
import time

LOOK_S = 0.02
"""CPU time is looked at this often: shorter than cpu.max's period of 100 ms, and nothing beside an operator."""


class CpuPace:
    """Keeps this process at `cpu_percent` of all CPUs, on the mean; what it did not use is not saved up."""

    def __init__(self, cpu_percent: float) -> None:
        self._cpus = cpu_percent / 100 * (os.cpu_count() or 1)
        self._next_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._before_s = self._next_s

    def delay_s(self) -> float:
        """Return for how many seconds no operator should begin."""
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
