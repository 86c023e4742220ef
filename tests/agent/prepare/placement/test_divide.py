"""Operators go where the tables say that they take less, and the bundle that comes of it trains with their numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from port_agent.backend import choose
from port_agent.prepare.placement.divide import PlacedJob, PlacementError, measured_links, placed_job
from port_agent.prepare.placement.memories import PlacementMemory
from port_agent.prepare.placement.reference import with_placed_reference
from port_agent.prepare.pools import Pools
from port_agent.training.comparison import MismatchError
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import NO_LIMITS, PLACED_FORMAT
from port_planner.ir.costs import CostTable
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.transfers import transfer_of
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.ir.program import host_bytes_of
from port_planner.make_bundle import CapturedJob
from port_planner.search.plan_problem import judged, pack_answer, pack_problem, plan_in, plan_problem, unpack_problem
from tests.agent.prepare.placement.placed_job import LINKS, WORKSPACE, captured_job, device_costs, tables
from tests.agent.training.options import train_options
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process

PATIENCE_S = 10.0
ROOM = PlacementMemory(Pools(1 << 30, 1 << 30), device_costs())


@pytest.fixture(scope="module")
def captured() -> CapturedJob:
    SimBackend().use_own_bits(True)
    return captured_job()


def divide(captured: CapturedJob, absent: tuple[str, ...] = ()) -> PlacedJob:
    return placed_job(captured, *tables(captured, absent), NAME, LINKS, 1.0, ROOM, time_limit_s=PATIENCE_S)


def test_products_go_to_the_device_and_what_it_lacks_stays(captured: CapturedJob) -> None:
    found = divide(captured, absent=("convolution_backward",))
    graph = captured.graphs["step"]
    where = {op.name.removeprefix("aten::"): kind for op, kind in zip(graph.ops, found.kinds["step"], strict=True)}
    assert where["convolution"] == where["addmm"] == NAME and where["convolution_backward"] == CPU
    assert CPU in found.kinds["step"] and set(found.alone) == {CPU}
    assert found.choice.seconds < found.alone[CPU]
    placed, costs = found.captured.graphs["step"], found.measured.ops[0]
    for i, (op, cost) in enumerate(zip(placed.ops, costs, strict=True)):
        moved = transfer_of(placed, op)
        device = {placed.storages[s].device for s in (*placed.reads[i], *placed.creates[i])}
        if moved is not None:
            target = placed.storages[moved.target]
            link = LINKS.out if target.device == CPU else LINKS.into
            assert cost.seconds == pytest.approx(link.seconds(target.nbytes))
        elif device == {CPU}:
            assert (cost.workspace_bytes, cost.beside_bytes) == (0, WORKSPACE)
        elif device:
            assert (cost.workspace_bytes, cost.beside_bytes) == (WORKSPACE, 0)
    other = found.measured.elsewhere[0]
    assert [cost is None for cost in other] == [
        transfer_of(placed, op) is not None or op.name.endswith("convolution_backward") for op in placed.ops
    ]


def test_weights_lie_in_one_place_for_all_graphs_and_each_has_a_part_on_the_device(captured: CapturedJob) -> None:
    graphs = divide(captured).captured.graphs
    assert set(graphs) == {"step", "step@2", "eval", "eval@1"}
    homes: dict[str, str] = {}
    for graph in graphs.values():
        assert graph.device == NAME
        for s, storage in enumerate(graph.storages):
            if storage.persistent and graph.uses[s]:
                assert homes.setdefault(storage.key, storage.device) == storage.device
    assert set(homes.values()) == {CPU, NAME}


def test_where_one_device_is_as_fast_that_is_said(captured: CapturedJob) -> None:
    on_cpu, _ = tables(captured)
    slow = replace(on_cpu, ops=tuple(tuple(replace(c, seconds=1.0) for c in table) for table in on_cpu.ops))
    with pytest.raises(
        PlacementError, match=r"that saves time was found in 10 s: a step's operators take .* plan with --device cpu"
    ):
        placed_job(captured, on_cpu, slow, NAME, LINKS, 1.0, ROOM, time_limit_s=PATIENCE_S)


def test_links_are_measured() -> None:
    links = measured_links(SimBackend(), 2.0)
    for link in (links.into, links.out):
        assert 0 < link.seconds(4096) < 1.0 and link.joules_per_byte == 2.0 * link.seconds_per_byte


def bundle_of(found: PlacedJob, captured: CapturedJob, path: Path) -> Bundle:
    made = with_placed_reference(found.captured, captured.graphs, found.kinds, NAME)
    costs = dict(zip(made.graphs, found.measured.tables(device_costs()), strict=True))
    plans = {
        name: replace(Plan(), peak_bytes=lower(graph, costs[name], Plan()).peak_bytes)
        for name, graph in made.graphs.items()
    }
    make_bundle.write(path, made, [plans], costs, [1 << 30], threads=1)
    return Bundle(path)


def trained(bundle: Bundle, folder: Path, verify: int = 2) -> tuple[list[float], str]:
    trainer = Trainer(bundle, train_options(folder, folder, epochs=2, verify=verify))
    losses: list[float] = []

    def note(event: Any) -> None:
        losses.append(event.loss)

    try:
        trainer.start()
        trainer.train(note, lambda commit, seconds: None)
        assert trainer.device_excess_bytes == 0, "the simulated device keeps to its cap"
        with pytest.MonkeyPatch.context() as uncapped:
            uncapped.setattr(trainer.backend, "peak_bytes", lambda: trainer._device_limit_bytes + 7)
            assert trainer.device_excess_bytes == 7
        assert trainer.evaluate() is not None
        return losses, trainer.digest()
    finally:
        trainer.close()


def test_the_bundle_trains_with_the_numbers_of_its_operators_one_by_one_each_time(
    captured: CapturedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose._MADE_BY, NAME, SimBackend)
    found = divide(captured)
    bundle = bundle_of(found, captured, tmp_path / "placed.port")
    manifest = bundle.manifest
    assert (manifest.format, manifest.placed, manifest.device_kind) == (PLACED_FORMAT, (CPU, NAME), NAME)
    assert manifest.reference.placed and manifest.reference.losses[0] != captured.reference.losses[0]
    programs = [lower(g, bundle.costs[name], bundle.plans[0][name]) for name, g in bundle.graphs.items()]
    assert manifest.plans[0].peak_bytes == host_bytes_of(programs) >= max(p.beside_bytes for p in programs) > 0
    assert bundle.costs["step"] == CostTable(
        bundle.costs["step"].device, found.measured.ops[0], (), found.measured.elsewhere[0]
    )
    first, second = (trained(bundle, tmp_path / name) for name in ("first", "second"))
    assert first == second and len(first[0]) == 6


def test_another_number_than_the_operators_give_ends_the_training(
    captured: CapturedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose._MADE_BY, NAME, SimBackend)
    bundle = bundle_of(divide(captured), captured, tmp_path / "placed.port")
    device = SimBackend()
    device.use_own_bits(False)
    try:
        with pytest.raises(MismatchError, match="its operators run one at a time on their devices gave"):
            trained(bundle, tmp_path / "state")
    finally:
        device.use_own_bits(True)


@pytest.mark.parametrize(("accumulate", "further"), [(2, 0), (1, 6)])
def test_sums_of_gradients_and_batches_of_several_shapes_are_trained_with_the_numbers_of_their_operators(
    accumulate: int, further: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(choose._MADE_BY, NAME, SimBackend)
    job = captured_job(accumulate, further)
    found = divide(job)
    homes: dict[str, set[str]] = {}
    for graph in found.captured.graphs.values():
        for s, storage in enumerate(graph.storages):
            if storage.persistent and graph.uses[s]:
                homes.setdefault(storage.key, set()).add(storage.device)
    assert {len(where) for where in homes.values()} == {1}
    assert accumulate == 1 or any(key.startswith("gradient/") for key in homes)
    bundle = bundle_of(found, job, tmp_path / "placed.port")
    assert len(bundle.manifest.reference.losses) == 3
    first, second = (trained(bundle, tmp_path / name, verify=3) for name in ("first", "second"))
    assert first == second and len(first[0]) >= 4


def test_a_paired_device_solves_for_a_divided_step_as_this_one_does(captured: CapturedJob) -> None:
    found = divide(captured)
    graph, costs = found.captured.graphs["step"], CostTable(device_costs(), found.measured.ops[0])
    keep = lower(graph, costs, Plan()).peak_bytes
    problem = plan_problem(graph, costs, int(0.8 * keep), "greedy", 1.0, NO_LIMITS)
    there = unpack_problem(pack_problem(problem))
    plan = plan_in(pack_answer(there.solved()))
    assert isinstance(plan, Plan) and judged(problem, plan, same_costs=True).decisions == plan.decisions != ()
