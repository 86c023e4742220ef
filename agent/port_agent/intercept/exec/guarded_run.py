"""The figures of a program in guarded memory, with the processes that it started, and the text that reports them."""

from dataclasses import asdict, dataclass
from typing import Any

from port_agent.guard import GuardCounters, ProcessTable, ProcessUse
from port_planner.base.units import format_bytes, format_seconds
from port_planner.ir.traced import PLANNING_MODULE

_MANY_WRITTEN, _MANY_READ = 3, 10
"""Multiples of the bytes of all tensors: a step that writes or reads more is reported."""
_NAMED = 3
"""Number of processes that the last line names; the report names all."""


class PageWatch:
    """Notices steps that move many times the bytes of all tensors: the budget wears out flash, or
    the program mostly waits.
    """

    def __init__(self, verb: str, times: int) -> None:
        """`verb`: what a step did to pages, for the note.

        Steps that move up to `times` the bytes of all tensors are not reported.
        """
        self._verb, self._times = verb, times
        self._moved_bytes = self._reported_bytes = 0

    def step(self, moved_bytes: int, tensor_bytes: int) -> str:
        """Return a note after a step, or "": once, and again if a step moves twice as much.

        `moved_bytes`: since the start. `tensor_bytes`: all tensors at their peak.
        """
        step_bytes, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
        if step_bytes <= self._times * tensor_bytes or step_bytes < 2 * self._reported_bytes:
            return ""
        self._reported_bytes = step_bytes
        return (
            f"a step {self._verb} {format_bytes(step_bytes)} of pages, {step_bytes / tensor_bytes:.1f} times the "
            f"{format_bytes(tensor_bytes)} of all tensors: a larger budget moves less"
        )


def page_watches() -> tuple[PageWatch, PageWatch]:
    """Return the watches for pages that a program writes, and for those that it reads."""
    return PageWatch("wrote", _MANY_WRITTEN), PageWatch("read", _MANY_READ)


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """Figures at a program's end. `counters` are those of its own process; None if another program replaced that."""

    peak_bytes: int
    """Peak of the program's own process."""
    together_bytes: int
    """The most that all processes held at a time."""
    tensor_bytes: int
    """Largest number of bytes of tensors at a time, in all processes."""
    rest_bytes: int
    """Largest number of bytes besides tensors, in all processes: Python, libraries, the program's objects."""
    needed_bytes: int
    """The budget that would have sufficed; 0 if this one did."""
    program: ProcessUse | None
    children: tuple[ProcessUse, ...]
    forgotten: int
    """Children whose figures were lost."""
    counters: GuardCounters | None

    @classmethod
    def read(cls, table: ProcessTable, counters: GuardCounters | None, peak_bytes: int) -> "GuardedRun":
        """Return the figures of the processes of `table` until now.

        The planning process is in the sums, but is not a child of the program.
        """
        program, everyone = table.program(), table.children()
        children = tuple(use for use in everyone if PLANNING_MODULE not in use.name)
        peak_bytes = max(peak_bytes, 0 if program is None else program.peak_bytes)
        together = max(table.peak_bytes, peak_bytes) if everyone else peak_bytes
        tensors = max(table.peak_tensor_bytes, 0 if counters is None else counters.peak_resident_bytes)
        figures = (peak_bytes, together, tensors, table.rest_bytes, table.needed_bytes)
        return cls(*figures, program, children, table.forgotten, counters)

    @property
    def unguarded(self) -> tuple[ProcessUse, ...]:
        """Return the processes for which the budget was not enforced, the largest first."""
        found = [use for use in (*self.children, self.program) if use is not None and not use.guarded]
        return tuple(sorted(found, key=lambda use: -use.peak_bytes))

    def facts(self, ram_bytes: int | None) -> dict[str, Any]:
        """Return the figures for the report. A budget counts as kept if every process kept it."""
        facts: dict[str, Any] = {
            "peak_resident_bytes": self.peak_bytes,
            "peak_together_bytes": self.together_bytes,
            "peak_tensor_bytes": self.tensor_bytes,
            "rest_bytes": self.rest_bytes,
            "needed_bytes": self.needed_bytes,
            "read_bytes": self._sum("read_bytes"),
            "written_bytes": self._sum("written_bytes"),
            "budget_held": not self.unguarded and (ram_bytes is None or self.together_bytes <= ram_bytes),
            "children": [asdict(use) for use in self.children],
            "children_forgotten": self.forgotten,
        }
        if self.counters is not None:
            facts["faults"] = asdict(self.counters)
        return facts

    def _sum(self, figure: str) -> int:
        """Return a figure for all processes together; the program's own is read last, and exact."""
        own = self.program if self.counters is None else self.counters
        return sum(getattr(use, figure) for use in (own, *self.children) if use is not None)

    def summary(self, ram_bytes: int | None, tensor_bytes: int | None, wall_s: float | None) -> str:
        """Return the final line. It claims a budget only if it was enforced for every process."""
        faults = self._sum("read_faults") + self._sum("write_faults")
        spent = "" if self.counters is None or self.children else f" of {format_seconds(self.counters.fault_ns / 1e9)}"
        moved = f"read {format_bytes(self._sum('read_bytes'))}, wrote {format_bytes(self._sum('written_bytes'))}"
        took = "" if wall_s is None else f"{format_seconds(wall_s)}; "
        bound = self.bound(ram_bytes, tensor_bytes, self.tensor_bytes)
        return f"{bound}; {took}{moved} in {faults:,} faults{spent}{self.remarks(ram_bytes)}"

    def remarks(self, ram_bytes: int | None) -> str:
        """Return which part of a budget did not hold, and what would suffice; empty if it held."""
        return self._not_held() + self._advice(ram_bytes)

    def bound(self, ram_bytes: int | None, tensor_bytes: int | None, own_tensor_bytes: int) -> str:
        """Return the peak of all processes, the budget to which it belongs, and the processes."""
        tensors = f"tensors {format_bytes(max(own_tensor_bytes, self.tensor_bytes))}"
        if self.unguarded:
            bound = f" (the budget was not enforced for all processes), {tensors}"
        elif ram_bytes is not None:
            rest = f", the rest {format_bytes(self.rest_bytes)}" if self.counters is not None else ""
            bound = f" of {format_bytes(ram_bytes)}, {tensors}{rest}"
        else:
            bound = f" {tensors}" if tensor_bytes is None else f" {tensors} of {format_bytes(tensor_bytes)}"
        return f"peak {format_bytes(self.together_bytes)}{bound}{self._processes()}"

    def _processes(self) -> str:
        count = len(self.children) + self.forgotten
        if not self.children:
            return ""
        largest = max(self.children, key=lambda use: use.peak_bytes)
        noun = "child process" if count == 1 else f"child processes, the largest {largest.name!r}"
        return f", with {count} {noun} ({format_bytes(largest.peak_bytes)})"

    def _not_held(self) -> str:
        outside = self.unguarded
        if not outside:
            return ""
        named = ", ".join(f"{use.name!r} ({use.pid}, {_peak(use)})" for use in outside[:_NAMED])
        more = f" and {len(outside) - _NAMED} more" if len(outside) > _NAMED else ""
        return (
            f"; outside the budget: {named}{more}: a program that is statically linked, or started without the C "
            "library, cannot be guarded"
        )

    def _advice(self, ram_bytes: int | None) -> str:
        if ram_bytes is None or not self.needed_bytes:
            return ""
        rest = f"Python, libraries and your objects take {format_bytes(self.rest_bytes)} of {format_bytes(ram_bytes)}"
        return f"; {rest}: give at least {(self.needed_bytes >> 20) + 1}M"


def _peak(use: ProcessUse) -> str:
    """Return what was seen of a process from outside, which is never its last milliseconds."""
    return f"at least {format_bytes(use.peak_bytes)}" if use.peak_bytes else "ended before it was measured"
