"""A memory budget around any PyTorch program: two lines around a loop, or `port-agent exec` with none.

    from port_agent import budget

    with budget(ram="600M", page_dir="/mnt/sd") as b:
        for batch in loader: ...          # the loop as it is
    print(b.report)

Model, optimizers and the ends of steps are found, not named. The numbers are those of plain PyTorch, to the bit.
"""

import contextlib
import gc
import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import torch

from port_agent.guard import GuardError, active_guard, begin_guard, end_guard, smallest_block_bytes
from port_agent.intercept.consumption import EnergyUse, wear_joules_per_byte, wear_share
from port_agent.intercept.decisions.step_planner import StepBounds, StepPlanner
from port_agent.intercept.dispatch.device_pool import DevicePool
from port_agent.intercept.dispatch.mode import Interceptor
from port_agent.intercept.patches.pointer_guards import PointerGuards
from port_agent.intercept.patches.program import ProgramHooks
from port_agent.intercept.residency.backing import Backing, GuardedStorages, ResizedStorages
from port_agent.intercept.residency.device_memory import SharedDeviceBudget
from port_agent.intercept.residency.memory import ProcessBudget
from port_agent.intercept.residency.operands import is_wrapper
from port_agent.intercept.residency.refusals import UnsupportedError
from port_agent.intercept.residency.residency import NotRestorableError, Residency
from port_agent.intercept.residency.storages import SMALLEST_BYTES, StorageTable, data_ptr
from port_agent.malloc import thrifty_glibc
from port_agent.paging.page_space import PageSpace, check_not_in_ram, default_page_dir
from port_agent.paging.pager import Pager
from port_planner.base.process_memory import peak_resident_bytes
from port_planner.base.units import SizeError, parse_bytes, parse_duration, shown
from port_planner.ir.device_kinds import CPU, CUDA
from port_planner.torch_compat.modes import without_modes

_SMALLEST_FRACTION = 64
_TRIED_BYTES = 1 << 20
"""Bytes of a tensor that is guarded under any limit, used for a test."""
_SMALLEST_OF_ALL_BYTES = 256
"""Smallest storage that is intercepted under a small budget, from a 64th of the budget."""


@dataclass(frozen=True, slots=True)
class DeviceBounds:
    """The limit on a device's memory; one of the two is given."""

    ram_bytes: int | None
    """Bytes that the process may take on the GPU, context and libraries included."""
    tensor_bytes: int | None
    """Bytes that tensors may take on the GPU; the rest of the process is not counted."""


@dataclass(frozen=True, slots=True)
class DeviceMemoryReport:
    """A device's memory that an intercepted program took, and what was moved for it, in bytes since the start."""

    name: str
    ram_bytes: int | None
    peak_tensor_bytes: int
    """Peak of the device allocator's bytes, intercepted or not."""
    outside_bytes: int | None
    """Bytes of context and libraries; None if only tensors are limited."""
    read_bytes: int
    written_bytes: int
    stall_seconds: float
    over_bytes: int
    fragmented_bytes: int
    """The most that the device's allocator had reserved without a tensor in it, at ends of segments."""
    ran_again: int
    """Operators that the device refused memory at first."""
    unseen_peak_bytes: int | None
    """Peak of the device's memory that the kernel does not count as resident; None if it is not the host's memory."""


@dataclass(frozen=True, slots=True)
class Report:
    """The memory that a program took, and what was moved for it; bytes and seconds since the start."""

    ram_bytes: int | None
    tensor_limit_bytes: int | None
    peak_tensor_bytes: int
    peak_resident_bytes: int
    """Highest resident memory of the whole process, as the kernel counts it."""
    read_bytes: int
    written_bytes: int
    unworn_bytes: int
    """The part of `written_bytes` that went to compressed RAM, which writing does not wear out."""
    mapped_bytes: int
    """Bytes read from files that contain weights; these files are never written."""
    recomputed_bytes: int
    stall_seconds: float
    """Seconds that the program waited for pages."""
    operators: int
    steps: int
    """Number of optimizer steps."""
    segments: int
    """Number of ends of backward() and of optimizer steps."""
    deviations: int
    """Number of times that the program did something that no trace predicted."""
    over_bytes: int
    """Largest number of bytes by which a single operator exceeded the limit."""
    plan: str | None
    """The search that made the plan for evictions (`milp`, `greedy`); None if evictions follow the next use."""
    planned_after_seconds: float | None
    """Seconds from the start until that plan took effect."""
    predicted_step_seconds: float | None
    step_seconds: float | None
    """Seconds of one step with the plan: predicted, including waits for pages, and measured for the last step."""
    elsewhere: tuple[str, ...]
    """Devices with their own memory that the program used; nothing there is counted, limited or moved."""
    device: "DeviceMemoryReport | None"
    """Figures of the device whose memory has a budget; None before it held a tensor."""
    step_written_bytes: int | None
    """Bytes written by the last step with the plan."""
    joules: float | None
    energy_source: str | None
    """`measured by rapl` (everything that ran on the processor), or `estimated` by a model of
    the board (this process).
    """
    wear_share: float | None
    """Share of the life of the flash that holds the pages, with an endurance assumed from its size; None if unknown."""


class Budget:
    """A memory budget; see `budget`. In a notebook, `start()` and `stop()` work without `with`."""

    def __init__(
        self,
        ram_bytes: int | None,
        tensor_bytes: int | None,
        page_dir: Path,
        *,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
        limits: StepBounds | None = None,
        wear_joules: float | None = None,
        device: DeviceBounds | None = None,
    ) -> None:
        self._wear_joules, self._device, self._resized = wear_joules, device, False
        self._ram_bytes, self._tensor_bytes, self._page_dir = ram_bytes, tensor_bytes, page_dir
        self._limits = limits or StepBounds()
        self._speeds = read_bytes_per_s, write_bytes_per_s
        self._running: _Running | None = None
        self._report: Report | None = None

    def resizing(self) -> Self:
        """Empty the storages of evicted tensors instead of guarding their memory, and return this budget.

        This is for our own programs, whose every access is an operator; it also works on
        systems without guarded memory.
        """
        self._resized = True
        return self

    def start(self) -> Self:
        """Intercept the operators of this thread, and of threads that it starts, from now on.

        Raises PageError, BudgetTooSmallError, or UnsupportedError if it is already started, or
        memory cannot be guarded here.
        """
        if self._running is not None:
            raise UnsupportedError("this budget is already started; call stop() first")
        if _Running._of_this_process is not None:
            raise UnsupportedError("another budget is active in this process; use one at a time")
        bounds = self._ram_bytes, self._tensor_bytes
        guards = not self._resized and active_guard() is None and bounds != (None, None)
        if guards:
            _guard_this_process(self._page_dir, self._tensor_bytes)
        try:
            self._running = _Running(
                *bounds, self._page_dir, self._speeds, self._limits, self._wear_joules, self._device
            )
        except BaseException:
            if guards:
                end_guard()
            raise
        return self

    def stop(self, *, restore: bool = True) -> Report:
        """Bring everything back into RAM, regardless of the budget, and stop intercepting.

        `restore=False` discards everything instead, for a process that ends; tensors must then no longer be used.
        Raises NotRestorableError if the tensors do not fit into the machine's memory; the budget then stays in force
        and nothing is lost. Raises PageError if a page cannot be read, UnsupportedError if the budget was not started.
        """
        if self._running is None:
            raise UnsupportedError("this budget is not started; call start() first")
        running, self._running = self._running, None
        try:
            running.stop(restore=restore)
        except NotRestorableError:
            self._running = running
            raise
        finally:
            self._report = running.report()
        return self._report

    @property
    def interceptor(self) -> Interceptor:
        """The interceptor that runs the operators, for another thread that pauses them.

        Raises UnsupportedError before the start.
        """
        if self._running is None:
            raise UnsupportedError("this budget is not started; call start() first")
        return self._running.interceptor

    @property
    def report(self) -> Report:
        """Figures of the program so far. Raises UnsupportedError before the start."""
        if self._running is not None:
            return self._running.report()
        if self._report is None:
            raise UnsupportedError("this budget is not started; call start() first")
        return self._report

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            if error is not None:
                self.explain(error)
            self.stop()

    def explain(self, error: BaseException) -> None:
        """Add a note to the error that ends a program if a tensor was used that had left a
        device within this budget.
        """
        if self._running is not None and self._running.interceptor.device is not None:
            self._running.interceptor.device.explain(error)


class BudgetOptions(TypedDict, total=False):
    """How a budget is kept, besides its size."""

    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    """Bytes per second to which paging is slowed down, to simulate a slower medium."""
    step_deadline: str | float | None
    """Longest time that a planned step may take, such as "1.5s"; if no plan meets it, none is used."""
    writes_per_step: str | int | None
    """Largest number of bytes that a planned step writes, such as "100M"."""
    wear_joules: float | None
    """Wear of a written byte, as joules of the same price; None: that of the kind of medium below `page_dir`."""


def budget(
    ram: str | int | None = None,
    *,
    tensors: str | int | None = None,
    gpu_ram: str | int | None = None,
    gpu_tensors: str | int | None = None,
    page_dir: str | Path | None = None,
    **options: Unpack[BudgetOptions],
) -> Budget:
    """Return a memory budget to use as `with budget(ram="600M"):` around a training loop.

    `ram`: bytes of resident memory of the whole process ("600M" = 600 MiB), Python and torch included. `tensors` limits
    the tensors alone instead, down to "4K". `gpu_ram`: bytes of a GPU's memory ("6G") that the process may take,
    context and libraries included, alone or alongside `ram`; tensors that do not fit are moved to the host's memory.
    `gpu_tensors` limits the GPU's tensors alone instead. `page_dir`: directory of the page file (/var/tmp by default).
    Raises SizeError and DurationError for invalid values; see `Budget.start` for errors of starting.
    """
    on_device = gpu_ram is not None or gpu_tensors is not None
    if (ram is not None and tensors is not None) or (ram is None and tensors is None and not on_device):
        raise SizeError('give either ram="600M", for the whole process, or tensors="100M", for its tensors alone')
    if gpu_ram is not None and gpu_tensors is not None:
        raise SizeError('give either gpu_ram="6G", for all that the process takes of a GPU, or gpu_tensors="4G"')
    ram_bytes, tensor_bytes, gpu_bytes, gpu_tensor_bytes = (
        None if size is None else parse_bytes(size) for size in (ram, tensors, gpu_ram, gpu_tensors)
    )
    if 0 in (tensor_bytes, gpu_tensor_bytes):
        raise SizeError('a budget of 0 bytes holds no tensors; give at least tensors="4K"')
    device = DeviceBounds(gpu_bytes, gpu_tensor_bytes) if on_device else None
    folder = Path(default_page_dir() if page_dir is None else page_dir)
    return _budget_of(ram_bytes, tensor_bytes, folder, device, **options)


def _budget_of(
    ram_bytes: int | None,
    tensor_bytes: int | None,
    page_dir: Path,
    device: DeviceBounds | None,
    *,
    step_deadline: str | float | None = None,
    writes_per_step: str | int | None = None,
    wear_joules: float | None = None,
    **speeds: float | None,
) -> Budget:
    for name, speed in speeds.items():
        if speed is not None and not (isinstance(speed, int | float) and 0 < speed < math.inf):
            raise SizeError(f"{name} is {shown(speed)}; give bytes per second above 0, or leave it out")
    limits = StepBounds(
        None if step_deadline is None else parse_duration(step_deadline),
        None if writes_per_step is None else parse_bytes(writes_per_step),
    )
    return Budget(ram_bytes, tensor_bytes, page_dir, limits=limits, wear_joules=wear_joules, device=device, **speeds)


def report_of_this_process() -> Report:
    """Return the figures so far under the budget of this process. Raises UnsupportedError if none is active."""
    if _Running._of_this_process is None:
        raise UnsupportedError("no budget is active in this process; start one with `with budget(ram=...)`")
    return _Running._of_this_process.report()


def flash_written_bytes() -> int:
    """Return the bytes that the budget of this process has written to flash that wears out; 0 without a budget."""
    running = _Running._of_this_process
    return 0 if running is None else running.flash_written_bytes()


def strict_budget() -> ProcessBudget | None:
    """Make the RAM budget of this process reject operators that do not fit (BudgetTooSmallError), and return it.

    Return None if no budget is active, or only one for tensors.
    """
    running = _Running._of_this_process
    if running is None or running._process is None:
        return None
    running._process.strict = True
    return running._process


@contextlib.contextmanager
def leaving_headroom(nbytes: int) -> Iterator[None]:
    """Evict tensors in a block during which another process takes `nbytes` of the budget.

    Without a budget for the whole process, nothing happens.
    """
    running = _Running._of_this_process
    process = None if running is None else running._process
    if running is None or process is None:
        yield
        return
    before = process.beside_bytes
    process.beside_bytes = before + nbytes
    running.interceptor.make_way()
    try:
        yield
    finally:
        process.beside_bytes = before


def without_prefetch() -> contextlib.AbstractContextManager[None]:
    """Disable prefetching in a block that does something new each time; see `Interceptor.without_prefetch`."""
    running = _Running._of_this_process
    return contextlib.nullcontext() if running is None else running.interceptor.without_prefetch()


def keeping(
    tensors: Sequence[torch.Tensor], then: Sequence[torch.Tensor] = (), most: float | None = None
) -> contextlib.AbstractContextManager[None]:
    """Keep tensors resident in a block that uses them several times; see `Interceptor.keeping`."""
    running = _Running._of_this_process
    return contextlib.nullcontext() if running is None else running.interceptor.keeping(tensors, then, most)


class _Running:
    """A program whose operators are intercepted."""

    _of_this_process: "_Running | None" = None

    def __init__(
        self,
        ram_bytes: int | None,
        tensor_bytes: int | None,
        page_dir: Path,
        speeds: tuple[float | None, float | None],
        limits: StepBounds,
        wear_joules: float | None,
        device: DeviceBounds | None,
    ) -> None:
        limit = tensor_bytes if tensor_bytes is not None else math.inf
        bounded_bytes = tensor_bytes or ram_bytes or SMALLEST_BYTES * _SMALLEST_FRACTION
        smallest = max(_SMALLEST_OF_ALL_BYTES, min(SMALLEST_BYTES, bounded_bytes // _SMALLEST_FRACTION))
        guard = active_guard()
        if guard is None:
            self.table = StorageTable(smallest)
        else:
            self.table = StorageTable(max(smallest, smallest_block_bytes(tensor_bytes)), guard)
            if guard.adopts:
                _adopt_tensors(self.table)
        self._process = None if ram_bytes is None else ProcessBudget(ram_bytes, self.table)
        if self._process is not None:
            thrifty_glibc()
            self._process.check()
        self._ram_bytes, self._tensor_bytes = ram_bytes, tensor_bytes
        if ram_bytes is not None:
            check_not_in_ram(page_dir)
        self._page_dir = page_dir
        if guard is None:
            pages = PageSpace(page_dir)
            backing: Backing = ResizedStorages(pages, Pager(read_bytes_per_s=speeds[0], write_bytes_per_s=speeds[1]))
        else:
            backing = GuardedStorages(guard, page_dir, read_bytes_per_s=speeds[0], write_bytes_per_s=speeds[1])
        self._backing = backing
        if self._process is not None:
            limit = self._process.tensor_bytes()
        self._residency = Residency(self.table, backing, limit)
        self._limit_at_end: float | None = None
        """Limit that was in force until `stop`; None if it is still in force."""
        if self._process is not None:
            self._residency.before_mapping = self._process.make_way
        wear = wear_joules_per_byte(page_dir) if wear_joules is None else wear_joules
        self._wears = wear > 0
        self._planner = StepPlanner(self._residency, self._process, tensor_bytes or ram_bytes or 0, limits, wear)
        self._energy = EnergyUse()
        self.interceptor = Interceptor(self.table, self._residency, self._process, self._planner, self._energy.keep_up)
        shares = ram_bytes is not None and device is None and _may_share_memory()
        self._guards = PointerGuards(self.interceptor) if guard is None or device is not None or shares else None
        self._hooks = ProgramHooks(self.interceptor, guarded=guard is not None)
        _Running._of_this_process = self
        if self._guards is not None:
            self._guards.install()
        self._hooks.install()
        if guard is not None:
            if ram_bytes is not None:
                guard.set_process_limit(ram_bytes)
            guard.call_when_near(partial(self.interceptor.begin, near=True))
        self.interceptor.follow()
        self._bound_devices(device, shares=shares)

    def _bound_devices(self, device: DeviceBounds | None, *, shares: bool) -> None:
        """Bound a device's memory, or what devices that compute in the host's memory take of this budget."""
        if device is not None:
            self.interceptor.bound_devices(ram_bytes=device.ram_bytes, tensor_bytes=device.tensor_bytes)
        elif shares:
            self.interceptor.share_devices()

    def stop(self, *, restore: bool) -> None:
        self._planner.close()
        pools = self.interceptor.pools
        with self.interceptor.lock:
            limits = [residency.limit_bytes for residency in pools]
            self._limit_at_end = self._residency.limit_bytes
            if self.interceptor.device is not None:
                self.interceptor.device.lift()
            for residency in pools:
                residency.limit_bytes = math.inf
                residency.reclaim_dead()
                residency.drain()
            try:
                for residency in pools:
                    if restore:
                        self._limit_guard(lifted=True)
                        residency.restore()
                    else:
                        residency.discard()
            except NotRestorableError:
                self._limit_at_end = None
                self._limit_guard(lifted=False)
                if self.interceptor.device is not None:
                    self.interceptor.device.bind()
                for residency, limit_bytes in zip(pools, limits, strict=True):
                    residency.limit_bytes = limit_bytes
                    residency.try_make_free()
                raise
            except BaseException:
                self._end()
                raise
            self._end()

    def _limit_guard(self, *, lifted: bool) -> None:
        """Set or lift the limits of guarded memory that began with this budget."""
        guard = active_guard()
        if guard is None or not guard.adopts:
            return
        guard.lift_limits()
        if not lifted and self._tensor_bytes is not None:
            guard.set_limit(self._tensor_bytes)
        if not lifted and self._ram_bytes is not None:
            guard.set_process_limit(self._ram_bytes)

    def _end(self) -> None:
        if self.interceptor.device is not None:
            self.interceptor.device.storages.close()
        self.interceptor.leave()
        self._hooks.remove()
        if self._guards is not None:
            self._guards.remove()
        _Running._of_this_process = None
        self.table.forget()
        self._backing.close()
        end_guard()

    def flash_written_bytes(self) -> int:
        """See the function of the same name."""
        paged = self._backing.totals()
        return paged.written_bytes - paged.unworn_bytes if self._wears else 0

    def report(self) -> Report:
        book, counters, paged = self.interceptor.book, self._residency.counters, self._backing.totals()
        limit = self._residency.limit_bytes if self._limit_at_end is None else self._limit_at_end
        plan = self._planner.adopted
        energy = self._energy.total(paged.read_bytes, paged.written_bytes)
        return Report(
            ram_bytes=self._ram_bytes,
            tensor_limit_bytes=self._tensor_bytes if self._tensor_bytes is not None else _finite(limit),
            peak_tensor_bytes=self._backing.peak_bytes(self.table),
            peak_resident_bytes=peak_resident_bytes(),
            read_bytes=paged.read_bytes,
            written_bytes=paged.written_bytes,
            unworn_bytes=paged.unworn_bytes,
            mapped_bytes=counters.mapped_bytes,
            recomputed_bytes=counters.recomputed_bytes,
            stall_seconds=paged.stall_seconds,
            operators=self.interceptor.operators,
            steps=self.interceptor.steps,
            segments=book.segment,
            deviations=book.deviations,
            over_bytes=counters.over_bytes,
            plan=None if plan is None else plan.strategy,
            planned_after_seconds=None if plan is None else plan.after_s,
            predicted_step_seconds=None if plan is None else plan.predicted_s,
            step_seconds=None if plan is None else plan.measured_s,
            step_written_bytes=None if plan is None else plan.written_bytes,
            joules=None if energy is None else energy.joules,
            energy_source=None if energy is None else energy.source,
            wear_share=wear_share(self._page_dir, paged.written_bytes - paged.unworn_bytes),
            elsewhere=tuple(sorted(self.table.elsewhere)),
            device=None if self.interceptor.device is None else _device_report(self.interceptor.device),
        )

    # -- fork: the child may read pages but writes none; the parent never overwrites pages that the child may read

    @staticmethod
    def before_fork() -> None:
        running = _Running._of_this_process
        if running is not None:
            running.interceptor.lock.acquire()
            for residency in running.interceptor.pools:
                residency.drain()
            running._backing.about_to_fork()

    @staticmethod
    def after_fork() -> None:
        running = _Running._of_this_process
        if running is not None:
            running._backing.forked()
            running.interceptor.lock.release()

    @staticmethod
    def in_child() -> None:
        running = _Running._of_this_process
        if running is not None:
            running.interceptor.become_child()
            running.interceptor.lock.release()


os.register_at_fork(before=_Running.before_fork, after_in_parent=_Running.after_fork, after_in_child=_Running.in_child)


def _guard_this_process(page_dir: Path, tensor_bytes: int | None) -> None:
    """Begin to guard memory for tensors; raises UnsupportedError if that is impossible."""
    try:
        guard = begin_guard(page_dir, tensor_bytes)
    except GuardError as error:
        raise UnsupportedError(
            f"memory cannot be guarded in this process, and without that a budget could change numbers: {error}"
        ) from error
    tried = torch.empty(_TRIED_BYTES, dtype=torch.uint8)
    if not guard.usable_bytes(data_ptr(tried.untyped_storage())):
        end_guard()
        raise UnsupportedError(
            f"torch {torch.__version__} allocates tensors by functions of its own here, and no budget would hold; "
            "use PyPI's build"
        )


def _adopt_tensors(table: StorageTable) -> None:
    """Register the tensors that the program created before; others are registered when an operator uses them."""
    with without_modes():
        for one in gc.get_objects():
            if (
                issubclass(type(one), torch.Tensor)
                and one.layout is torch.strided
                and one.device.type == CPU
                and not is_wrapper(one)
            ):
                table.of(one)


def _may_share_memory() -> bool:
    """Return whether this machine may have a device that computes in the host's memory.

    The driver is not asked: after that, no process that the program forks could use the device.
    """
    kind = torch.accelerator.current_accelerator()
    return kind is not None and (kind.type != CUDA or platform.machine() == "aarch64")


def _device_report(device: DevicePool) -> DeviceMemoryReport:
    moved, budget = device.storages.totals(), device.budget
    return DeviceMemoryReport(
        name=str(device.device),
        ram_bytes=None if budget is None else budget.ram_bytes,
        peak_tensor_bytes=device.meter.peak_bytes,
        outside_bytes=None if budget is None else budget.outside_bytes,
        read_bytes=moved.read_bytes,
        written_bytes=moved.written_bytes,
        stall_seconds=moved.stall_seconds,
        over_bytes=device.residency.counters.over_bytes,
        fragmented_bytes=device.fragmented_bytes,
        ran_again=device.ran_again,
        unseen_peak_bytes=budget.unseen_peak_bytes if isinstance(budget, SharedDeviceBudget) else None,
    )


def _finite(value: float) -> int | None:
    return None if math.isinf(value) else int(value)


__all__ = ["Budget", "NotRestorableError", "Report", "UnsupportedError", "budget"]
