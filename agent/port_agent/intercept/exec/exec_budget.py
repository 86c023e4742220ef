"""The budget of `port-agent exec`, which starts when the program imports torch, and is reported at its end."""

import contextlib
import enum
import json
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from port_agent.guard import ProcessTable, active_guard, guard_environment
from port_agent.intercept.exec.guarded_run import GuardedRun, page_watches
from port_agent.malloc import PreloadMode, active, preload_environment, preload_mode, release_free_memory
from port_agent.system.atomic_file import write_atomically
from port_agent.system.memory_limit import untouched_library_bytes, widen_data_limit
from port_planner.base.code_pages import release_code_pages
from port_planner.base.errors import PortError
from port_planner.base.process_memory import peak_resident_bytes
from port_planner.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from port_agent.intercept.budget import Budget, DeviceMemoryReport, Report
    from port_agent.intercept.exec.opportunistic import Opportunistic


_OF_CHILDREN = ("peak_together_bytes", "budget_held", "needed_bytes", "children", "children_forgotten")
"""Figures of guarded memory that are also in an intercepted program's report."""

_FOR_LOADING_BYTES = 64 << 30
"""Bytes of address space for loading: more than any build of torch maps."""

_TRIED_BYTES = 1 << 20
"""Bytes of a tensor that is guarded under any limit, used for a test."""


class ExecMemory(enum.StrEnum):
    """How tensors are kept, and what decides about evictions."""

    RESIZED = "resized"
    """Evicted storages are empty.

    For fine-tunings and chats, whose every access is an operator, where memory cannot be guarded.
    """
    GUARDED = "guarded"
    """Tensors are in guarded memory, and operators are intercepted."""
    GUARD_ONLY = "guard-only"
    """Tensors are in guarded memory, which decides alone."""

    @classmethod
    def of_this_machine(cls) -> Self:
        """Return how tensors are kept on this machine if operators are intercepted."""
        return cls.GUARDED if preload_mode() is PreloadMode.PRELOAD else cls.RESIZED

    def environment(self, page_dir: Path, *, ram_bytes: int | None, tensor_bytes: int | None = None) -> dict[str, str]:
        """Return the variables to add to the environment of a process whose tensors are kept this way."""
        if self is ExecMemory.RESIZED:
            return preload_environment(ram_bytes)
        return guard_environment(page_dir, tensor_bytes=tensor_bytes, process_bytes=ram_bytes)


@dataclass(frozen=True, slots=True)
class ExecOptions:
    """The options of the command line.

    One of `ram_bytes` and `tensors_bytes` is given, or neither if there is a budget for a GPU.
    """

    ram_bytes: int | None
    tensors_bytes: int | None
    page_dir: str
    read_bytes_per_s: int | None
    write_bytes_per_s: int | None
    step_deadline_s: float | None
    writes_per_step: int | None
    report: str | None
    """File for the figures at the end, as JSON."""
    wear_joules: float
    """Wear of a written byte, in joules of the same price."""
    data_limited: bool
    """Whether RLIMIT_DATA is the limit."""
    memory: ExecMemory
    socket: str | None = None
    """The control socket of the daemon that decides when the program runs; None: it runs at once."""
    name: str = ""
    """Name of the program for the daemon."""
    recompute: bool = True
    """Whether evicted tensors may be dropped and recomputed."""
    processes: str | None = None
    """The file that the processes inside this budget share; None: children are outside the budget."""
    gpu_ram_bytes: int | None = None
    """Budget in bytes of a GPU's memory for all that the process takes there."""
    gpu_tensors_bytes: int | None = None
    """Budget in bytes of a GPU's memory for tensors alone."""


class ExecBudget:
    """One run of a program."""

    def __init__(self, options: ExecOptions, program: Sequence[str]) -> None:
        self._options, self._program = options, list(program)
        self.failure: BaseException | None = None
        """The exception with which the program ended."""
        self._budget: Budget | None = None
        self._attached: Opportunistic | None = None
        self._refused = False
        self._begin = time.perf_counter()
        self._widen, self._widened_for_torch = widen_data_limit, 0
        allocator = active() if options.data_limited else None
        if allocator is not None and allocator.allow_reservations():
            self._widen = allocator.widen_data_limit

    def expect_torch(self) -> None:
        """Lift RLIMIT_DATA while torch loads; `start` rejects a budget that torch's code fills, with the figures."""
        if self._options.data_limited:
            before, _ = resource.getrlimit(resource.RLIMIT_DATA)
            self._widen(_FOR_LOADING_BYTES)
            after, _ = resource.getrlimit(resource.RLIMIT_DATA)
            self._widened_for_torch = after - before

    def start(self) -> None:
        """Begin to enforce the budget, after torch is loaded.

        Ends the process with a one-line error if that is impossible.
        """
        if self._options.data_limited:
            self._widen(untouched_library_bytes() - self._widened_for_torch)
        if self._options.memory != ExecMemory.RESIZED:
            self._start_guard()
        if self._options.memory == ExecMemory.GUARD_ONLY:
            return
        from port_agent.intercept.budget import budget
        from port_agent.intercept.dispatch import deferred_modules, light_dynamo

        light_dynamo.hold_place()
        deferred_modules.defer_modules()
        options = self._options
        try:
            made = budget(
                ram=options.ram_bytes,
                tensors=options.tensors_bytes,
                page_dir=options.page_dir,
                read_bytes_per_s=options.read_bytes_per_s,
                write_bytes_per_s=options.write_bytes_per_s,
                step_deadline=options.step_deadline_s,
                writes_per_step=options.writes_per_step,
                wear_joules=options.wear_joules,
                gpu_ram=options.gpu_ram_bytes,
                gpu_tensors=options.gpu_tensors_bytes,
            )
            self._budget = (made.resizing() if options.memory == ExecMemory.RESIZED else made).start()
            made.interceptor.recomputes = options.recompute
            self._attach()
        except PortError as error:
            self._refused = True
            _emit(str(error))
            raise SystemExit(2) from None
        if options.data_limited:
            _exempt_file_mappings(self._widen)

    def _start_guard(self) -> None:
        guard = active_guard()
        if guard is None:
            self._refused = True
            _emit("guarded memory did not begin in this process; `port-agent doctor` tests it and says why")
            raise SystemExit(2)
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if not guard.usable_bytes(torch.empty(_TRIED_BYTES, dtype=torch.uint8).data_ptr()):
            self._refused = True
            _emit(
                f"a tensor of {format_bytes(_TRIED_BYTES)} is not in guarded memory: torch {torch.__version__} allocates "
                "tensors by functions of its own here, and no budget would hold; report this build, or use PyPI's"
            )
            raise SystemExit(2)
        if self._options.ram_bytes is not None:
            guard.set_process_limit(self._options.ram_bytes)

        (wrote, read), own = page_watches(), os.getpid()

        def step_done(*_: object) -> None:
            if os.getpid() != own:
                return
            counters = guard.counters()
            tensor_bytes = counters.peak_live_bytes
            for note in (
                wrote.step(counters.written_bytes, tensor_bytes),
                read.step(counters.read_bytes, tensor_bytes),
            ):
                if note:
                    _emit(note)

        register_optimizer_step_post_hook(step_done)

    def _attach(self) -> None:
        options, budget = self._options, self._budget
        if options.socket is None or options.ram_bytes is None or budget is None:
            return
        from port_agent.intercept.exec.opportunistic import AttachOptions, Opportunistic

        budget.interceptor.begin(near=True)  # it is paused between two operators
        attach = AttachOptions(options.socket, options.name, options.ram_bytes)
        table = self._processes()
        attached = Opportunistic(attach, budget.interceptor, lambda: budget.report, _emit, table)
        attached.start()
        self._attached = attached

    def fail(self, error: BaseException) -> None:
        """Record the exception with which the program ends."""
        self.failure = error
        if self._budget is not None:
            self._budget.explain(error)

    def _processes(self) -> ProcessTable | None:
        """Return the figures of the processes in this budget; None if there are none, or the program closed them."""
        if self._options.processes is None:
            return None
        with contextlib.suppress(OSError):
            return ProcessTable(Path(self._options.processes))
        return None

    def finish(self) -> None:
        """Print the program's figures on standard error, and write them to the file of `--report`."""
        self._widen(_FOR_LOADING_BYTES)  # the program is over: reporting its limits must not fail because of them
        table = self._processes()
        if table is None and self._options.processes is not None:
            _emit(
                "the program closed the table of its processes (os.closerange?): what they took together is not known"
            )
        if self._options.memory == ExecMemory.GUARD_ONLY and self._options.processes is not None:
            if table is not None:
                self._finish_guard(table)
        else:
            self._finish_followed(table)
        if table is not None:
            table.accounted()

    def _finish_followed(self, table: ProcessTable | None) -> None:
        run = None if table is None else GuardedRun.read(table, None, peak_resident_bytes())
        if self._budget is None:
            if run is not None and run.children:
                self._report_guarded(run, time.perf_counter() - self._begin)
            elif not self._refused:
                _emit("the program ended without importing torch; nothing was done")
            return
        if self._attached is not None:
            self._attached.finish(self.failure)
        report = self._budget.stop(restore=False)
        release_free_memory()
        release_code_pages()  # code that was not needed before runs at the interpreter's end
        _emit(
            _summary(report, self._options, time.perf_counter() - self._begin, run)
            + _unbounded(report.device is not None)
        )
        facts = asdict(report)
        if run is not None and run.children:
            facts |= {name: value for name, value in run.facts(self._options.ram_bytes).items() if name in _OF_CHILDREN}
        guard = active_guard()
        if guard is not None:
            facts |= {"faults": asdict(guard.counters())}
        if self._attached is not None:
            facts |= {"pauses": self._attached.pauses, "paused_s": self._attached.paused_s}
        self._write_report(facts)

    def _finish_guard(self, table: ProcessTable) -> None:
        if not self._refused:
            guard = active_guard()
            run = GuardedRun.read(table, None if guard is None else guard.counters(), peak_resident_bytes())
            self._report_guarded(run, time.perf_counter() - self._begin)

    def finish_replaced(self) -> None:
        """Report the program's figures from a separate process, because another program replaced it; the
        times of that one are unknown.
        """
        if (table := self._processes()) is not None:
            self._report_guarded(GuardedRun.read(table, None, 0), None)

    def _report_guarded(self, run: GuardedRun, wall_s: float | None) -> None:
        _emit(run.summary(self._options.ram_bytes, self._options.tensors_bytes, wall_s) + _unbounded(False))
        self._write_report(run.facts(self._options.ram_bytes))

    def _write_report(self, facts: Mapping[str, Any]) -> None:
        if self._options.report is None:
            return
        run = {
            "program": self._program,
            "ram_bytes": self._options.ram_bytes,
            "tensors_bytes": self._options.tensors_bytes,
            "wall_s": time.perf_counter() - self._begin,
            "cpu_s": time.process_time(),
        }
        try:
            write_atomically(Path(self._options.report), json.dumps({**run, **facts}, indent=1).encode() + b"\n")
        except OSError as error:
            _emit(f"{self._options.report} could not be written: {error.strerror}")


def _summary(report: "Report", options: ExecOptions, wall_s: float, run: GuardedRun | None) -> str:
    ram_bytes, tensor_bytes = options.ram_bytes, options.tensors_bytes
    tensors = format_bytes(report.peak_tensor_bytes)
    if run is not None and run.children:
        peak, remarks = run.bound(ram_bytes, tensor_bytes, report.peak_tensor_bytes), run.remarks(ram_bytes)
    else:
        bound = f"tensors {tensors}" if tensor_bytes is None else f"tensors {tensors} of {format_bytes(tensor_bytes)}"
        if ram_bytes is not None:
            bound = f"of {format_bytes(ram_bytes)}, tensors {tensors}"
        unseen_bytes = 0 if report.device is None else report.device.unseen_peak_bytes or 0
        peak, remarks = f"peak {format_bytes(peak_resident_bytes() + unseen_bytes)} {bound}", ""
    moved = f"read {format_bytes(report.read_bytes)}, wrote {format_bytes(report.written_bytes)}"
    planned = "" if report.plan is None else f"; planned ({report.plan})"
    steps = f"{report.steps} {'step' if report.steps == 1 else 'steps'} in " if report.steps else ""
    beside = _on_device(report.device, options)
    used = "" if report.joules is None else f"; {report.joules:,.0f} J {report.energy_source}"
    return (
        f"{peak}; {steps}{format_seconds(wall_s)}; {moved}, "
        f"recomputed {format_bytes(report.recomputed_bytes)}, waited {format_seconds(report.stall_seconds)}{planned}{used}{beside}{remarks}"
    )


def _unbounded(bounded: bool) -> str:
    """Return the device whose memory the program took without a budget for it."""
    torch = sys.modules.get("torch")
    kind = None if torch is None or bounded else torch.accelerator.current_accelerator(check_available=True)
    if torch is None or kind is None or not torch.get_device_module(kind).is_initialized():
        return ""
    return f"; {kind.type}'s own memory is not in it: --gpu-ram bounds that"


def _on_device(device: "DeviceMemoryReport | None", options: ExecOptions) -> str:
    """Return the effects of a budget of a GPU's memory, if there is one."""
    bound = options.gpu_ram_bytes or options.gpu_tensors_bytes
    if bound is None and device is not None:
        return (
            f"; {device.name} shares it: tensors {format_bytes(device.peak_tensor_bytes)}, {format_bytes(device.written_bytes)} left and "
            f"{format_bytes(device.read_bytes)} came back"
        )
    if bound is None:
        return ""
    if device is None:
        return "; no tensor was on a GPU, whose memory had a budget"
    outside = "" if device.outside_bytes is None else f", {format_bytes(device.outside_bytes)} of context and libraries"
    over = f", {format_bytes(device.over_bytes)} more than fits at once" if device.over_bytes else ""
    fragmented = f", up to {format_bytes(device.fragmented_bytes)} reserved between tensors" if device.ran_again else ""
    return (
        f"; {device.name}: peak {format_bytes(device.peak_tensor_bytes + (device.outside_bytes or 0))} of "
        f"{format_bytes(bound)}{outside}{over}{fragmented}, {format_bytes(device.written_bytes)} left and {format_bytes(device.read_bytes)} came back"
    )


def _emit(text: str) -> None:
    try:
        sys.stderr.write(f"port-agent: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or set to None
        return


def _exempt_file_mappings(widen: Callable[[int], None]) -> None:
    """Exclude private mappings of weights files from RLIMIT_DATA: their pages can be dropped, and come back from the
    file.
    """
    import torch

    mapped = torch.UntypedStorage.from_file

    def from_file(filename: str, shared: bool = False, nbytes: int = 0) -> Any:
        if shared:
            return mapped(filename, shared, nbytes)
        widen(nbytes)
        try:
            storage = mapped(filename, shared, nbytes)
        except BaseException:
            widen(-nbytes)
            raise
        weakref.finalize(storage, widen, -nbytes).atexit = False
        return storage

    torch.UntypedStorage.from_file = staticmethod(from_file)  # type: ignore[method-assign]
