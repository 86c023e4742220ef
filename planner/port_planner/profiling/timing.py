"""Operators timed in rounds: what processor time or seconds each takes, and its workspace.

Between two rounds the cache is emptied once for all: an operator finds its own operands as cold as if nothing had run before it, since
no other has touched them.
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
"""Of an operator's seconds: two runs that agree as well need no third."""
_LONG_S = 2.0
"""Of one operator's runs: after that, none is repeated."""


class TimedCall(Protocol):
    """An operator that can be run."""

    @property
    def kind(self) -> str:
        """The kind of device that it runs on."""

    def ready(self) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        """Return what runs it, and those of its operands that are warm."""


def timed(calls: Sequence[TimedCall], sweep: Sweep) -> list[tuple[float, int]]:
    """Return seconds and bytes of workspace of each call: its shortest run after the first, and its fullest.

    The operands of all are alive at once.
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
    """Return the seconds of the fastest of some runs: what else the machine does comes on top of each."""
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
        """Run once more, on operands that are cold but for the warm ones."""
        meter = HostWorkspaceMeter() if self.kind == CPU else DeviceWorkspaceMeter(self.kind)
        # With one thread, CPU time is what the op takes on a quiet machine, however busy this one is.
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
    """Bytes that a call takes at its peak beyond what it returns.

    Reads the preloaded allocator's exact peak where it is there; otherwise nothing is known and 0 is returned, and what
    is unplanned shows in the measured reserve instead.
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
        """Return whether workspace is seen at all."""
        return self._calls is not None

    def start(self) -> None:
        """Begin a call."""
        if self._calls:
            live, _, reset = self._calls
            reset()
            self._before = live()

    def stop(self) -> int:
        """Return the bytes; what the call returned must still be alive."""
        if not self._calls:
            return 0
        live, peak, _ = self._calls
        returned = max(0, live() - self._before)
        return max(0, peak() - self._before - returned)
