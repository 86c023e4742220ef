"""The idle-gap return MILP: one exactly-one row per idle gap instead of POET's T x T matrices.

Every equation has its own function, its number in FORMULATION.md and its name in the model.
"""

from dataclasses import replace

from port_planner.milp.columns import Breadth, Columns, define_intermediates, define_returns
from port_planner.milp.decision_rows import eq1_one_decision, eq2_presence, eq3_inputs, eq4_page_out
from port_planner.milp.highs import Vector
from port_planner.milp.limit_rows import eq8_deadline, eq9_wear
from port_planner.milp.memory_rows import define_slices, eq5_eq6_memory, eq6_target_memory, eq10_slices
from port_planner.milp.source_rows import eq3_sources
from port_planner.milp.time_rows import (
    define_overlap,
    eq7_bucket_stall,
    eq7_exposed_stall,
    eq7_stall,
    eq7_total_stall,
)
from port_planner.milp.variant_rows import define_variants, eq11_one_variant, eq12_tiled
from port_planner.problem.intermediates import prune_intermediates
from port_planner.problem.problem import Choice, GapDecision, Problem, Schedule, Semantics


class Formulation(Columns):
    """The model of `problem` at one breadth, and the way back from its solutions to schedules."""

    def __init__(self, problem: Problem, breadth: Breadth, include: Schedule | None = None) -> None:
        """Build the model; it also offers all decisions in `include`, even outside the breadth."""
        super().__init__(problem, breadth, include)
        self._build()

    def _build(self) -> None:
        breadth = self.breadth
        define_returns(self)
        if breadth.inputs:
            define_intermediates(self)
        define_slices(self)
        define_variants(self)
        eq1_one_decision(self)
        eq2_presence(self)
        if breadth.inputs:
            eq3_inputs(self)
        if breadth.sources:
            eq3_sources(self)
        eq4_page_out(self)
        if self.problem.semantics is Semantics.ELASTIC and not self.breadth.timeless:
            define_overlap(self)
        if self.problem.ram_bytes is not None:
            eq5_eq6_memory(self)
        eq6_target_memory(self)
        if self.problem.semantics is Semantics.REAL:
            eq7_stall(self)
        elif self.problem.semantics is Semantics.ELASTIC:
            eq7_total_stall(self)
            if not self.breadth.timeless:
                eq7_bucket_stall(self)
                eq7_exposed_stall(self)
        eq8_deadline(self)
        eq9_wear(self)
        eq10_slices(self)
        eq11_one_variant(self)
        eq12_tiled(self)

    def schedule(self, values: Vector) -> Schedule:
        """Return the decisions behind a solution, without intermediates that nothing uses."""
        choices = []
        for g, columns in self.gaps.items():
            decision = next((s for s, v in columns.recompute.items() if values[v] > 0.5), None)
            if decision is not None:
                choices.append(Choice(g, decision, GapDecision.RECOMPUTE))
            for (s, target), v in columns.page.items():
                if values[v] > 0.5:
                    choices.append(Choice(g, s, GapDecision.PAGE, target))
            if columns.packed is not None and values[columns.packed] > 0.5:
                choices.append(Choice(g, self.problem.gaps[g].before, GapDecision.PACK))
            for target, v in columns.packed_page.items():
                if values[v] > 0.5:
                    choices.append(Choice(g, self.problem.gaps[g].before, GapDecision.PACK_PAGE, target))
        intermediates = {key for key, v in self.intermediates.items() if values[v] > 0.5}
        schedule = prune_intermediates(self.problem, tuple(sorted(choices, key=lambda c: c.gap)), intermediates)
        sliced = tuple(k for k, v in sorted(self.slices.items()) if values[v] > 0.5)
        variants = tuple((c, k) for (c, k), v in sorted(self.variants.items()) if k and values[v] > 0.5)
        return replace(schedule, sliced=sliced, variants=variants)

    @property
    def deadline_row(self) -> int | None:
        """The row of the deadline, if there is a deadline that may be missed."""
        name = eq8_deadline.__name__  # rows are named after their functions
        return self.model.row_names.index(name) if name in self.model.row_names else None

    def decisions(self) -> list[int]:
        """Return the integral columns that are decided; those of `hiding` follow from them."""
        return [c for c, flag in enumerate(self.model.integral) if flag and c not in self.hiding]

    def start_values(self, schedule: Schedule) -> dict[int, float] | None:
        """Return the integral columns of decisions under `schedule`; None if the model does not offer one of them."""
        values = dict.fromkeys(self.decisions(), 0.0)
        chosen = {c.gap: c for c in schedule.choices}
        for g, columns in self.gaps.items():
            choice = chosen.pop(g, None)
            if choice is None:
                values[columns.keep] = 1.0
                continue
            found = {
                GapDecision.RECOMPUTE: columns.recompute.get(choice.stage),
                GapDecision.PAGE: columns.page.get((choice.stage, choice.target)),
                GapDecision.PACK: columns.packed,
                GapDecision.PACK_PAGE: columns.packed_page.get(choice.target),
                GapDecision.KEEP: columns.keep,
            }[choice.decision]
            if found is None:
                return None
            values[found] = 1.0
        if chosen or any(key not in self.intermediates for key in schedule.intermediates):
            return None
        if any(k not in self.slices for k in schedule.sliced):
            return None
        others = dict(schedule.variants)
        variants = [(c, others.get(c, 0)) for c in range(len(self.problem.groups))]
        if any(key not in self.variants for key in variants):
            return None
        values.update({self.variants[key]: 1.0 for key in variants})
        values.update({self.intermediates[key]: 1.0 for key in schedule.intermediates})
        values.update({self.slices[k]: 1.0 for k in schedule.sliced})
        return values
