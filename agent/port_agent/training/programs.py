"""The programs of a bundle's graphs under the current plan, or adapted ones if packed forms need
other sizes than planned.
"""

from collections.abc import Mapping
from typing import Any

from port_agent.training.packing_drift import PackingDrift
from port_agent.training.step_packing import PackingStats
from port_agent.training.step_values import GraphChangedError
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import CostTable, by_version
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.packed_sizes import with_packed_sizes
from port_planner.ir.lowering.verify_program import verify_lowered
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.plan import Plan
from port_planner.ir.program import PlanError, Program, host_bytes_of

PackedSizes = Mapping[tuple[int, int], int | None]
"""Bytes that the packed form of each storage and version needs; None: do not pack it."""


class Programs:
    """The programs to run, by graph; each is lowered and verified on first use."""

    def __init__(self, bundle: Bundle, plan_index: int) -> None:
        self._bundle, self.plan_index = bundle, plan_index
        self._made: dict[tuple[int, str], Program] = {}
        self._drifts: dict[str, PackingDrift] = {}
        self._sizes: dict[str, dict[tuple[int, int], int | None]] = {}
        """Measured sizes of packed forms that exceed the planned ones, or are much smaller, by
        graph (`with_packed_sizes`).
        """

    def of(self, name: str) -> Program:
        """Return the program of one graph under the current plan; a plan above its budget is rejected here.

        Raises GraphChangedError if no graph has this name, and what `lower`, `verify_operands` and `verify_lowered`
        raise.
        """
        key = (self.plan_index, name)
        if key not in self._made:
            if name not in self._bundle.graphs:
                raise GraphChangedError(f"the bundle has no graph {name!r} for this batch; plan the job again")
            program = lower(self._bundle.graphs[name], *self._plan(name, self._sizes.get(name)))
            verify_operands(program.graph)
            verify_lowered(program)
            self._made[key] = program
        return self._made[key]

    def use_plan(self, index: int) -> None:
        """Switch to another plan of the frontier. Raises PortError if the bundle has no such plan."""
        if not 0 <= index < len(self._bundle.plans):
            raise PortError(f"the bundle has no plan {index}; it has {len(self._bundle.plans)}")
        self.plan_index = index

    @property
    def peak_bytes(self) -> int:
        """Planned peak of the host's memory, in bytes."""
        programs = [self.of(name) for name in self._bundle.graphs]
        device = next(iter(self._bundle.costs.values())).device
        if device.host is not None:
            return device.host_base_bytes + host_bytes_of(programs)
        return max(program.peak_bytes for program in programs)

    # -- packed forms that need different sizes than planned

    def note(self, name: str, packing: PackingStats) -> None:
        """Record what the packed forms of a step needed."""
        program = self.of(name)
        if not program.packings:
            return
        if name not in self._drifts:
            sizes = {key: c.reserved_bytes for key, c in by_version(self._bundle.costs[name].packings).items()}
            self._drifts[name] = PackingDrift(program.graph, {**sizes, **self._sizes.get(name, {})})
        self._drifts[name].note(packing.overflows, packing.sizes)

    def adapt(self) -> str:
        """Switch to a plan that reserves more if tensors overflow step after step; return why, or "".

        Switch to one that reserves less if tensors leave much unused and others can stay in RAM instead. Call this
        between two steps. Whatever still does not fit the budget keeps spilling.
        """
        changed = {"denser": 0, "sparser": 0}
        for name, drift in self._drifts.items():
            for what, found in (("denser", drift.take()), ("sparser", drift.take_sparser())):
                if found and self._use_sizes(name, found, must_pay=what == "sparser"):
                    changed[what] += len(found)
        options = " and ".join(f"{count} tensors are {what}" for what, count in changed.items() if count)
        return f"{options} than when the plan was made" if options else ""

    def progress(self) -> dict[str, Any]:
        """Return the sizes that were found, for a commit."""
        sizes = [[name, *key, nbytes] for name, found in self._sizes.items() for key, nbytes in found.items()]
        return {"packed_rooms": sizes} if sizes else {}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the sizes of a commit."""
        self._sizes = {}
        for name, storage, version, nbytes in progress.get("packed_rooms", ()):
            self._sizes.setdefault(name, {})[storage, version] = nbytes
        for name in self._sizes:
            self._forget(name)

    def _use_sizes(self, name: str, found: PackedSizes, *, must_pay: bool) -> bool:
        """Return whether one graph adopts these sizes: they must fit and, if they must pay, change a decision."""
        before = self._sizes.get(name, {})
        sizes = {**before, **found}
        try:
            costs, plan = self._plan(name, sizes)
            if must_pay and plan.decisions == self._plan(name, before)[1].decisions:
                return False
            lower(self._bundle.graphs[name], costs, plan)
        except PlanError:
            return False
        self._sizes[name] = sizes
        self._forget(name)
        return True

    def _plan(self, name: str, sizes: PackedSizes | None) -> tuple[CostTable, Plan]:
        """Return the current plan of one graph, and its costs, with adapted sizes of packed forms if there are any."""
        costs, plan = self._bundle.costs[name], self._bundle.plans[self.plan_index][name]
        return with_packed_sizes(self._bundle.graphs[name], costs, plan, sizes) if sizes else (costs, plan)

    def _forget(self, name: str) -> None:
        self._made = {key: program for key, program in self._made.items() if key[1] != name}
