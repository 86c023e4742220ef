"""A planning problem as data for another device to solve, and the check of the answer.

It contains the step's operators, their costs and the limits, but no weights, data, code or names (`anonymous`). A
received plan is lowered here, for the problem as it is known here, because its author is not trusted.
"""

import hashlib
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.bundle.codec import (
    WireError,
    pack_costs,
    pack_graph,
    pack_plan,
    unpack_costs,
    unpack_graph,
    unpack_plan,
)
from port_planner.ir.bundle.manifest import PlannedLimits
from port_planner.ir.costs import CostTable
from port_planner.ir.graph import Phase, StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.program import BudgetError, PlanError
from port_planner.milp.highs import Progress
from port_planner.search.plan_step import PlanLimits, PlanResult, plan_within, with_figures

_FORMAT = 2
"""Format of the data. Format 1 counted a write for each weight that left RAM, changed or not, so its figures differ."""
MAX_SEARCHED = 6_000
"""Largest number of operators of a step that is searched.

With more (GPT-2's update over eight micro-batches has 14,000), one look at the planning model takes longer than all the
time for planning. Given a minute, it found nothing better than the first plan.
"""
MAX_RAW_BYTES = 64 << 20
"""Largest size of an unpacked problem in bytes; one of 6,000 operators, the most that are searched, takes 2 MB."""
MAX_ANSWER_BYTES = 1 << 20
_MESSAGE_LIMIT = 1000
_AGREEMENT = 1e-9
"""Largest relative difference of figures: both devices do the same arithmetic on the same numbers, in Python."""

_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]


class WrongPlanError(PortError):
    """The plan is invalid for the problem, or its figures are wrong; no planner of this project made it."""

    exit_code = ExitCode.IMPOSSIBLE


class UnsuitedPlanError(PortError):
    """The plan was valid under other costs, but is not valid under these."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """The input of `plan_step`."""

    graph: StepGraph
    costs: CostTable
    ram_bytes: int
    deadline_s: float | None = None
    write_limit_bytes: int | None = None
    time_limit_s: float = 20.0
    strategy: str = "milp"

    @property
    def limits(self) -> PlanLimits:
        """The limits of the step."""
        return PlanLimits(self.ram_bytes, self.deadline_s, self.write_limit_bytes)

    @property
    def name(self) -> str:
        """The content hash of everything but the operators' costs: plans for equal names fit each other's steps."""
        packings = [[p.storage, p.version, p.codec.value] for p in self.costs.packings]
        fields = [
            _FORMAT, pack_graph(anonymous(self.graph)), self.ram_bytes, self.deadline_s, self.write_limit_bytes,
            self.time_limit_s, self.strategy, len(self.costs.device.targets), packings,
        ]  # fmt: skip
        return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()

    def solved(self, progress: Progress | None = None, rivals: Iterable[Plan] = ()) -> PlanResult:
        """Return the result of planning here, or one of the `rivals` if it costs less; raises StrategyError."""
        return plan_within(
            self.graph,
            self.costs,
            self.limits,
            time_limit_s=self.time_limit_s,
            strategy=self.strategy,
            progress=progress,
            rivals=rivals,
        )


def plan_problem(
    graph: StepGraph, costs: CostTable, ram_bytes: int, strategy: str, time_limit_s: float, limits: PlannedLimits
) -> PlanProblem:
    """Return the problem to solve for a graph of a bundle; evaluation has no deadline."""
    training = any(op.phase is not Phase.FORWARD for op in graph.ops)
    searched = strategy if len(graph.ops) <= MAX_SEARCHED else "greedy"
    return PlanProblem(
        graph, costs, ram_bytes, limits.step_s if training else None, limits.written_bytes, time_limit_s, searched
    )


class _ProblemRecord(msgspec.Struct, array_like=True):
    format: int
    graph: Any
    costs: Any
    ram_bytes: _Bytes
    deadline_s: _Seconds | None
    write_limit_bytes: _Bytes | None
    time_limit_s: _Seconds
    strategy: Annotated[str, msgspec.Meta(max_length=40)]


class _AnswerRecord(msgspec.Struct, array_like=True):
    plan: Any
    message: Annotated[str, msgspec.Meta(max_length=_MESSAGE_LIMIT)]


def anonymous(graph: StepGraph) -> StepGraph:
    """Return the graph with the names of its storages replaced by numbers, equal for equal names."""
    numbers: dict[str, str] = {"": ""}
    storages = tuple(replace(s, name=numbers.setdefault(s.name, str(len(numbers)))) for s in graph.storages)
    return replace(graph, storages=storages)


def pack_problem(problem: PlanProblem) -> bytes:
    """Return a problem as bytes, without names."""
    costs = replace(problem.costs, device=replace(problem.costs.device, name=""))
    record = _ProblemRecord(
        _FORMAT,
        pack_graph(anonymous(problem.graph)),
        pack_costs(costs),
        problem.ram_bytes,
        problem.deadline_s,
        problem.write_limit_bytes,
        problem.time_limit_s,
        problem.strategy,
    )
    return zlib.compress(msgspec.msgpack.encode(record), 6)


def unpack_problem(content: bytes) -> PlanProblem:
    """Return the problem in `content`.

    Raises WireError, GraphError or OperatorError for anything else.
    """
    decompressor = zlib.decompressobj()
    try:
        raw = decompressor.decompress(content, MAX_RAW_BYTES)
        if not decompressor.eof or decompressor.unused_data:
            raise WireError(
                f"a planning problem is truncated, has bytes after its end, or has more than {MAX_RAW_BYTES} bytes"
            )
        record = msgspec.msgpack.decode(raw, type=_ProblemRecord)
    except (zlib.error, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a planning problem ({len(content)} bytes): {error}") from error
    if record.format != _FORMAT:
        raise WireError(
            f"a planning problem has format {record.format}, but this agent reads {_FORMAT}; update the older one"
        )
    graph, costs = unpack_graph(record.graph), unpack_costs(record.costs)
    if len(costs.ops) != len(graph.ops):
        raise WireError(f"a planning problem has {len(costs.ops)} costs for {len(graph.ops)} operators")
    return PlanProblem(
        graph,
        costs,
        record.ram_bytes,
        record.deadline_s,
        record.write_limit_bytes,
        record.time_limit_s,
        record.strategy,
    )


def pack_answer(result: PlanResult) -> bytes:
    """Return the result of planning as bytes: the plan, or the reason for having none."""
    plan = None if result.plan is None else pack_plan(result.plan)
    return msgspec.msgpack.encode(_AnswerRecord(plan, result.message[:_MESSAGE_LIMIT]))


def plan_in(content: bytes) -> Plan | str:
    """Return the plan in an answer, or the reason for having none; raises WrongPlanError for anything else."""
    if len(content) > MAX_ANSWER_BYTES:
        raise WrongPlanError(f"an answer has {len(content)} bytes, but a plan has at most {MAX_ANSWER_BYTES}")
    try:
        record = msgspec.msgpack.decode(content, type=_AnswerRecord)
        return record.message if record.plan is None else unpack_plan(record.plan)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, WireError) as error:
        raise WrongPlanError(f"not a plan ({len(content)} bytes): {error}") from error


def judged(problem: PlanProblem, plan: Plan, *, same_costs: bool) -> Plan:
    """Return a plan from elsewhere with its program's figures here, and without its bound, which cannot be verified.

    `same_costs`: whether it was made for these costs, so that its own figures must match. Raises WrongPlanError
    for a plan that is invalid for this step or states wrong figures, and UnsuitedPlanError for one that is
    wrong only under other costs.
    """
    claimed, plan = plan, replace(plan, ram_bytes=problem.ram_bytes, strategy=problem.strategy)
    try:
        program = lower(problem.graph, problem.costs, plan)
    except BudgetError as error:
        raise (WrongPlanError if same_costs else UnsuitedPlanError)(f"the plan does not fit: {error}") from error
    except PlanError as error:
        raise WrongPlanError(f"the plan is not valid for this step: {error}") from error
    if problem.limits.passed_by(program):
        text = f"the plan takes {program.seconds:g} s and writes {program.written_bytes} bytes a step, which exceeds the limits"
        raise (WrongPlanError if same_costs else UnsuitedPlanError)(text)
    found = with_figures(plan, problem.costs, program)
    if same_costs:
        _compare(claimed, found)
    return found


def _compare(claimed: Plan, found: Plan) -> None:
    """Raise WrongPlanError if a plan's figures differ from those of its program."""
    for figure in ("peak_bytes", "seconds", "joules", "overhead_joules"):
        claimed_value, is_so = getattr(claimed, figure), getattr(found, figure)
        if not math.isclose(claimed_value, is_so, rel_tol=_AGREEMENT, abs_tol=_AGREEMENT):
            raise WrongPlanError(f"the plan claims {figure} of {claimed_value:g}, but its program takes {is_so:g}")
