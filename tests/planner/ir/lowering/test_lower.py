"""The lowering's statements about a program, checked by walking its instructions with a naive machine."""

from collections.abc import Callable, Set
from dataclasses import replace

import pytest

from port_planner.ir.allowed_operators import GUARD
from port_planner.ir.costs import Codec, CostTable
from port_planner.ir.graph import Role, StepGraph, operands
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.packables import packed_reading
from port_planner.ir.lowering.rematerialize import effective_operands, rematerializable
from port_planner.ir.lowering.update_slices import slice_bounds, update_groups
from port_planner.ir.lowering.verify_program import verify_lowered
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import BudgetError, Code, PlanError, Program, idle_gaps
from port_planner.search.plan_step import plan_step
from tests.agent.exactness import packing_costs, random_plan
from tests.planner.steps import costs_of, tiny_step

# -- wrong plans


def _graph() -> StepGraph:
    return tiny_step().graphs["step"]


def _activation(graph: StepGraph) -> tuple[int, int, int]:
    """A temporary that can be rematerialized, with an idle gap of some length."""
    for s in range(len(graph.storages)):
        for a, b in idle_gaps(graph, s):
            if rematerializable(graph, s, a) and b - a > 4 and graph.uses[s][-1] == b:
                return s, a, b
    raise AssertionError("no such storage")


def _packed(graph: StepGraph) -> tuple[CostTable, Plan]:
    """Return costs under which everything may be packed, and a plan that packs an activation."""
    s, a, b = _activation(graph)
    return replace(costs_of(graph), packings=packing_costs(graph)), Plan((Decision(s, a, b, Action.PACK),))


def test_a_packed_gap_holds_what_is_reserved_and_takes_its_time_and_energy() -> None:
    graph = _graph()
    costs, plan = _packed(graph)
    kept, program = lower(graph, costs, Plan()), lower(graph, costs, plan)
    (d,), (cost,) = plan.decisions, program.packings
    saved = graph.storages[d.storage].nbytes - cost.reserved_bytes
    assert [program.timeline[i] - kept.timeline[i] for i in range(d.after + 1, d.before)] == [-saved] * (
        d.before - d.after - 1
    )
    assert program.timeline[d.after] >= kept.timeline[d.after] and program.timeline[d.before] >= kept.timeline[d.before]
    assert program.packing_seconds == cost.seconds > 0
    for taken, whole in ((program.seconds, kept.seconds), (program.compute_seconds, kept.compute_seconds)):
        assert taken == pytest.approx(whole + cost.seconds, rel=1e-12)
    assert program.joules == pytest.approx(kept.joules + cost.joules + costs.device.static_watts * cost.seconds)
    assert not program.written_bytes and not program.read_bytes


def test_a_packed_form_that_is_paged_holds_nothing_in_its_gap_and_moves_what_is_reserved() -> None:
    graph = _graph()
    costs, packs = _packed(graph)
    plan = Plan((replace(packs.decisions[0], action=Action.PACK_PAGE),))
    kept, program = lower(graph, costs, packs), checked(graph, plan)
    (d,), (cost,) = plan.decisions, program.packings
    codes = [i.code for i in program.instructions if i.index == 0 and i.code >= Code.PACK]
    assert codes == [
        Code.PACK,
        Code.WRITE_PACKED,
        Code.WAIT_WRITE_PACKED,
        Code.READ_PACKED,
        Code.WAIT_READ_PACKED,
        Code.UNPACK,
    ]
    assert program.read_bytes == program.written_bytes == cost.reserved_bytes
    flash = costs.device.flash
    moved = cost.reserved_bytes * (flash.read_joules_per_byte + flash.write_joules_per_byte)
    static = costs.device.static_watts * (program.seconds - kept.seconds)
    assert program.joules == pytest.approx(kept.joules + moved + static)
    fast = replace(costs.device, flash=replace(flash, read_bytes_per_s=1e18, write_bytes_per_s=1e18, latency_s=0.0))
    gone = lower(graph, replace(costs, device=fast), plan)
    for i in range(d.after + 2, d.before - 1):  # one op to write it, and one to read it
        assert gone.timeline[i] == kept.timeline[i] - cost.reserved_bytes


def test_signs_are_not_paged_and_nothing_packed_goes_where_no_medium_is() -> None:
    graph = _graph()
    costs, packs = _packed(graph)
    away = replace(packs.decisions[0], action=Action.PACK_PAGE)
    for plan, table in (
        (Plan((replace(away, target=1),)), costs),
        (Plan((away,)), replace(costs, packings=tuple(replace(p, codec=Codec.SIGN) for p in costs.packings))),
    ):
        with pytest.raises(PlanError, match="cannot be paged there"):
            lower(graph, table, plan)


def test_only_what_was_measured_is_packed() -> None:
    graph = _graph()
    costs, plan = _packed(graph)
    with pytest.raises(PlanError, match=r"the cost of packing storage .* there was never measured; plan the job again"):
        lower(graph, replace(costs, packings=()), plan)


def test_a_budget_in_which_a_tensor_and_its_packed_form_do_not_stand_together_is_refused() -> None:
    graph = _graph()
    costs, plan = _packed(graph)
    (cost,) = lower(graph, costs, plan).packings
    wide = replace(cost, reserved_bytes=100 * graph.storages[cost.storage].nbytes)
    wide_costs = replace(costs, packings=(wide,))
    peak = lower(graph, wide_costs, plan).peak_bytes
    assert peak > lower(graph, costs, Plan()).peak_bytes
    with pytest.raises(BudgetError, match="raise the budget"):
        lower(graph, wide_costs, replace(plan, ram_bytes=peak - 1))


def _weight(graph: StepGraph) -> int:
    return next(s for s, x in enumerate(graph.storages) if x.role is Role.PARAMETER)


def walk(program: Program, workspaces: list[int], cross_step: Set[int] = frozenset()) -> list[int]:
    """Obey the instructions one by one; fail on any read of what is not there. Return bytes held at each instruction.

    `cross_step`: writes of the step before that are still under way.
    """
    graph = program.graph
    size = [s.nbytes for s in graph.storages]
    there = {
        s
        for s, storage in enumerate(graph.storages)
        if storage.role is not Role.TEMPORARY and graph.uses[s] and s not in program.starts_on_flash
    }
    flash = set(program.starts_on_flash)
    landing: set[int] = set()
    leaving = set(cross_step)
    born: set[int] = set()
    streaming: dict[int, int] = {}
    packed: dict[int, int] = {}
    packed_leaving: dict[int, int] = {}
    packed_on_flash: set[int] = set()
    packed_landing: dict[int, int] = {}
    signed: set[int] = set()
    come_back = {x.index for x in program.instructions if x.code is Code.UNPACK}
    levels = []

    def held() -> int:
        """Bytes of what is there, comes, goes, streams through or is packed."""
        forms = sum(sum(entries.values()) for entries in (packed, packed_leaving, packed_landing))
        return sum(size[s] for s in (*there, *landing, *leaving)) + sum(streaming.values()) + forms

    def settled(touched: set[int], changed: set[int]) -> bool:
        """Return whether no unfinished update prevents this."""
        for g in streaming:
            inside = range(program.groups[g].first, program.groups[g].last + 1)
            writes = {w for k in inside for w in graph.ops[k].writes}
            uses = writes | {s for k in inside for s in (*graph.reads[k], *graph.creates[k])}
            if touched & writes or changed & uses:
                return False
        return True

    for instruction in program.instructions:
        i, extra = instruction.index, 0
        match instruction.code:
            case Code.RUN | Code.RERUN:
                op = graph.ops[i]
                again = instruction.code is Code.RERUN
                needed = set(effective_operands(graph, i)) if again else {graph.values[v].storage for v in operands(op)}
                assert needed - signed <= there, f"{op.name} reads {needed - there}"
                for s in needed & signed:
                    codec = next(c.codec for c in program.packings if c.storage == s)
                    assert packed_reading(graph, op, s, codec) is not None
                assert settled(needed, set() if again else set(op.writes))
                made = {graph.values[v].storage for v in op.outputs if v is not None} & set(graph.creates[i])
                if again:
                    assert made <= born, "only what was made before is rematerialized"
                    assert op.name != GUARD
                there |= made
                born |= made
                flash -= set(op.writes) if not again else set()
                extra = workspaces[i]
            case Code.SLICED:
                group = program.groups[i]
                counts = dict(program.slice_counts)
                assert all(s in there or s in flash or s in group.temporaries for s in group.storages)
                width = max(b - a for a, b in slice_bounds(group.nbytes, counts[i]))
                streamed = [s for s in group.storages if s not in there and s not in group.temporaries]
                streaming[i] = width * (2 * len(streamed) + len(group.temporaries))
                for k in range(group.first, group.last + 1):
                    made = set(graph.creates[k]) - set(group.temporaries)
                    there |= made
                    flash -= {w for w in graph.ops[k].writes if w in there}
            case Code.WAIT_SLICED:
                levels.append(held())  # what it ends is there until then
                del streaming[i]
                flash |= set(dict(program.slice_written).get(i, ()))
                continue
            case Code.FREE:
                assert settled(set(), {i})
                assert i in there | signed, f"storage {i} is freed twice"
                if i in there:
                    there.discard(i)
                elif i in signed:
                    signed.discard(i)
                    del packed[i]
            case Code.WRITE:
                assert settled(set(), {i})
                assert i in there and i not in leaving
                there.discard(i)
                leaving.add(i)
                flash.add(i)
            case Code.WAIT_WRITE:
                assert i in leaving or i in program.cross_step
                leaving.discard(i)
            case Code.PACK:
                cost = program.packings[i]
                assert settled({cost.storage}, {cost.storage}) and cost.storage in there and cost.storage not in packed
                levels.append(held() + cost.reserved_bytes)  # the tensor is there until it is packed
                there.discard(cost.storage)
                packed[cost.storage] = cost.reserved_bytes
                signed |= {cost.storage} if i not in come_back else set()
                continue
            case Code.UNPACK:
                cost = program.packings[i]
                assert cost.storage not in there
                there.add(cost.storage)
                levels.append(held())
                del packed[cost.storage]
                continue
            case Code.WRITE_PACKED:
                packed_leaving[i] = packed.pop(program.packings[i].storage)
                packed_on_flash.add(i)
            case Code.WAIT_WRITE_PACKED:
                del packed_leaving[i]
            case Code.READ_PACKED:
                packed_on_flash.remove(i)
                packed_landing[i] = program.packings[i].reserved_bytes
            case Code.WAIT_READ_PACKED:
                packed[program.packings[i].storage] = packed_landing.pop(i)
            case Code.READ:
                assert settled(set(), {i})
                assert i in flash and i not in there, f"storage {i} is read but not on flash"
                landing.add(i)
            case Code.WAIT_READ:
                assert i in landing
                landing.discard(i)
                there.add(i)
        levels.append(held() + extra)
    assert not landing and not streaming and not packed
    assert not packed_leaving and not packed_landing and not packed_on_flash
    assert leaving <= program.cross_step <= program.starts_on_flash
    end = {s for s in there if graph.storages[s].persistent}
    start = {s for s, x in enumerate(graph.storages) if x.persistent and graph.uses[s]} - program.starts_on_flash
    assert end == start, "a step must end as it began"
    assert program.starts_on_flash <= flash
    assert graph.kept <= there
    return levels


def checked(graph: StepGraph, plan: Plan, *, workspace: int = 0, base: int = 0) -> Program:
    costs = replace(costs_of(graph, base=base, workspace=workspace), packings=packing_costs(graph))
    program = lower(graph, costs, plan)
    verify_lowered(program)
    ordered = [costs.ops[i] for i in plan.order] if plan.order else costs.ops
    for cross_step in (frozenset[int](), program.cross_step):
        levels = walk(program, [c.workspace_bytes for c in ordered], cross_step)
        for instruction, level in zip(program.instructions, levels, strict=True):
            assert level <= max(instruction.resident_bytes, program.peak_bytes - base)
        assert max(levels) <= program.peak_bytes - base
    return program


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_random_programs_read_nothing_that_is_gone_and_hold_no_more_than_they_say(optimizer: str) -> None:
    graph = tiny_step(optimizer).graphs["step"]
    for seed in range(25):
        plan = random_plan(graph, seed, pack=0.3) if seed else Plan()
        program = checked(graph, plan, workspace=1000, base=5000)
        if seed == 0:
            levels = walk(program, [1000 * (i % 3) for i in range(len(graph.ops))])
            assert max(levels) == program.peak_bytes - 5000, "with nothing moved the count is exact"


def test_plans_of_the_planner_keep_their_budget() -> None:
    graph = tiny_step("SGD", 256).graphs["step"]  # storages of a megabyte: the planner does not move small ones
    costs = costs_of(graph, base=5000, workspace=100)
    whole = lower(graph, costs, Plan()).peak_bytes
    found = 0
    least = plan_step(graph, costs, ram_bytes=6000, strategy="greedy").needed_bytes
    assert least is not None and least < whole
    for share in (0.9, 0.5, 0.1, 0.0):
        budget = int(least + share * (whole - least))
        result = plan_step(graph, costs, ram_bytes=budget, strategy="greedy")
        if result.plan is None:
            continue
        found += 1
        program = checked(graph, result.plan, base=5000, workspace=100)
        assert program.peak_bytes <= budget
    assert found >= 2


def _wrong_plans() -> dict[str, Callable[[StepGraph], Plan]]:
    def one(make: Callable[[StepGraph, int, int, int], Decision]) -> Callable[[StepGraph], Plan]:
        return lambda g: Plan((make(g, *_activation(g)),))

    page, again = Action.PAGE, Action.RECOMPUTE
    return {
        "does not have": one(lambda g, s, a, b: Decision(len(g.storages), a, b, page)),
        "names a storage or an op": one(lambda g, s, a, b: Decision(s, a, len(g.ops), page)),
        "not used at op": one(lambda g, s, a, b: Decision(s, a + 1, b, page)),
        "before it returns": one(lambda g, s, a, b: Decision(s, a, b + 1, page)),
        "around the end of the step": one(lambda g, s, a, b: Decision(s, b, a, page)),
        "persistent storage may be paged around": one(lambda g, s, a, b: Decision(s, b, a, again)),
        "cannot be recomputed": lambda g: Plan((Decision(w := _weight(g), g.uses[w][0], g.uses[w][1], again),)),
        "slices update group": lambda g: Plan(sliced=((len(update_groups(g)), 2),)),
        "profile it again": lambda g: Plan(),
    }


@pytest.mark.parametrize("message", _wrong_plans())
def test_wrong_plans_are_refused(message: str) -> None:
    graph = _graph()
    costs = costs_of(graph)
    if message == "profile it again":
        costs = replace(costs, ops=costs.ops[1:])
    with pytest.raises(PlanError, match=message):
        lower(graph, costs, _wrong_plans()[message](graph))


def test_storages_cannot_leave_twice_in_one_gap() -> None:
    graph = _graph()
    s, a, b = _activation(graph)
    twice = Plan((Decision(s, a, b, Action.PAGE), Decision(s, a, b, Action.PAGE)))
    with pytest.raises(PlanError):
        lower(graph, costs_of(graph), twice)


def test_an_order_that_breaks_dependencies_is_refused() -> None:
    graph = _graph()
    with pytest.raises(PlanError, match="not resident"):
        lower(graph, costs_of(graph), Plan(order=tuple(reversed(range(len(graph.ops))))))


def test_an_order_of_another_length_is_refused() -> None:
    graph = _graph()
    with pytest.raises(PlanError):
        lower(graph, costs_of(graph), Plan(order=tuple(range(len(graph.ops) - 1))))
    with pytest.raises(PlanError):
        lower(graph, costs_of(graph), Plan(order=tuple(range(len(graph.ops) + 1))))


def test_a_budget_below_the_need_names_op_bytes_and_holders() -> None:
    graph = _graph()
    costs = costs_of(graph, base=10_000)
    peak = lower(graph, costs, Plan()).peak_bytes
    with pytest.raises(BudgetError) as caught:
        lower(graph, costs, Plan(ram_bytes=peak - 1))
    error = caught.value
    assert error.needed_bytes == peak
    assert error.limit_bytes == peak - 1
    assert graph.ops[error.op].name in str(error)
    assert [n for _, n in error.holders] == sorted((n for _, n in error.holders), reverse=True)
    assert all(graph.storages[s].nbytes == n for s, n in error.holders)
    assert lower(graph, costs, Plan(ram_bytes=peak)).peak_bytes == peak
    assert error.exit_code == 2
