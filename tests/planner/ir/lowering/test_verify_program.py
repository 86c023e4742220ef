"""The verifier refuses programs from which an instruction is missing, or stands in the wrong place; the
lowering makes none of those.
"""

import functools
import importlib.util
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.models import DEMO_SCRIPT
from port_planner.capture.step import capture_step
from port_planner.ir.graph import StepGraph
from port_planner.ir.lowering.lower import lower
from port_planner.ir.lowering.verify_program import verify_lowered
from port_planner.ir.plan import Action, Plan
from port_planner.ir.program import BudgetError, Code, PlanError, Program
from port_planner.problem.reorder import dependencies
from port_planner.tiling import tiles
from port_planner.tiling.chains import find_chains
from port_planner.tiling.tiles import tile_chains
from tests.agent.exactness import flat_costs, random_plan
from tests.planner.steps import tiny_step


def _programs(count: int) -> list[Program]:
    graph = tiny_step("SGD").graphs["step"]
    plans = [random_plan(graph, seed, pack=0.6) for seed in range(1, count)]
    return [lower(graph, flat_costs(graph), plan) for plan in (Plan(), *plans)]


@pytest.mark.slow
def test_programs_of_random_plans_are_in_order() -> None:
    for program in _programs(12):
        verify_lowered(program)


NOT_ALWAYS = (Code.RUN, Code.RERUN, Code.FREE, Code.PACK, Code.UNPACK)
"""Without one of these contents may be old or there for too long, which is not followed, and what is
not packed is read whole.
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for code in Code if code not in NOT_ALWAYS])
def test_a_missing_instruction_is_named(code: Code) -> None:
    """But for a wait that the step before may have made needless."""
    found = 0
    for program in _programs(8):
        for number, instruction in enumerate(program.instructions):
            cross_step = code is Code.WAIT_WRITE and instruction.index in program.cross_step
            if instruction.code is code and not cross_step:
                found += 1
                rest = (*program.instructions[:number], *program.instructions[number + 1 :])
                with pytest.raises(PlanError, match="the lowering is wrong, report this"):
                    verify_lowered(replace(program, instructions=rest))
    assert found


def test_what_is_read_after_it_was_freed_is_named() -> None:
    program = _programs(1)[0]
    first = next(n for n, x in enumerate(program.instructions) if x.code is Code.FREE)
    freed = program.instructions[first].index
    use = max(n for n in range(first) if program.instructions[n].code is Code.RUN)
    swapped = list(program.instructions)
    swapped.insert(use, swapped.pop(first))
    with pytest.raises(PlanError, match=rf"storage {freed} .*which is not resident; the lowering is wrong"):
        verify_lowered(replace(program, instructions=tuple(swapped)))


@functools.cache
def demo_step() -> StepGraph:
    """Return the demo's step with its two kinds of dropout, small."""
    spec = importlib.util.spec_from_file_location("small_demo", DEMO_SCRIPT)
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.LENGTH, demo.WIDTH, demo.LAYERS, demo.HEADS = 32, 48, 2, 2
    torch.manual_seed(0)
    model = demo.CharTransformer(65)
    batch = torch.randint(0, 65, (8, 32)), torch.randint(0, 65, (8, 32))
    return capture_step(model, demo.loss_fn, torch.optim.AdamW(model.parameters()), batch).graphs["step"]


def _shuffled(graph: StepGraph, rng: random.Random) -> StepGraph:
    """Return the graph in another order that its operators' dependencies allow."""
    before = dependencies(graph)
    done: dict[int, None] = {}
    while len(done) < len(graph.ops):
        ready = [i for i in range(len(graph.ops)) if i not in done and before[i] <= done.keys()]
        done[ready[0] if rng.random() < 0.8 else rng.choice(ready)] = None
    return graph.reordered(tuple(done))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "in_tiles"),
    [
        pytest.param(range(2), False, id="few, whole"),
        pytest.param(range(2, 150), False, id="many, whole", marks=pytest.mark.long),
        pytest.param(range(50), True, id="many, in tiles", marks=pytest.mark.long),
    ],
)
def test_programs_of_random_plans_of_a_transformer_are_in_order(
    seeds: range, in_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs verify with memory to spare and in the least that they need, each in its own order."""
    monkeypatch.setattr(tiles, "SPLIT_BYTES", 40_000)
    graph = demo_step()
    if in_tiles:
        graph = tile_chains(graph, find_chains(graph, 40_000), 4).graph
        assert len(graph.ops) > len(demo_step().ops)
    decided: Counter[Action] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        ordered = _shuffled(graph, rng) if seed % 2 else graph
        costs = flat_costs(ordered, workspace=1 << 12)
        plan = random_plan(
            ordered, seed, page=rng.random() / 2, recompute=0.05 if in_tiles else 0.15, slices=rng.random(), pack=0.6
        )
        decided.update(d.action for d in plan.decisions)
        verify_lowered(lower(ordered, costs, plan))
        with pytest.raises(BudgetError) as least:
            lower(ordered, costs, replace(plan, ram_bytes=1))
        tight = lower(ordered, costs, replace(plan, ram_bytes=least.value.needed_bytes))
        verify_lowered(tight)
        assert tight.peak_bytes <= least.value.needed_bytes
    assert decided.keys() == set(Action)
