"""Plans of paired devices: requested, checked here, and shared in return.

All received data is untrusted. A plan is lowered for this device's own problem; a device that sends something invalid
is reported, and planning continues as if nobody had answered.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from port_agent.peers.connection.messages import QUESTION_LIMIT_BYTES
from port_agent.peers.exchange.answers import NotAnsweredError, PeerContent, Topic
from port_planner.base.units import format_bytes
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Plan
from port_planner.search.plan_problem import (
    PlanProblem,
    UnsuitedPlanError,
    WrongPlanError,
    judged,
    pack_answer,
    pack_problem,
    plan_in,
)
from port_planner.search.plan_step import PlanResult, better_of
from port_planner.search.solve import Outcome

if TYPE_CHECKING:
    from port_planner.make_bundle import PlanFunction  # which needs torch, and a process that only plans again does not

_PROMPT_S = 5.0
"""Seconds for a prompt answer.

A paired device reports within milliseconds whether it has a plan; a silent one is waited for only once.
"""

ProblemOf = Callable[[StepGraph, CostTable, int], PlanProblem]


class PeerLine(Protocol):
    """The connection to paired devices; each method raises NotAnsweredError."""

    def shared(self, topic: Topic, name: str) -> PeerContent:
        """Return what paired devices share under a name."""

    def solved(self, name: str, problem: bytes, seconds: float) -> PeerContent:
        """Return the answer to a planning problem."""

    def share(self, topic: Topic, name: str, content: bytes) -> None:
        """Share content with paired devices."""

    def accuse(self, device: str, reason: str) -> None:
        """Block a device that gave a wrong answer."""


class PeerPlans:
    """What paired devices contribute to one run of planning.

    `shares`: whether plans are exchanged with them. `solves`: whether they solve plans. `report` is for the user.
    """

    def __init__(self, line: PeerLine, *, shares: bool, solves: bool) -> None:
        self._line, self._shares, self._solves = line, shares, solves
        self._asks = shares
        """Whether plans are still requested: no longer once no device answers promptly."""
        self._notes: dict[str, None] = {}
        """Notes, each reported once, in order."""
        self._solved: dict[str, int] = {}
        """Number of plans that each device solved."""

    def report(self) -> list[str]:
        """Return what paired devices contributed, and why they contributed no more."""
        solved = [f"{count} plan{'s' * (count > 1)} solved on {name}" for name, count in self._solved.items()]
        return [*solved, *self._notes]

    def planner(self, local: "PlanFunction", problem_of: ProblemOf) -> "PlanFunction":
        """Return a planner that uses plans of paired devices if they are as good as can be known, and
        `local`'s plans otherwise.

        Quick plans are made here.
        """

        def plan(graph: StepGraph, costs: CostTable, ram_bytes: int) -> PlanResult:
            problem = problem_of(graph, costs, ram_bytes)
            if problem.strategy == "greedy":
                if self._solves:
                    self._note(
                        f"planned here by the quick planner: a step of {len(graph.ops)} operators is too large to "
                        "search"
                    )
                return local(graph, costs, ram_bytes)
            shared = self._shared_plan(problem) if self._asks else None
            if shared is not None:
                return shared
            found = (self._solved_plan(problem) if self._solves else None) or local(graph, costs, ram_bytes)
            if self._shares and found.plan is not None:
                self._share(Topic.PLAN, problem.name, pack_answer(found))
            return found

        return plan

    def solved(self, problem: PlanProblem, known: Plan) -> PlanResult:
        """Return the best of the known plan and a paired device's, or this device's if none arrived."""
        found = None if problem.strategy == "greedy" else self._solved_plan(problem)
        if found is None:
            return problem.solved(rivals=(known,))
        return better_of(problem.graph, problem.costs, problem.limits, found=found, rivals=(known,))

    def _shared_plan(self, problem: PlanProblem) -> PlanResult | None:
        began_s = time.monotonic()
        try:
            found = self._line.shared(Topic.PLAN, problem.name)
        except NotAnsweredError as error:  # usually: nobody planned the same step for this budget yet
            if time.monotonic() - began_s > _PROMPT_S:
                self._asks = False
                self._note(f"peers are no longer asked for plans: {error}")
            return None
        plan = self._checked(problem, found, same_costs=False)
        if plan is not None:
            self._note(f"a plan of {found.name} for the same step and budget")
        return _result(plan)

    def _solved_plan(self, problem: PlanProblem) -> PlanResult | None:
        packed = pack_problem(problem)
        try:
            if len(packed) > QUESTION_LIMIT_BYTES:
                raise NotAnsweredError(
                    f"the step takes {format_bytes(len(packed))}, more than the {format_bytes(QUESTION_LIMIT_BYTES)} "
                    "that can be sent"
                )
            found = self._line.solved(problem.name, packed, problem.time_limit_s)
        except NotAnsweredError as error:
            self._solves = False  # its answer is valid for the next minutes
            self._note(f"solved here: {error}")
            return None
        plan = self._checked(problem, found, same_costs=True)
        if plan is not None:
            self._solved[found.name] = self._solved.get(found.name, 0) + 1
        return _result(plan)

    def _checked(self, problem: PlanProblem, found: PeerContent, *, same_costs: bool) -> Plan | None:
        """Return the plan of an answer with its figures here; None if it has none, or one no
        better than a quick plan.
        """
        try:
            plan = plan_in(found.content)
            if isinstance(plan, str):
                self._note(f"solved here: {found.name} found no plan ({plan.partition(';')[0]})")
                return None
            plan = judged(problem, plan, same_costs=same_costs)
        except WrongPlanError as error:
            self._accuse(found, str(error))
            return None
        except UnsuitedPlanError as error:
            self._note(f"a plan of {found.name} was rejected: {error}")
            return None
        quick = replace(problem, strategy="greedy").solved().plan
        if quick is not None and plan.overhead_joules > quick.overhead_joules * (1 + 1e-9):
            self._note(f"a plan of {found.name} was rejected: a quick plan made here costs less")
            return None
        return plan

    # --- inside

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _share(self, topic: Topic, name: str, content: bytes) -> None:
        try:
            self._line.share(topic, name, content)
        except NotAnsweredError as error:
            self._note(f"not shared: {error}")

    def _accuse(self, found: PeerContent, reason: str) -> None:
        self._note(f"{found.name} gave a wrong answer and is temporarily blocked: {reason}")
        try:
            self._line.accuse(found.device, reason)
        except NotAnsweredError as error:
            self._note(f"{found.name} could not be blocked: {error}")


def _result(plan: Plan | None) -> PlanResult | None:
    if plan is None:
        return None
    message = f"within its budgets: peak {format_bytes(plan.peak_bytes)}, solved on a paired device"
    return PlanResult(Outcome.FEASIBLE, plan, None, None, 0.0, message)
