"""Operators timed in rounds: processor time or seconds of each, and its workspace.

The cache is emptied once between two rounds, for all operators. The operands of each are as cold as if nothing had run
before, because no other operator has touched them.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from port_planner.ir.device_kinds import CPU
from port_planner.ir.torch_device import synchronize
from port_planner.profiling.cpu_cache import Sweep
from port_planner.profiling.device_memory import DeviceWorkspaceMeter

_REPEATS = 3
_SCATTER = 0.05
"""Share of an operator's seconds: if two runs agree this well, no third is needed."""
_LONG_S = 2.0
"""Seconds of one operator's runs after which it is not repeated."""


class TimedCall(Protocol):
    """An operator that can be run."""

    @property
    def kind(self) -> str:
        """The kind of device on which it runs."""

    def ready(self) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        """Return a function that runs it, and the operands of it that are warm."""


def timed(calls: Sequence[TimedCall], sweep: Sweep) -> list[tuple[float, int]]:
    """Return seconds and workspace bytes of each call: the fastest run after the first, and the largest workspace.

    The operands of all calls are alive at once.
    """
    runs = [_Runs(call.kind, *call.ready()) for call in calls]
    for _ in range(_REPEATS + 1):
        waiting = [one for one in runs if not one.known]
        if not waiting:
            break
        sweep()
        for one in waiting:
            one.repeat()
    return [(min(one.seconds[1:] or one.seconds), one.workspace_bytes) for one in runs]


def shortest_run_s(run: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest of several runs; other work of the machine can only add to them."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@dataclass(slots=True)
class _Runs:
    """The runs of one operator so far."""

    kind: str
    run: Callable[[], Any]
    warm: list[torch.Tensor]
    seconds: list[float] = field(default_factory=list)
    workspace_bytes: int = 0
    known: bool = False
    """Whether no further run is needed."""

    def repeat(self) -> None:
        """Run once more, on operands that are cold except for the warm ones."""
        meter = HostWorkspaceMeter() if self.kind == CPU else DeviceWorkspaceMeter(self.kind)
        # With one thread, CPU time is what the op takes on an idle machine, however busy this one is.
        clock = time.thread_time if self.kind == CPU and torch.get_num_threads() == 1 else time.perf_counter
        for tensor in self.warm:
            tensor.sum()
        meter.start()
        begin = clock()
        result = self.run()
        synchronize(self.kind)
        taken = clock() - begin
        self.workspace_bytes = max(self.workspace_bytes, meter.stop())
        del result
        agreed = any(abs(taken - other) <= _SCATTER * min(taken, other) for other in self.seconds)
        self.seconds.append(taken)
        self.known = agreed or sum(self.seconds) > _LONG_S


class HostWorkspaceMeter:
    """Measures the bytes that a call takes at its peak beyond what it returns.

    It reads the exact peak of the preloaded allocator. Without that allocator it returns 0, and unplanned memory shows
    in the measured reserve instead.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._calls: tuple[Callable[[], int], Callable[[], int], Callable[[], None]] | None = None
        if hasattr(library, "port_malloc_peak_live_bytes"):
            live, peak = library.port_malloc_live_bytes, library.port_malloc_peak_live_bytes
            live.restype = peak.restype = ctypes.c_size_t
            self._calls = live, peak, library.port_malloc_reset_peak
        self._before = 0

    @property
    def sees(self) -> bool:
        """Return whether workspace can be measured."""
        return self._calls is not None

    def start(self) -> None:
        """Start measuring a call."""
        if self._calls:
            live, _, reset = self._calls
            reset()
            self._before = live()

    def stop(self) -> int:
        """Return the bytes; the results of the call must still be alive."""
        if not self._calls:
            return 0
        live, peak, _ = self._calls
        returned = max(0, live() - self._before)
        return max(0, peak() - self._before - returned)
