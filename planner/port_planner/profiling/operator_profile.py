"""Measure the costs of a step on this machine: seconds and workspace per operator, flash bandwidth, base memory.

Operators with the same name, shapes and arguments, and with operands that are equally cold, are measured once. If a
step computes on a device, its operators are measured there, each of them waited for; between two runs only the
processor's own cache is emptied. This runs in a separate process
(`port_agent.prepare.measurement.measurement_process`), so that the memory it reports is that of a bare worker. With the
budget-aware allocator preloaded, workspace counts whatever a kernel takes, oneDNN's scratch included.
"""

import ctypes
import itertools
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from port_planner.base.code_pages import release_code_pages
from port_planner.base.direct_io import bypass_page_cache
from port_planner.base.errors import PortError
from port_planner.base.process_memory import resident_bytes
from port_planner.ir.allowed_operators import only_checks
from port_planner.ir.costs import CostTable, DeviceCosts, Flash, OpCost, PackingCost
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import StepGraph
from port_planner.ir.torch_device import (
    generator_states,
    repeat_kernels,
    restore_generators,
)
from port_planner.profiling import kept_costs, neighbours, shared_costs
from port_planner.profiling.calls import Call, runs_alike, signature
from port_planner.profiling.cpu_cache import Sweep, cold_operands, last_level_bytes
from port_planner.profiling.timing import HostWorkspaceMeter, timed

Progress = Callable[[int, int], None]

_TOGETHER_BYTES = 16 << 20
"""Bytes of operands that exist at once; emptying the cache for each operator alone would
take longer than running it.
"""
_LOADED_BYTES = 16 << 20
"""Bytes of code and kernels' caches that are loaded while operators run."""
_FLASH_SAMPLE_BYTES = 64 << 20
_CHUNK = 1 << 20
MEDIUM_WATTS = 0.15
"""Power of a medium while it transfers: 30 mA at 5 V, MEMORY_POWER of POET's reference implementation (SD card)."""
MIN_MEDIUM_JOULES = 2e-9
"""Joules per byte of the fastest media: NVMe drives draw 5 to 6 W at 3 GB/s (data sheets)."""


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs per op of each graph, and the memory of the process itself.

    `base_bytes`: resident before any tensor. `retained_bytes`: still resident after every op has run once and all
    tensors are gone (kernels' caches, code pages). `released_bytes`: the part of both that is code only needed for
    loading, which a worker returns to the system.
    """

    ops: tuple[tuple[OpCost, ...], ...]
    base_bytes: int
    retained_bytes: int
    released_bytes: int = 0
    packings: tuple[tuple[PackingCost, ...], ...] = ()
    """Costs of packing per graph; empty if they were not measured."""
    taken_over: int = 0
    """Operators whose costs were measured by another machine of the same kind."""
    disputed: str = ""
    """Contradiction between another machine's costs and those measured here, in which case none of them is used."""
    absent: tuple[tuple[int, ...], ...] = ()
    """For each graph, if checked: operators that do not run on its device, or whose results
    have another layout there.
    """
    elsewhere: tuple[tuple[OpCost | None, ...], ...] = ()
    """For each graph whose operators are divided between two devices: their costs on the other device."""

    @property
    def worker_bytes(self) -> int:
        """Return the bytes that a worker holds besides the step's tensors."""
        return self.base_bytes + self.retained_bytes - self.released_bytes

    def tables(self, device: DeviceCosts) -> Iterator[CostTable]:
        """Yield the cost table of each graph on a device."""
        for ops, packings, other in itertools.zip_longest(self.ops, self.packings, self.elsewhere, fillvalue=()):
            yield CostTable(device, ops, packings, other)

    def at_pace(self, pace: float) -> "MeasuredCosts":
        """Return the same costs with every operator taking `pace` times as many seconds and joules."""
        tables = tuple(
            tuple(replace(c, seconds=c.seconds * pace, joules=c.joules * pace) for c in table) for table in self.ops
        )
        return replace(self, ops=tables)


def profile_operators(
    graphs: Iterable[StepGraph], *, compute_watts: float, progress: Progress | None = None, kept_in: Path | None = None,
    shared: Mapping[str, kept_costs.KeptCost] = {}, resident: bool = True, elsewhere: bool = False, ram_bytes: float = math.inf,
) -> MeasuredCosts:  # fmt: skip
    """Run every distinct operator of `graphs` a few times on synthetic data, and return its cost.

    Steps of a program on shapes between measured ones are interpolated (`neighbours`), except for what is known of
    them. Operators with a cost in the folder `kept_in` (`kept_costs`) run once, for what they leave resident. So do
    those that another machine of this kind measured (`shared`), once its costliest were measured here and agree; these
    are not kept. `resident`: measure what operators leave resident; otherwise operators of known cost do not run.
    `elsewhere`: the graphs were recorded on another device than they name. Operators that do not run here are then
    `MeasuredCosts.absent` and cost nothing, and resident memory is not measured. `ram_bytes`: an operator that does not
    fit into it, this process included, runs on a part of its rows; its cost is scaled up and not kept.
    """
    graphs, resident = tuple(graphs), resident and not elsewhere  # absent operators cannot run here
    base = resident_bytes()
    cache_bytes = last_level_bytes()
    calls = _calls(graphs, cache_bytes)
    distinct = _distinct(calls, frozenset[int]() if elsewhere else neighbours.between(graphs))
    for graph in graphs:
        repeat_kernels(graph.device)
    sweep, generators = Sweep(cache_bytes), generator_states({g.device for g in graphs})
    name = kept_costs.context(torch.get_num_threads(), cache_bytes, workspace_seen=HostWorkspaceMeter().sees)
    kept = kept_costs.read_costs(kept_in, name, time.time())
    fresh: dict[str, kept_costs.KeptCost] = {}
    keys = {kind: kept_costs.operator_key(kind) for kind in _distinct(calls)}
    by_key = {keys[kind]: call for kind, call in distinct.items()}
    limit_bytes = ram_bytes - base - sweep.nbytes - _LOADED_BYTES
    given = {key: shared[key] for key in by_key if key in shared and key not in kept}
    checked, disputed = shared_costs.to_check(given), ""
    lacking = set[str]()

    with torch.no_grad():
        if elsewhere:
            lacking = {key for key, call in by_key.items() if key not in kept and not runs_alike(call)}
            by_key = {key: call for key, call in by_key.items() if key not in lacking}
        by_key = {key: call.within(limit_bytes) if call.kind == CPU else call for key, call in by_key.items()}
        give_back()
        if checked:
            fresh = _measure({key: by_key[key] for key in checked}, sweep)
            disputed = shared_costs.disputed((given[key], fresh[key]) for key in checked)
            kept |= {} if disputed else {key: cost for key, cost in given.items() if key not in checked}
        unknown = {key: call for key, call in by_key.items() if key not in kept and key not in fresh}
        fresh |= _measure(unknown, sweep, progress)
        _run_once([by_key[key] for key in by_key if key in kept] if resident else ())
    if progress:
        progress(len(by_key), len(by_key))
    kept |= fresh
    known = {s: _priced(kept[key], compute_watts) for s, key in keys.items() if key in kept and key not in lacking}
    kept_costs.keep_costs(kept_in, name, {key: cost for key, cost in fresh.items() if by_key[key].parts == 1})
    del sweep
    tables = neighbours.filled(graphs, _tables(calls, known))
    loaded, running = _resident_after(by_key.values()) if resident else (base, base)
    restore_generators(generators)
    taken_over = 0 if disputed else len(given) - len(checked)
    absent = tuple(tuple(i for i, c in enumerate(table) if keys.get(signature(c)) in lacking) for table in calls)
    left = max(0, loaded - base), max(0, loaded - running)
    absent = absent if elsewhere else ()
    return MeasuredCosts(tables, base, *left, taken_over=taken_over, disputed=disputed, absent=absent)


def kept_tables(
    graphs: Iterable[StepGraph], *, threads: int, compute_watts: float, kept_in: Path | None, workspace_seen: bool
) -> tuple[tuple[OpCost, ...], ...] | None:
    """Return the costs per op of each graph without running any; None if one of them is not in the folder `kept_in`.

    They are those of a process with this many `threads`; `workspace_seen`: with the allocator preloaded.
    """
    graphs, cache_bytes = tuple(graphs), last_level_bytes()
    calls = _calls(graphs, cache_bytes)
    measured = _distinct(calls, neighbours.between(graphs))
    name = kept_costs.context(threads, cache_bytes, workspace_seen=workspace_seen)
    kept = kept_costs.read_costs(kept_in, name, time.time())
    found = {signature: kept.get(kept_costs.operator_key(signature)) for signature in _distinct(calls)}
    known = {signature: _priced(cost, compute_watts) for signature, cost in found.items() if cost is not None}
    return neighbours.filled(graphs, _tables(calls, known)) if measured.keys() <= known.keys() else None


def _calls(graphs: Iterable[StepGraph], cache_bytes: int) -> list[list[Call]]:
    """Return the calls of each graph."""
    return [[Call(g, *pair) for pair in zip(g.ops, cold_operands(g, cache_bytes), strict=True)] for g in graphs]


def _distinct(calls: Sequence[Iterable[Call]], but: Set[int] = frozenset()) -> dict[Any, Call]:
    """Return one call of each distinct kind, from all graphs except those in `but`."""
    tables = (table for n, table in enumerate(calls) if n not in but)
    return {signature(c): c for table in tables for c in table if not only_checks(c.op.name)}


def _measure(
    calls: Mapping[str, Call], sweep: Sweep, progress: Progress | None = None
) -> dict[str, kept_costs.KeptCost]:
    """Return the costs of calls, by their keys."""
    found: dict[str, kept_costs.KeptCost] = {}
    for group in _together(calls):
        for key, (seconds, workspace_bytes) in zip(group, timed([calls[k] for k in group], sweep), strict=True):
            parts = calls[key].parts
            found[key] = kept_costs.KeptCost(parts * seconds, parts * workspace_bytes, time.time())
        give_back()
        if progress:
            progress(len(found), len(calls))
    return found


def _together(calls: Mapping[str, Call]) -> Iterator[list[str]]:
    """Yield the keys of calls in groups whose operands fit into memory together; a call that is too large is alone."""
    group, held = list[str](), 0
    for key, call in calls.items():
        nbytes = call.operand_bytes
        if group and held + nbytes > _TOGETHER_BYTES:
            yield group
            group, held = [], 0
        group.append(key)
        held += nbytes
    if group:
        yield group


def _priced(cost: kept_costs.KeptCost, compute_watts: float) -> OpCost:
    return OpCost(cost.seconds, cost.workspace_bytes, cost.seconds * compute_watts)


def _tables(calls: Iterable[Iterable[Call]], known: Mapping[Any, OpCost]) -> list[list[OpCost | None]]:
    """Return the cost of each call, None if unknown."""
    free = OpCost(0.0, 0, 0.0)
    return [[free if only_checks(c.op.name) else known.get(signature(c)) for c in table] for table in calls]


def _resident_after(calls: Iterable[Call]) -> tuple[int, int]:
    """Return the bytes that are resident now, and those after code was released and only these calls
    have loaded theirs again.
    """
    give_back()
    loaded = resident_bytes()
    release_code_pages()
    with torch.no_grad():
        _run_once(calls)
    return loaded, resident_bytes()


def _run_once(calls: Iterable[Call]) -> None:
    """Run each call once and release its memory; otherwise blocks of every size stay in the allocator's cache."""
    for call in calls:
        call.ready()[0]()
        give_back()


def give_back() -> None:
    """Make the allocator return freed memory, so that resident bytes are those that are really held."""
    library = ctypes.CDLL(None)
    for function in ("port_malloc_trim", "malloc_trim"):
        if hasattr(library, function):
            getattr(library, function)(ctypes.c_size_t(0))


# -- flash


class FlashError(PortError):
    """The medium could not be measured."""


def medium_joules(bytes_per_s: float) -> float:
    """Return an estimate of the joules per byte of a medium with this bandwidth, as in POET:
    watts divided by bandwidth.
    """
    return max(MEDIUM_WATTS / bytes_per_s, MIN_MEDIUM_JOULES)


def measure_flash(
    directory: Path, *, compute_watts: float, name: str = "flash", progress: Progress | None = None
) -> Flash:
    """Return bandwidth and latency of the medium under `directory`, bypassing the page cache if the system allows it.

    Writes and reads a 64 MiB file; raises FlashError if that fails. Energy per byte is the measured CPU time of the
    transfers at `compute_watts`, plus an estimate for the medium.
    """
    try:
        return _timed_flash(directory, compute_watts, name, progress)
    except OSError as error:
        raise FlashError(
            f"the medium under {directory} could not be measured: {error.strerror}; "
            f"it needs {_FLASH_SAMPLE_BYTES >> 20} MiB of free space there; free some or choose another --page-dir"
        ) from error


def _timed_flash(directory: Path, compute_watts: float, name: str, progress: Progress | None) -> Flash:
    directory.mkdir(parents=True, exist_ok=True)
    buffer = mmap.mmap(-1, _CHUNK)
    buffer.write(os.urandom(_CHUNK))
    rounds = _FLASH_SAMPLE_BYTES // _CHUNK
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:  # unnamed, so that nobody can replace it
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
        name=name,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        latency_s=statistics.median(small),
        read_joules_per_byte=medium_joules(read) + read_cpu,
        write_joules_per_byte=medium_joules(write) + write_cpu,
    )
