"""Loads for the machine while its meter is calibrated: rest, arithmetic, memory traffic, flash."""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from port_agent.energy.calibration import Calibration, MeteredLoad, WorkClass, fit, meter_runs
from port_agent.energy.sources.power_source import PowerSource
from port_agent.system.clock import now_s
from port_planner.base.direct_io import bypass_page_cache

_RUN_S = 2.0
_REPEATS = 4
"""Repetitions of six loads, each of two seconds after one period: about a minute."""
_MATRIX = 512
_MOVED_ELEMENTS = 8 << 20
"""Elements of each of three tensors of 32 MiB, which exceed the caches of small machines."""
_CHUNK = 1 << 20
_FILE_CHUNKS = 64
_WRITES_PER_S = 50
"""Largest number of MiB written per second. Calibration writes 0.5 GB to a fast medium, and less to a slow one."""


class Threads:
    """A load of threads that repeat something until it is stopped; each uses at most one core."""

    def __init__(self, name: str, work: Callable[[], Callable[[], object]], cores: int, counts: WorkClass) -> None:
        """`work` returns the function that a thread repeats; its core-seconds count as `counts`."""
        self.name = name
        self._make, self._cores, self._counts = work, cores, counts
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._cpu_s: list[float] = []
        self._begun_s = 0.0

    def start(self) -> None:
        """Start the load."""
        self._stopped.clear()
        self._cpu_s.clear()
        self._begun_s = time.monotonic()
        self._threads = [threading.Thread(target=self._repeat, daemon=True) for _ in range(self._cores)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Mapping[WorkClass, float]:
        """Stop it; return the core-seconds, and the seconds in which any core was busy."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        active_s = time.monotonic() - self._begun_s
        return {WorkClass.ACTIVE: active_s if self._cores else 0.0, self._counts: sum(self._cpu_s)}

    def _repeat(self) -> None:
        action = self._make()
        while not self._stopped.is_set():
            action()
        self._cpu_s.append(time.thread_time())


class FlashTransfers:
    """A load that repeatedly writes or reads a file, bypassing the page cache."""

    def __init__(self, name: str, descriptor: int, counts: WorkClass) -> None:
        """`descriptor`: a file of 64 MiB. `counts`: READ or WRITTEN."""
        self.name = name
        self._descriptor, self._counts = descriptor, counts
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved_bytes, self._cpu_s = 0, 0.0
        self._error: OSError | None = None
        self._buffer = mmap.mmap(-1, _CHUNK)
        self._buffer.write(os.urandom(_CHUNK))

    def start(self) -> None:
        """Start the load."""
        self._stopped.clear()
        self._moved_bytes = 0
        self._thread = threading.Thread(target=self._move, daemon=True)
        self._thread.start()

    def stop(self) -> Mapping[WorkClass, float]:
        """Stop; return the bytes moved, and the core-seconds used. Raises OSError if the medium rejected writes."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return {self._counts: float(self._moved_bytes), WorkClass.MOVING: self._cpu_s}

    def _move(self) -> None:
        view, descriptor = memoryview(self._buffer), self._descriptor
        begin_s, chunk = time.monotonic(), 0
        try:
            while not self._stopped.is_set():
                place = chunk % _FILE_CHUNKS * _CHUNK
                if self._counts is WorkClass.READ:
                    os.preadv(descriptor, [view], place)
                else:
                    os.pwrite(descriptor, view, place)
                    self._stopped.wait(max(0.0, begin_s + (chunk + 1) / _WRITES_PER_S - time.monotonic()))
                chunk += 1
        except OSError as error:
            self._error = error
        finally:
            view.release()
        self._moved_bytes, self._cpu_s = chunk * _CHUNK, time.thread_time()


def calibrate(source: PowerSource, directory: Path, cores: int, progress: Callable[[float], None]) -> Calibration:
    """Return what this machine draws at rest, for arithmetic and memory traffic on its cores, and for
    the flash of `directory`.

    Flash is charged only beyond the core-seconds of its transfers. Raises CalibrationError if the meter gave too few
    readings, and OSError if the directory cannot hold a file of 64 MiB.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:  # unnamed, so that nobody can replace it
            bypass_page_cache(file.fileno())
            chunk = mmap.mmap(-1, _CHUNK)
            chunk.write(os.urandom(_CHUNK))
            for number in range(_FILE_CHUNKS):
                os.pwrite(file.fileno(), chunk, number * _CHUNK)
            loads: list[MeteredLoad] = [
                Threads("rest", _matrices, 0, WorkClass.DENSE),
                Threads("one core", _matrices, 1, WorkClass.DENSE),
                Threads("all cores", _matrices, cores, WorkClass.DENSE),
                Threads("memory", _additions, cores, WorkClass.MOVING),
                FlashTransfers("reading flash", file.fileno(), WorkClass.READ),
                FlashTransfers("writing flash", file.fileno(), WorkClass.WRITTEN),
            ]
            metered = meter_runs(
                source, loads, run_s=_RUN_S, repeats=_REPEATS, clock=now_s, wait=time.sleep, progress=progress
            )
    finally:
        torch.set_num_threads(threads)
    return fit(*metered)


def _matrices() -> Callable[[], object]:
    a, b, out = (torch.randn(_MATRIX, _MATRIX) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _additions() -> Callable[[], object]:
    a, b, out = (torch.zeros(_MOVED_ELEMENTS) for _ in range(3))
    return lambda: torch.add(a, b, out=out)
