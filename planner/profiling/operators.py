"""Measure what a step costs on this machine.

Seconds and workspace per operator, flash bandwidth, base memory.

Operators with the same name, shapes and arguments, on operands as cold, are measured once. Where a step computes on a device,
its operators are measured there, each waited for; only the processor's own cache is emptied between two runs. Run as a process of its own
(`agent.prepare.profiling`), so that the memory it reports is that of a bare worker; with the budget-aware
allocator preloaded, workspace counts whatever a kernel takes, oneDNN's scratch included.
"""

import ctypes
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from planner.ir.code_pages import release_code_pages
from planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost, PackingCost
from planner.ir.devices.kinds import CPU
from planner.ir.devices.torch_device import (
    device_name,
    generator_states,
    repeat_kernels,
    restore_generators,
    synchronize,
)
from planner.ir.direct_io import bypass_page_cache
from planner.ir.errors import PortError
from planner.ir.graph import Argument, Op, Ref, Scalar, StepGraph, references
from planner.ir.operators import GUARD
from planner.ir.process_memory import resident_bytes
from planner.ir.torch_operators import dtype, function_of, literal
from planner.profiling import kept_costs, shared_costs
from planner.profiling.cpu_cache import Sweep, cold_operands, last_level_bytes
from planner.profiling.device_memory import DeviceWorkspaceMeter

Progress = Callable[[int, int], None]

_REPEATS = 3
_SCATTER = 0.05
"""Of an operator's seconds: two runs that agree as well need no third."""
_DRAWN = 65521
"""Made-up numbers that are drawn before they come again: a prime, so that no two rows of a matrix are alike."""
_FLASH_SAMPLE_BYTES = 64 << 20
_CHUNK = 1 << 20
MEDIUM_WATTS = 0.15
"""What a medium draws while it transfers: 30 mA at 5 V, MEMORY_POWER of POET's reference implementation (SD card)."""
LEAST_MEDIUM_JOULES = 2e-9
"""Per byte, however fast: NVMe drives draw 5 to 6 W at 3 GB/s (data sheets)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs per op of each graph, and what the process itself holds.

    `base_bytes`: resident before any tensor; `retained_bytes`: what stays resident after every op has run once and all
    tensors are gone (kernels' caches, code pages). `released_bytes`: code among all that which only loading needed, and
    which a worker gives back.
    """

    ops: tuple[tuple[OpCost, ...], ...]
    base_bytes: int
    retained_bytes: int
    released_bytes: int = 0
    packings: tuple[tuple[PackingCost, ...], ...] = ()
    """Of each graph, where packing was measured."""
    taken_over: int = 0
    """Operators whose costs another machine of the same kind measured."""
    disputed: str = ""
    """How those that were measured here too contradict it; then none is taken over."""
    absent: tuple[tuple[int, ...], ...] = ()
    """Of each graph, where that was looked at: operators that do not run on its device, or lay out there what they give otherwise."""
    elsewhere: tuple[tuple[OpCost | None, ...], ...] = ()
    """Of each graph whose operators are divided between two devices, what they take on the other one."""

    @property
    def worker_bytes(self) -> int:
        """Return what a worker holds besides the step's tensors."""
        return self.base_bytes + self.retained_bytes - self.released_bytes

    def tables(self, device: DeviceCosts) -> Iterator[CostTable]:
        """Yield the cost table of each graph on a device."""
        for ops, packings, other in itertools.zip_longest(self.ops, self.packings, self.elsewhere, fillvalue=()):
            yield CostTable(device, ops, packings, other)

    def at_pace(self, pace: float) -> "Measured":
        """Return the same with every operator taking `pace` times as long, and as many joules."""
        tables = tuple(
            tuple(replace(c, seconds=c.seconds * pace, joules=c.joules * pace) for c in table) for table in self.ops
        )
        return replace(self, ops=tables)


def profile_operators(
    graphs: Iterable[StepGraph], *, compute_watts: float, progress: Progress | None = None, kept_in: Path | None = None,
    shared: Mapping[str, kept_costs.Kept] = {}, resident: bool = True, elsewhere: bool = False,
) -> Measured:  # fmt: skip
    """Run every distinct operator of `graphs` a few times on made-up data and return its cost.

    Those whose cost lies in the folder `kept_in` (`kept_costs`) run once, for what they leave resident. So do those that another
    machine of this kind measured (`shared`), once its dearest were measured here and are alike; these are not kept. Not
    `resident`: what is left resident is not looked at, and operators of known cost do not run. `elsewhere`: the graphs were recorded on
    another device than they name; operators that do not run here are `Measured.absent`, and cost nothing. What is left resident is not looked at.
    """
    graphs, resident = tuple(graphs), resident and not elsewhere  # what is absent cannot run for what it would leave
    base = resident_bytes()
    known: dict[Any, OpCost] = {}
    cache_bytes = last_level_bytes()
    calls, distinct = _calls(graphs, cache_bytes)
    for graph in graphs:
        repeat_kernels(graph.device)
    sweep = Sweep(cache_bytes)
    generators = generator_states({g.device for g in graphs})
    name = kept_costs.context(torch.get_num_threads(), cache_bytes, workspace_seen=_WorkspaceMeter().sees)
    kept = kept_costs.read_costs(kept_in, name, time.time())
    fresh: dict[str, kept_costs.Kept] = {}
    keys = {signature: kept_costs.operator_key(signature) for signature in distinct}
    given = {key: shared[key] for key in keys.values() if key in shared and key not in kept}
    checked, disputed = shared_costs.to_check(given), ""
    first = sorted(distinct.items(), key=lambda item: keys[item[0]] not in checked)
    lacking = set[Any]()
    with torch.no_grad():
        for done, (signature, call) in enumerate(first):
            key = keys[signature]
            found = kept.get(key)
            if elsewhere and found is None and not _runs_alike(call):
                lacking.add(signature)
                continue
            if found is None:
                found = fresh[key] = kept_costs.Kept(*_measure(call, sweep), time.time())
            elif resident:
                call.ready()[0]()
            known[signature] = _priced(found, compute_watts)
            if done + 1 == len(checked):
                disputed = shared_costs.disputed((given[key], fresh[key]) for key in checked)
                kept |= {} if disputed else {key: cost for key, cost in given.items() if key not in checked}
            if progress:
                progress(done + 1, len(distinct))
    kept_costs.keep_costs(kept_in, name, fresh)
    del sweep
    tables = _tables(calls, known)
    loaded, running = _resident_after(distinct.values()) if resident else (base, base)
    restore_generators(generators)
    taken_over = 0 if disputed else len(given) - len(checked)
    absent = tuple(tuple(i for i, c in enumerate(table) if _signature(c) in lacking) for table in calls)
    return Measured(
        tables, base, max(0, loaded - base), max(0, loaded - running), taken_over=taken_over, disputed=disputed,
        absent=absent if elsewhere else (),
    )  # fmt: skip


def kept_tables(
    graphs: Iterable[StepGraph], *, threads: int, compute_watts: float, kept_in: Path | None, workspace_seen: bool
) -> tuple[tuple[OpCost, ...], ...] | None:
    """Return the costs per op of each graph without running any; None where one of them is not in the folder `kept_in`.

    They are those of a process with so many `threads`, `workspace_seen` where the allocator is preloaded into it.
    """
    cache_bytes = last_level_bytes()
    calls, distinct = _calls(graphs, cache_bytes)
    name = kept_costs.context(threads, cache_bytes, workspace_seen=workspace_seen)
    kept = kept_costs.read_costs(kept_in, name, time.time())
    found = {signature: kept.get(kept_costs.operator_key(signature)) for signature in distinct}
    known = {signature: _priced(cost, compute_watts) for signature, cost in found.items() if cost is not None}
    return _tables(calls, known) if len(known) == len(found) else None


def _calls(graphs: Iterable[StepGraph], cache_bytes: int) -> tuple[list[list["_Call"]], dict[Any, "_Call"]]:
    """Return the calls of each graph, and one of each kind that is alike."""
    calls = [[_Call(g, *pair) for pair in zip(g.ops, cold_operands(g, cache_bytes), strict=True)] for g in graphs]
    return calls, {_signature(c): c for table in calls for c in table if c.op.name != GUARD}


def _priced(cost: kept_costs.Kept, compute_watts: float) -> OpCost:
    return OpCost(cost.seconds, cost.workspace_bytes, cost.seconds * compute_watts)


def _tables(calls: Iterable[Iterable["_Call"]], known: Mapping[Any, OpCost]) -> tuple[tuple[OpCost, ...], ...]:
    free = OpCost(0.0, 0, 0.0)
    return tuple(tuple(known.get(_signature(c), free) for c in table) for table in calls)


def _resident_after(calls: Iterable["_Call"]) -> tuple[int, int]:
    """Return what is resident now, and what once code is given back.

    Only these calls have fetched theirs again then.
    """
    give_back()
    loaded = resident_bytes()
    release_code_pages()
    with torch.no_grad():
        for call in calls:
            call.ready()[0]()
    give_back()
    return loaded, resident_bytes()


def give_back() -> None:
    """Let the allocator return freed memory, so that what is resident is what is really held."""
    library = ctypes.CDLL(None)
    for function in ("port_malloc_trim", "malloc_trim"):
        if hasattr(library, function):
            getattr(library, function)(ctypes.c_size_t(0))


@dataclass(frozen=True, slots=True)
class _Call:
    """One operator of a graph, and the storages among its operands that it finds cold."""

    graph: StepGraph
    op: Op
    cold: frozenset[int]

    def ready(self) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        """Return what runs it on made-up data, and those of its operands that are warm."""
        op = self.op
        function = function_of(op)
        tensors: dict[int, torch.Tensor] = {}
        for argument in (*op.args, *(a for _, a in op.kwargs)):
            for v in references(argument):
                tensors.setdefault(v, _made_up(self.graph, v))
        self._choose_rows(tensors)
        self._fill_lengths(tensors)
        args = [_filled(a, tensors) for a in op.args]
        kwargs = {k: _filled(a, tensors) for k, a in op.kwargs}
        warm = [t for v, t in tensors.items() if self.graph.values[v].storage not in self.cold]
        return lambda: function(*args, **kwargs), warm

    def _choose_rows(self, tensors: dict[int, torch.Tensor]) -> None:
        """Let a mask that is an index choose as many elements as it did when the step was recorded."""
        op = self.op
        name = op.name.partition("::")[2].partition(".")[0]
        if name not in _INDEXED or not isinstance(indices := op.args[1], tuple):
            return
        moved = op.args[2] if name.startswith("index_put") else None if op.outputs[0] is None else Ref(op.outputs[0])
        shape = self.graph.values[moved.value].shape if isinstance(moved, Ref) else ()
        for place, index in enumerate(indices):
            if isinstance(index, Ref) and tensors[index.value].dtype is torch.bool and place < len(shape):
                mask = torch.zeros(tensors[index.value].numel(), dtype=torch.bool, device=tensors[index.value].device)
                mask[: shape[place]] = True
                tensors[index.value].copy_(mask.view(tensors[index.value].shape))

    def _fill_lengths(self, tensors: dict[int, torch.Tensor]) -> None:
        """Let the lengths that a CTC loss takes as tensors be as long as its other operands allow."""
        if self.op.name not in _LENGTHS:
            return
        operands = [a for a in self.op.args if isinstance(a, Ref)]
        first = _LENGTHS[self.op.name]
        log_probs, labels, input_lengths, lengths = (tensors[a.value] for a in operands[first : first + 4])
        input_lengths.fill_(log_probs.shape[0])
        alpha = self.op.outputs[1] if first == 0 else operands[-1].value
        longest = 0 if alpha is None else (self.graph.values[alpha].shape[-1] - 1) // 2
        lengths.fill_(longest)
        if labels.dim() == 1:
            lengths.copy_((labels.numel() - longest * torch.arange(len(lengths))).clamp(0, longest))


_LENGTHS = {"aten::_ctc_loss.Tensor": 0, "aten::_ctc_loss_backward.Tensor": 1}
"""Operators that take log-probabilities, labels and both lengths as tensors, from this argument on."""
_INDEXED = ("index", "index_put", "index_put_")
"""Operators whose second argument is a list of indices, masks among them."""


def _signature(call: _Call) -> Any:
    def shape(argument: Argument) -> Any:
        if isinstance(argument, Ref):
            v = call.graph.values[argument.value]
            device = call.graph.storages[v.storage].device
            elsewhere = () if device == CPU else (device, device_name(device))
            return ("value", v.dtype, v.shape, v.stride, v.storage in call.cold, *elsewhere)
        if isinstance(argument, Scalar):
            return "scalar"
        if isinstance(argument, tuple):
            return tuple(shape(a) for a in argument)
        return (type(argument).__name__, argument)

    op = call.op
    return op.name, tuple(shape(a) for a in op.args), tuple((k, shape(a)) for k, a in op.kwargs)


def _measure(call: _Call, sweep: Sweep) -> tuple[float, int]:
    run, warm = call.ready()
    kind = call.graph.device
    meter = _WorkspaceMeter() if kind == CPU else DeviceWorkspaceMeter(kind)
    # With one thread, CPU time is what the op takes on a quiet machine, however busy this one is.
    clock = time.thread_time if kind == CPU and torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[float] = []
    workspace = 0
    budget = time.perf_counter() + 2.0
    for _ in range(_REPEATS + 1):
        sweep(warm)
        meter.start()
        begin = clock()
        result = run()
        synchronize(kind)
        taken = clock() - begin
        workspace = max(workspace, meter.stop())
        del result
        agreed = any(abs(taken - other) <= _SCATTER * min(taken, other) for other in seconds)
        seconds.append(taken)
        if agreed or time.perf_counter() > budget:
            break
    return min(seconds[1:] or seconds), workspace


def _runs_alike(call: _Call) -> bool:
    """Say whether a call runs on its device and gives tensors that lie as they did where the step was recorded."""
    try:
        result = call.ready()[0]()
        synchronize(call.graph.device)
    except RuntimeError:  # no kernel, or none for these types
        return False
    given = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    if len(given) != len(call.op.outputs):
        return False
    wanted = [None if v is None else call.graph.values[v] for v in call.op.outputs]
    return all(
        value is None
        or (str(t.dtype), tuple(t.shape), t.stride()) == (f"torch.{value.dtype}", value.shape, value.stride)
        for t, value in zip(given, wanted, strict=True)
    )


def _made_up(graph: StepGraph, v: int) -> torch.Tensor:
    value = graph.values[v]
    kind = dtype(value.dtype)
    extent = sum((n - 1) * k for n, k in zip(value.shape, value.stride, strict=True)) + 1 if 0 not in value.shape else 0
    flat = torch.empty(extent, dtype=kind, device=graph.storages[value.storage].device)
    if kind.is_floating_point:
        _fill(flat)
    else:
        flat.zero_()
    return flat.as_strided(value.shape, value.stride)


def _fill(flat: torch.Tensor) -> None:
    """Fill with one drawing of numbers again and again: drawing all takes as long as many an operator."""
    drawn = flat[:_DRAWN].uniform_(0.1, 0.9)
    for piece in flat[_DRAWN:].split(_DRAWN):
        piece.copy_(drawn[: piece.numel()])


def _filled(argument: Argument, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(argument, Ref):
        return tensors[argument.value]
    if isinstance(argument, Scalar):
        return 0.5
    if isinstance(argument, tuple):
        return [_filled(a, tensors) for a in argument]
    return literal(argument)


class _WorkspaceMeter:
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
        """Say whether workspace is seen at all."""
        return self._calls is not None

    def start(self) -> None:
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


# -- flash


class FlashError(PortError):
    """The medium could not be measured."""


def medium_joules(bytes_per_s: float) -> float:
    """Return an estimate of what a medium of this bandwidth takes per byte.

    As POET derives it: watts over bandwidth.
    """
    return max(MEDIUM_WATTS / bytes_per_s, LEAST_MEDIUM_JOULES)


def measure_flash(
    directory: Path, *, compute_watts: float, name: str = "flash", progress: Progress | None = None
) -> Flash:
    """Return bandwidth and latency of the medium under `directory`.

    Past the page cache where the system allows it.

    Writes and reads a 64 MiB file; FlashError where that fails. Energy per byte is the CPU time that the transfers take,
    measured, at `compute_watts`, and an estimate for the medium.
    """
    try:
        return _timed_flash(directory, compute_watts, name, progress)
    except OSError as error:
        raise FlashError(
            f"the medium under {directory} could not be measured: {error.strerror}; "
            f"it takes {_FLASH_SAMPLE_BYTES >> 20} MiB of free space there: free some or choose another --page-dir"
        ) from error


def _timed_flash(directory: Path, compute_watts: float, name: str, progress: Progress | None) -> Flash:
    directory.mkdir(parents=True, exist_ok=True)
    buffer = mmap.mmap(-1, _CHUNK)
    buffer.write(os.urandom(_CHUNK))
    rounds = _FLASH_SAMPLE_BYTES // _CHUNK
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:  # without a name: nobody puts another in its place
        fd = file.fileno()
        bypass_page_cache(fd)
        write_s = []
        cpu = [time.thread_time()]
        for i in range(rounds):
            begin = time.perf_counter()
            os.pwrite(fd, memoryview(buffer), i * _CHUNK)
            write_s.append(time.perf_counter() - begin)
            if progress:
                progress(i + 1, 2 * rounds)
        begin = time.perf_counter()
        os.fsync(fd)
        sync = time.perf_counter() - begin
        cpu.append(time.thread_time())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = []
        for i in range(rounds):
            begin = time.perf_counter()
            os.preadv(fd, [memoryview(buffer)], i * _CHUNK)
            read_s.append(time.perf_counter() - begin)
            if progress:
                progress(rounds + i + 1, 2 * rounds)
        cpu.append(time.thread_time())
        small = []
        for i in range(16):
            begin = time.perf_counter()
            os.preadv(fd, [memoryview(buffer)[:4096]], i * _CHUNK)
            small.append(time.perf_counter() - begin)
    read, write = _FLASH_SAMPLE_BYTES / sum(read_s), _FLASH_SAMPLE_BYTES / (sum(write_s) + sync)
    write_cpu, read_cpu = (compute_watts * (b - a) / _FLASH_SAMPLE_BYTES for a, b in itertools.pairwise(cpu))
    return Flash(
        name=name, read_bytes_per_s=read, write_bytes_per_s=write, latency_s=statistics.median(small),
        read_joules_per_byte=medium_joules(read) + read_cpu, write_joules_per_byte=medium_joules(write) + write_cpu,
    )  # fmt: skip
