"""Programs of another plan, or with other rooms for packed forms, go on with the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.training import packing_drift
from port_agent.training.programs import Programs
from port_agent.training.step_values import GraphChangedError
from port_agent.training.trainer import StepEvent, Trainer
from port_planner.base.errors import PortError
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.costs import Codec, PackingCost
from port_planner.ir.graph import StepGraph
from port_planner.ir.plan import Action, Decision, Plan
from port_planner.ir.program import idle_gaps
from tests.agent.exactness import packing_costs
from tests.agent.jobs_small import make_job, small_bundle, write_job
from tests.agent.training.options import train_options
from tests.agent.training.trained_job import STEPS, train, trainer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    return train(tmp_path_factory.mktemp("reference"), plan=0)


def test_a_program_is_made_once_for_each_plan() -> None:
    programs = Programs(Bundle(small_bundle()), 0)
    first = programs.of("step")
    assert programs.of("step") is first and programs.peak_bytes >= first.peak_bytes
    programs.use_plan(1)
    assert programs.of("step") is not first
    programs.use_plan(0)
    assert programs.of("step") is first
    with pytest.raises(GraphChangedError, match="no graph 'other'"):
        programs.of("other")


@pytest.mark.slow
def test_a_switch_of_plans_changes_no_bit(tmp_path: Path, reference: tuple[list[float], str]) -> None:
    t = trainer(tmp_path, plan=0)
    t.start()
    t.train(lambda e: t.use_plan(e.step % 2), lambda *_: None)
    assert t.digest() == reference[1]
    with pytest.raises(PortError, match="no plan 7"):
        t.use_plan(7)
    t.close()


# -- data that turns denser than when the plan was made


def _too_small(graph: StepGraph) -> tuple[PackingCost, ...]:
    """Return costs as measured on batches whose activations were all but zero."""
    return tuple(
        replace(cost, reserved_bytes=cost.reserved_bytes // 8)
        for cost in packing_costs(graph)
        if cost.codec is Codec.BITMAP
    )


def _packs(graph: StepGraph, _: int) -> Plan:
    """Return the plan that packs all of those, every other one on its way to flash."""
    versions = {(c.storage, c.version) for c in _too_small(graph)}
    return Plan(
        tuple(
            Decision(s, a, b, Action.PACK if s % 2 else Action.PACK_PAGE)
            for s in sorted({s for s, _ in versions})
            for a, b in idle_gaps(graph, s)
            if (s, sum(w <= a for w in graph.writers[s])) in versions
        )
    )


@pytest.mark.slow
def test_where_tensors_overflow_step_after_step_a_new_plan_goes_on_and_outlives_a_kill(
    reference: tuple[list[float], str], tmp_path: Path
) -> None:
    write_job(tmp_path / "dense.port", make_job(), plan=_packs, packings=_too_small)
    overflows: dict[int, int] = {}
    reasons: list[str] = []

    def run(steps: int) -> Trainer:
        t = Trainer(Bundle(tmp_path / "dense.port"), train_options(tmp_path / "state", tmp_path, 1, steps))

        def on_step(event: StepEvent) -> None:
            overflows[event.step] = len(event.report.packing.overflows)
            reasons.append(t.programs.adapt())

        t.start()
        t.train(on_step, lambda *_: None)
        return t

    run(5).close()  # what was found out is committed with the step
    assert (
        all(overflows[step] for step in (1, 2))
        and [bool(reason) for reason in reasons] == [False] * 2 + [True] + [False] * 2
    )
    again = run(STEPS)
    whole = [
        step for step in range(4, STEPS + 1) if step % again.batching.per_epoch
    ]  # the short batch has a plan of its own
    assert whole and not any(overflows[step] for step in whole), overflows
    assert "denser than when the plan was made" in reasons[2] and not any(reasons[5:])
    assert again.digest() == reference[1]
    again.close()


def _too_roomy(graph: StepGraph) -> tuple[PackingCost, ...]:
    """Return costs as measured on batches without a zero."""
    return tuple(cost for cost in packing_costs(graph) if cost.codec is Codec.BITMAP and cost.storage % 3)


def _packs_and_pages(graph: StepGraph, _: int) -> Plan:
    """Return the plan that packs what ReLU made, and keeps on flash what else could be packed."""
    versions = {(c.storage, c.version) for c in _too_roomy(graph)}
    zeros = {s for i, op in enumerate(graph.ops) if op.name == "aten::relu" for s in graph.creates[i]}
    return Plan(
        tuple(
            Decision(s, a, b, Action.PACK if s in zeros else Action.PAGE)
            for s in sorted({s for s, _ in versions})
            for a, b in idle_gaps(graph, s)
            if (s, sum(w <= a for w in graph.writers[s])) in versions
        )
    )


@pytest.mark.slow
def test_where_room_stays_unused_for_long_a_new_plan_pages_less(
    reference: tuple[list[float], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_drift, "SPARSE_STEPS", 3)
    write_job(tmp_path / "sparse.port", make_job(), plan=_packs_and_pages, packings=_too_roomy)
    t = Trainer(Bundle(tmp_path / "sparse.port"), train_options(tmp_path / "state", tmp_path, 1, STEPS))
    before, reasons = t.programs.of("step").written_bytes, list[str]()
    t.start()
    t.train(lambda _: reasons.append(t.programs.adapt()), lambda *_: None)
    assert t.programs.of("step").written_bytes < before
    assert [reason for reason in reasons if reason] and not any(reasons[:2]), reasons
    assert "sparser than when the plan was made" in "".join(reasons)
    assert t.digest() == reference[1]
    t.close()
