"""A step that was seen to run as a problem: what is charged where, and what leaves after which operator."""

import pytest

from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.ir.traced import Departure, TracedOp, TracedStep, TracedStorage
from port_planner.problem.problem import Choice, GapDecision, Schedule, verify_problem
from port_planner.problem.replay import replay
from port_planner.problem.traced_step import TracedProblem, traced_problem

MIB = 1 << 20
DEVICE = DeviceCosts("device", 0, 2.0, 4.0, Flash("pages", 100e6, 50e6, 0.0, 1e-9, 2e-9))


def training(layers: int = 4) -> TracedStep:
    """Return a step of `layers` weights of 1 MiB with momentum: forward, backward, update; gradients end with the step.

    Storages: weights, momenta, activations, gradients, `layers` of each.
    """
    n = layers
    weight, momentum, activation, gradient = range(n), range(n, 2 * n), range(2 * n, 3 * n), range(3 * n, 4 * n)
    forward = [
        TracedOp(0.01, 0, (weight[i], *((activation[i - 1],) if i else ())), (), (activation[i],), repeatable=True)
        for i in range(n)
    ]
    backward = [TracedOp(0.02, MIB // 4, (weight[i], activation[i]), (), (gradient[i],)) for i in reversed(range(n))]
    update = [TracedOp(0.005, 0, (weight[i], momentum[i], gradient[i]), (weight[i], momentum[i])) for i in range(n)]
    ends = {activation[i]: 2 * n - i for i in range(n)}
    storages = [TracedStorage(MIB, s < 2 * n, ends.get(s, 3 * n)) for s in range(4 * n)]
    return TracedStep((*forward, *backward, *update), tuple(storages))


def planned(tensor_bytes: int, step: TracedStep | None = None) -> TracedProblem:
    """Return the problem of the step, which must not contradict itself."""
    made = traced_problem(step or training(), DEVICE, tensor_bytes=tensor_bytes)
    verify_problem(made.problem)
    return made


def peak_of(step: TracedStep) -> int:
    """Count the bytes held while each operator runs when nothing leaves."""
    peak = 0
    for i, op in enumerate(step.ops):
        held = 0
        for s, storage in enumerate(step.storages):
            uses = [k for k, o in enumerate(step.ops) if s in (*o.reads, *o.makes)]
            if storage.persistent or uses[0] <= i < storage.ends:
                held += storage.nbytes
        peak = max(peak, held + op.workspace_bytes)
    return peak


def test_keeping_everything_costs_nothing_and_holds_what_is_there() -> None:
    step = training()
    cost = replay(planned(64 * MIB).problem, Schedule())
    assert cost.valid and cost.overhead_joules == 0 and cost.read_bytes == 0
    assert cost.peak_bytes == peak_of(step)
    assert cost.seconds == pytest.approx(sum(op.seconds for op in step.ops))


def test_consecutive_small_operators_are_one_stage() -> None:
    assert planned(8 * MIB).problem.size == 12 + 1
    assert planned(1024 * MIB).problem.size == 1 + 1


def test_a_momentum_that_leaves_is_written_and_read_once_a_step() -> None:
    step = training()
    traced = planned(64 * MIB, step)
    gap = next(g for g, gap in enumerate(traced.problem.gaps) if traced.storages[gap.tensor] == 4)
    schedule = Schedule((Choice(gap, traced.problem.gaps[gap].before, GapDecision.PAGE),))
    cost = replay(traced.problem, schedule)
    assert cost.valid and (cost.read_bytes, cost.written_bytes) == (MIB, MIB)
    assert traced.departures(schedule) == (Departure(8, 4, False),)
    assert traced.moved_seconds(schedule, cost.written_bytes) == pytest.approx(MIB / 100e6 + MIB / 50e6)


def test_what_remains_of_a_gradient_is_written_and_never_read() -> None:
    traced = planned(8 * MIB)
    remains = [i for i, t in enumerate(traced.problem.tensors) if t.name.startswith("remains")]
    assert {traced.storages[i] for i in remains} == {12, 13, 14}  # the last one's update is the last operator
    for i in remains:
        (paging,) = traced.problem.tensors[i].paging
        assert paging.seconds_in == paging.joules_in == 0 and paging.joules_out == pytest.approx(2e-9 * MIB)
    first = next(g for g, gap in enumerate(traced.problem.gaps) if gap.tensor == remains[0])
    schedule = Schedule((Choice(first, traced.problem.gaps[first].before, GapDecision.PAGE),))
    assert traced.departures(schedule) == (Departure(8, 12, False),)


def test_an_activation_can_be_made_again_from_what_it_read() -> None:
    traced = planned(8 * MIB)
    tensor = traced.storages.index(9)
    (again,) = traced.problem.tensors[tensor].rematerializations
    assert again is not None
    assert {traced.storages[u] for u, _ in again.inputs} == {1, 8} and again.seconds == pytest.approx(0.01)


def test_what_an_operator_changed_itself_is_not_made_again() -> None:
    step = training()
    ops = list(step.ops)
    ops[2] = TracedOp(0.01, 0, (2, 9), (9,), (10,), repeatable=True)  # changes its operand after reading it
    traced = planned(1024 * MIB, TracedStep(tuple(ops), step.storages))
    assert all(t.rematerializations in ((), (None,)) for t in traced.problem.tensors)


def test_operands_that_do_not_fit_together_pass_in_tiles() -> None:
    step = TracedStep(
        (TracedOp(0.1, 0, (0, 1), (0,)),), (TracedStorage(6 * MIB, True, 1), TracedStorage(3 * MIB, True, 1))
    )
    traced = planned(8 * MIB, step)
    assert replay(traced.problem, Schedule()).peak_bytes <= 9 * MIB
    assert [t.nbytes for t in traced.problem.tensors] == [3 * MIB]


def test_recomputing_through_intermediates_is_paged_instead() -> None:
    traced = planned(8 * MIB)
    problem = traced.problem
    (gap,) = [g for g, gap in enumerate(problem.gaps) if traced.storages[gap.tensor] == 9 and not gap.dead]
    stage = problem.gaps[gap].before
    through = Schedule((Choice(gap, stage, GapDecision.RECOMPUTE),), ((traced.storages.index(8), stage),))
    assert traced.without_intermediates(through) == Schedule((Choice(gap, stage, GapDecision.PAGE),))
    alone = Schedule((Choice(gap, stage, GapDecision.RECOMPUTE),))
    assert traced.without_intermediates(alone) == alone
