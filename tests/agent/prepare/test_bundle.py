"""Costs of this machine, and what a trial step teaches about them."""

import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import nn
from torch.nn import functional

from agent.energy.sources.estimated import PowerModel
from agent.prepare import bundle
from agent.prepare.pools import with_host_room
from agent.worker.protocol import StepDone, TrainingFinished, WorkerReady
from planner import make_bundle
from planner.ir.bundle import writer
from planner.ir.bundle.bundle import TENSOR_MEMBERS, Bundle, Manifest, PlannedLimits, Reference
from planner.ir.bundle.safetensors_io import Chunks
from planner.ir.costs import Codec, DeviceCosts, Flash, OpCost, PackingCost
from planner.ir.lowering.lower import lower
from planner.ir.plan import Plan
from planner.job import Bucket, TrainingJob
from planner.profiling.operators import Measured
from tests.planner.bundles import read_everything
from tests.planner.steps import costs_of


def step_event(*, wall_s: float, stall_s: float, cpu_s: float, planned_compute_s: float) -> StepDone:
    return StepDone(
        step=1, epoch=0, loss=0.5, wall_s=wall_s, cpu_s=cpu_s, phases_s={"stall": stall_s},
        planned_compute_s=planned_compute_s,
    )  # fmt: skip


def test_pace_leaves_out_waiting_and_on_one_thread_what_other_processes_took() -> None:
    disturbed = step_event(wall_s=5.0, stall_s=1.0, cpu_s=3.0, planned_compute_s=2.0)
    assert bundle._pace(disturbed, threads=1) == 1.5
    assert bundle._pace(disturbed, threads=4) == 2.0
    busy_page_thread = step_event(wall_s=2.2, stall_s=0.2, cpu_s=2.5, planned_compute_s=2.0)
    assert bundle._pace(busy_page_thread, threads=1) == 1.0


def test_measured_at_a_pace_takes_longer_and_more_energy_but_no_more_memory() -> None:
    measured = Measured(((OpCost(1.0, 64, 4.0), OpCost(0.0, 0, 0.0)),), 10, 1)
    assert measured.at_pace(1.5) == Measured(((OpCost(1.5, 64, 6.0), OpCost(0.0, 0, 0.0)),), 10, 1)


def test_operators_that_memory_holds_up_are_priced_at_their_own_watts(prepared: make_bundle.Prepared) -> None:
    graph = prepared.graphs["step"]
    measured = Measured((tuple(OpCost(1.0, 0, 4.0) for _ in graph.ops),), 0, 0)
    power = PowerModel("board", 2.0, 6.0, moving_share=0.5)
    (ops,) = bundle.by_class({"step": graph}, measured, power).ops
    for op, cost in zip(graph.ops, ops, strict=True):
        assert cost.joules == (4.0 if "mm" in op.name else 2.0), op.name
    assert bundle.by_class({"step": graph}, measured, replace(power, moving_share=1.0)) == measured


@pytest.fixture
def prepared() -> make_bundle.Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = [torch.randn(16, 64), torch.randint(0, 10, (16,))]
    return make_bundle.prepare(
        TrainingJob(
            model, lambda m, x, y: functional.cross_entropy(m(x), y),
            torch.optim.SGD(model.parameters(), lr=0.1), data, 8,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("pace", "believed"), [(1.3, 1.3), (0.8, 0.8), (3.0, 1.0)])
def test_a_bundle_is_priced_at_the_pace_of_its_trial(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: float, believed: float
) -> None:
    costs = costs_of(prepared.graphs["step"])
    measured = Measured((costs.ops,), 0, 0)
    peak = 64 << 20
    monkeypatch.setattr(bundle, "trial", lambda *_: bundle._Trial(peak, pace=pace))
    device: DeviceCosts = costs.device
    for estimated in (False, True):
        path = tmp_path / f"{estimated}.port"
        bundle.make(
            path, prepared, measured, device, 2 * peak, page_dir=tmp_path, threads=1, progress=lambda *_: None,
            planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0), estimated=estimated,
        )  # fmt: skip
        factor = 1.0 if estimated else believed
        assert [c.seconds for c in Bundle(path).costs["step"].ops] == pytest.approx(
            [c.seconds * factor for c in costs.ops]
        )


SEEN = PackingCost(3, 1, Codec.BITMAP, 4, 0.5, 1 << 17, 1e-3, 3e-3, 0.0)


@pytest.mark.parametrize(("estimated", "slower"), [(False, 1.0), (True, 4.0)])
def test_what_the_first_trial_sees_of_packing_is_priced_for_the_plans_that_follow(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimated: bool, slower: float
) -> None:
    """The seconds of a board that is not at hand are as much longer as its operators' are."""
    costs, probed = costs_of(prepared.graphs["step"]), list[bool]()

    def trial(*arguments: object) -> bundle._Trial:
        probed.append(bool(arguments[5]))
        return bundle._Trial(1 << 20, pace=1 / slower, packings={"step": (SEEN,)} if arguments[5] else {})

    monkeypatch.setattr(bundle, "trial", trial)
    path = tmp_path / "job.port"
    bundle.make(
        path, prepared, Measured((costs.ops,), 0, 0), costs.device, 64 << 20, page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
        estimated=estimated,
    )  # fmt: skip
    assert probed[0] and not any(probed[1:])
    (found,) = Bundle(path).costs["step"].packings
    assert (found.pack_seconds, found.unpack_seconds) == pytest.approx((slower * 1e-3, slower * 3e-3))
    assert found.joules == pytest.approx(found.seconds * costs.device.compute_watts)
    assert replace(found, pack_seconds=1e-3, unpack_seconds=3e-3, joules=0.0) == SEEN


def test_a_trial_looks_at_the_tensors_of_real_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    data = [torch.randn(512, 64), torch.randint(0, 10, (512,))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = TrainingJob(model, lambda m, x, y: functional.cross_entropy(m(x), y), optimizer, data, 256)
    made = make_bundle.prepare(job)
    costs = costs_of(made.graphs["step"])
    path = tmp_path / "job.port"
    make_bundle.write(path, made, [{"step": Plan()}], {"step": costs}, [1 << 40], threads=1)
    found = bundle.trial(path, (tmp_path,), 1, None, 0, True).packings
    relu = next(i for i, op in enumerate(made.graphs["step"].ops) if op.name.startswith("aten::relu"))
    assert set(found) == {"step"} and relu in {made.graphs["step"].writers[c.storage][-1] for c in found["step"]}
    assert all(c.codec is Codec.BITMAP and 0.3 < c.density < 0.7 and c.seconds > 0 for c in found["step"])
    assert not bundle.trial(path, (tmp_path,), 1).packings, "only when asked"


def test_a_trial_counts_what_huge_pages_may_still_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        WorkerReady(pid=1, step=0, total_steps=2, plan=0, planned_peak_bytes=300, resident_bytes=50, start_peak_bytes=60),
        replaced(step_event(wall_s=1.0, stall_s=0.0, cpu_s=1.0, planned_compute_s=1.0), peak_rss_bytes=300),
        TrainingFinished(step=2, peak_rss_bytes=310, untouched_block_bytes=7),
    ]  # fmt: skip
    ended = SimpleNamespace(events=lambda: iter(told), process=SimpleNamespace(returncode=0))
    monkeypatch.setattr(bundle, "start_worker", lambda *_, **__: ended)
    assert bundle.trial(tmp_path / "job.port", (tmp_path,), 1).peak_bytes == 317


def test_a_slower_medium_takes_longer_and_more_joules_per_byte() -> None:
    flash = Flash("flash", 1e9, 1e9, 1e-4, 3e-9, 3e-9)
    device = DeviceCosts("here", 0, 2.0, 4.0, flash)
    assert bundle.slower_flash(device, None, 2e9) == device
    slow = bundle.slower_flash(device, 45e6, 25e6).flash
    assert (slow.read_bytes_per_s, slow.write_bytes_per_s) == (45e6, 25e6)
    assert slow.read_joules_per_byte - flash.read_joules_per_byte == pytest.approx(0.15 / 45e6 - 2e-9)
    assert slow.write_joules_per_byte - flash.write_joules_per_byte == pytest.approx(0.15 / 25e6 - 2e-9)


def test_pages_are_packed_where_the_medium_is_slow_enough_for_that_to_save_time() -> None:
    flash = Flash("flash", 5e9, 5e9, 1e-4, 3e-9, 3e-9, 1e12, 1e-6)
    weights = [0.02 * torch.randn(1 << 19), torch.zeros(10)]
    fast = DeviceCosts("here", 0, 2.0, 4.0, flash)
    assert bundle.with_packed_pages(fast, weights) == fast, "an SSD takes pages faster than a core packs them"
    card = bundle.slower_flash(fast, 10e6, 5e6)
    slow = bundle.with_packed_pages(replace(card, scratch_targets=(flash,)), weights)
    assert slow.flash.packs_pages and not slow.scratch_targets[0].packs_pages
    for then, now in ((10e6, slow.flash.read_bytes_per_s), (5e6, slow.flash.write_bytes_per_s)):
        assert 1.05 * then < now < 1.25 * then
    assert slow.flash.wear_joules_per_byte < 0.9e-6 and slow.flash.endurance_bytes > 1.1e12
    assert bundle.with_packed_pages(card, weights[1:]) == card, "nothing to measure it on"


def test_no_budget_is_below_what_loading_takes(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(prepared.graphs["step"])
    path = tmp_path / "job.port"

    for ram_bytes, alone, with_bundle in ((1 << 10, 240 << 20, 0), (64 << 20, 0, 240 << 20)):
        trial = bundle._Trial(32 << 20, start_bytes=with_bundle)
        monkeypatch.setattr(bundle, "loading_peak", lambda alone=alone: alone)
        monkeypatch.setattr(bundle, "trial", lambda *_, trial=trial: trial)
        with pytest.raises(make_bundle.InfeasibleError, match=r"loading Python and torch takes 240\.0 MiB") as caught:
            bundle.make(
                path, prepared, Measured((costs.ops,), 0, 0), costs.device, ram_bytes, page_dir=tmp_path, threads=1,
                progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
            )  # fmt: skip
        assert caught.value.needed_bytes is not None and caught.value.needed_bytes > 240 << 20
        assert not path.exists()


@pytest.mark.parametrize(("unplanned", "leaves_room"), [(900 << 10, True), (1 << 40, False)])
def test_a_refusal_says_what_a_trial_found_beside_the_step_if_that_leaves_room(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplanned: int, leaves_room: bool
) -> None:
    costs = costs_of(prepared.graphs["step"])
    monkeypatch.setattr(bundle, "loading_peak", lambda: 0)
    monkeypatch.setattr(
        bundle, "trial", lambda draft, *_: bundle._Trial(Bundle(draft).manifest.plans[0].peak_bytes + unplanned)
    )
    with pytest.raises(make_bundle.InfeasibleError) as refused:
        bundle.make(
            tmp_path / "job.port", prepared, Measured((costs.ops,), 0, 0), costs.device, 1 << 20, page_dir=tmp_path,
            threads=1, progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
        )  # fmt: skip
    assert refused.value.base_bytes == (costs.device.base_bytes + unplanned if leaves_room else None)


def test_weights_and_data_are_written_once_whatever_the_trials_find(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(prepared.graphs["step"])
    budget = 64 << 20
    unplanned = iter([8 << 20, 4 << 20, 2 << 20, 0])
    tried: list[int] = []
    written: list[str] = []
    write_tensors = writer._write_tensors

    def counted(archive: zipfile.ZipFile, name: str, tensors: Mapping[str, Chunks]) -> str:
        written.append(name)
        return write_tensors(archive, name, tensors)

    def trial(draft: Path, *_: object) -> bundle._Trial:
        planned = Bundle(draft).manifest.plans[0].peak_bytes
        tried.append(planned)
        return bundle._Trial(planned + next(unplanned))

    monkeypatch.setattr(writer, "_write_tensors", counted)
    monkeypatch.setattr(bundle, "trial", trial)
    path = tmp_path / "job.port"
    bundle.make(
        path, prepared, Measured((costs.ops,), 0, 0), costs.device, budget, page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
    )  # fmt: skip
    assert len(tried) == 4 and tried == sorted(tried)
    assert sorted(written) == sorted(TENSOR_MEMBERS), "each member once"
    read_everything(Bundle(path))
    assert [p.name for p in tmp_path.iterdir()] == ["job.port"]


@pytest.mark.parametrize(("slower", "steps"), [(1.0, [2]), (1e6, [1, 2])])
def test_what_ran_as_planned_runs_no_more_and_where_steps_are_slow_the_first_trial_runs_one(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, steps: list[int]
) -> None:
    costs = costs_of(prepared.graphs["step"])
    ops = tuple(replace(cost, seconds=slower * max(cost.seconds, 1e-6)) for cost in costs.ops)
    run: list[int] = []

    def trial(draft: Path, *arguments: Any) -> bundle._Trial:
        run.append(arguments[-1])
        return bundle._Trial(Bundle(draft).manifest.plans[0].peak_bytes)

    monkeypatch.setattr(bundle, "trial", trial)
    bundle.make(
        tmp_path / "job.port", prepared, Measured((ops,), 0, 0), costs.device, 64 << 20, page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
    )  # fmt: skip
    assert run == steps


def test_the_first_trial_does_not_run_all_shapes_and_tells_what_packing_takes_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one runs them all. Of a shape that was not run, the next larger one's tensors tell, as far as they are no smaller."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    data = [torch.randn(4096, 256), torch.randint(0, 10, (4096,))]
    job = TrainingJob(
        model, lambda m, x, y: functional.cross_entropy(m(x), y), torch.optim.SGD(model.parameters(), lr=0.1), data, 2048,
        buckets=[Bucket([column[:rows] for column in data], rows) for rows in (1536, 1024)],
    )  # fmt: skip
    prepared = make_bundle.prepare(job)
    prepared = replace(prepared, reference=Reference(("0x1p+0",) * 4, 1, "", {}))
    graphs, costs = prepared.graphs, [costs_of(graph) for graph in prepared.graphs.values()]
    assert [*graphs] == ["step", "step#1", "step#2"]
    place = next(s for s, storage in enumerate(graphs["step"].storages) if storage.nbytes == 2048 * 256 * 4)
    seen = replace(SEEN, storage=place, reserved_bytes=1 << 20)
    run: list[int] = []

    def trial(draft: Path, *arguments: Any) -> bundle._Trial:
        run.append(arguments[-1])
        return bundle._Trial(
            Bundle(draft).manifest.plans[0].peak_bytes, packings={"step": (seen,)} if arguments[-2] else {}
        )

    monkeypatch.setattr(bundle, "trial", trial)
    kept = lower(graphs["step"], costs[0], Plan()).peak_bytes
    path = tmp_path / "job.port"
    bundle.make(
        path, prepared, Measured(tuple(c.ops for c in costs), 0, 0), costs[0].device, int(0.75 * kept), page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
    )  # fmt: skip
    assert run[0] == 2 and run[-1] == 4
    found = [table.packings[0] for table in Bundle(path).costs.values()]
    assert [one.pack_seconds for one in found] == pytest.approx([1e-3, 0.75e-3, 0.5e-3])
    assert found[0].reserved_bytes > found[1].reserved_bytes > found[2].reserved_bytes >= 1 << 19


HOST = Flash("host memory", 1e10, 1e10, 1e-6, 1e-11, 1e-11, capacity_bytes=0)
MIB = 1 << 20


def test_two_pools_are_each_corrected_by_their_own_trial(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full device is reserved more of for gaps; the host's unplanned bytes are taken off the room for pages."""
    costs = costs_of(prepared.graphs["step"])
    device = with_host_room(
        replace(costs.device, base_bytes=MIB, scratch_targets=(HOST,), host_base_bytes=20 * MIB), 64 * MIB
    )
    seen: list[tuple[int, int]] = []

    def trial(draft: Path, *_: object) -> bundle._Trial:
        found = Bundle(draft)
        planned, here = found.manifest.plans[0], found.costs["step"].device
        seen.append((here.base_bytes, here.host_base_bytes))
        assert here.host is not None and here.host.capacity_bytes == 64 * MIB - here.host_base_bytes
        assert (planned.ram_bytes, planned.device_ram_bytes) == (64 * MIB, 4 * MIB)
        tries = len(seen)
        if tries == 1:
            return bundle._Trial(30 * MIB, device_full=True)
        host = planned.peak_bytes + (10 * MIB if tries == 2 else 0)
        return bundle._Trial(host, device_peak_bytes=planned.device_peak_bytes + (MIB // 2 if tries == 3 else 0))

    monkeypatch.setattr(bundle, "trial", trial)
    path = tmp_path / "job.port"
    found = bundle.make(
        path, prepared, Measured((costs.ops,), 0, 0), device, 64 * MIB, device_bytes=4 * MIB, page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
    )  # fmt: skip
    quarter = 4 * MIB // 16
    assert seen == [
        (MIB, 20 * MIB), (MIB + quarter, 20 * MIB), (MIB + quarter, 30 * MIB), (MIB + quarter + MIB // 2, 30 * MIB),
    ]  # fmt: skip
    first = found.manifest.plans[0]
    assert (found.measured_peak_bytes, found.measured_device_bytes) == (first.peak_bytes, first.device_peak_bytes)
    assert {plan.ram_bytes for plan in found.manifest.plans} == {64 * MIB}


def test_a_device_that_stays_full_is_said_with_its_own_option(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(prepared.graphs["step"])
    device = with_host_room(replace(costs.device, scratch_targets=(HOST,)), 64 * MIB)
    monkeypatch.setattr(bundle, "trial", lambda *_: bundle._Trial(MIB, device_full=True))
    with pytest.raises(make_bundle.InfeasibleError, match=r"within 4\.0 MiB.*raise --gpu-ram to 4\.2 MiB"):
        bundle.make(
            tmp_path / "job.port", prepared, Measured((costs.ops,), 0, 0), device, 64 * MIB, device_bytes=4 * MIB,
            page_dir=tmp_path, threads=1, progress=lambda *_: None,
            planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
        )  # fmt: skip


def test_a_bundle_that_was_there_stays_where_no_plan_fits(
    prepared: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(prepared.graphs["step"])
    path = tmp_path / "job.port"
    path.write_bytes(b"made before")
    monkeypatch.setattr(bundle, "trial", lambda *_: bundle._Trial(1 << 40))
    with pytest.raises(make_bundle.InfeasibleError):
        bundle.make(
            path, prepared, Measured((costs.ops,), 0, 0), costs.device, 1 << 20, page_dir=tmp_path, threads=1,
            progress=lambda *_: None, planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
        )  # fmt: skip
    assert path.read_bytes() == b"made before"
    assert [p.name for p in tmp_path.iterdir()] == ["job.port"]


@pytest.fixture
def deep() -> make_bundle.Prepared:
    """Return a job whose step has room for decisions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 10))
    data = [torch.randn(2048, 64), torch.randint(0, 10, (2048,))]
    return make_bundle.prepare(
        TrainingJob(
            model, lambda m, x, y: functional.cross_entropy(m(x), y),
            torch.optim.SGD(model.parameters(), lr=0.1), data, 1024,
        )
    )  # fmt: skip


@pytest.mark.parametrize("unplanned", [0, 1 << 22])
def test_the_first_plan_costs_no_more_than_those_for_smaller_budgets(
    deep: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unplanned: int
) -> None:
    """Each of them is a plan for the whole budget, too: one that takes in its trial what was planned is the first then."""
    costs = costs_of(deep.graphs["step"])
    budget = int(0.8 * lower(deep.graphs["step"], costs, Plan()).peak_bytes)
    ran: list[Plan] = []

    def trial(draft: Path, *_: object) -> bundle._Trial:
        ran.append(Bundle(draft).plans[0]["step"])
        more = 0 if len(ran) <= 2 else unplanned
        return bundle._Trial(Bundle(draft).manifest.plans[0].peak_bytes + more)

    monkeypatch.setattr(bundle, "trial", trial)
    made = bundle.make(
        tmp_path / "job.port", deep, Measured((costs.ops,), 0, 0), costs.device, budget, page_dir=tmp_path, threads=1,
        progress=lambda *_: None, planner=make_bundle.default_planner(strategy="page-all", time_limit_s=1.0),
    )  # fmt: skip
    first, *smaller = made.manifest.plans
    dearer = [plan for plan in smaller if plan.overhead_joules < first.overhead_joules]
    assert ran[1].strategy == "page-all" and len(ran) == 3
    if unplanned:
        assert first.strategy == "page-all" and dearer, "no trial showed that the others take what they say"
    else:
        assert first.strategy == "greedy" and not dearer
    assert Bundle(tmp_path / "job.port").plans[0]["step"].decisions == ran[1 if unplanned else 2].decisions
    assert first.ram_bytes == budget


def test_a_bundle_keeps_its_limits_and_its_smaller_plans_keep_to_them(
    deep: make_bundle.Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of(deep.graphs["step"])
    measured = Measured((costs.ops,), 0, 0)
    monkeypatch.setattr(bundle, "trial", lambda draft, *_: bundle._Trial(Bundle(draft).manifest.plans[0].peak_bytes))

    def made(limits: PlannedLimits, planner_limits: PlannedLimits) -> Manifest:
        found = bundle.make(
            tmp_path / "job.port", deep, measured, costs.device, 1 << 23, page_dir=tmp_path, threads=1,
            progress=lambda *_: None, limits=limits, wide=True,
            planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0, limits=planner_limits),
        )  # fmt: skip
        return found.manifest

    limits = PlannedLimits(step_s=1e9, written_bytes=0, deadline_at=4e9, charging=("22:00", "07:00"))
    kept = made(limits, limits)
    assert kept.limits == Bundle(tmp_path / "job.port").manifest.limits == limits
    assert len(kept.plans) > 1 and all(plan.written_bytes == 0 for plan in kept.plans)
    late = made(replace(limits, step_s=1e-12), replace(limits, step_s=None))
    assert len(late.plans) == len(kept.plans), "late is better than not at all"


def test_operators_on_the_cpu_that_take_more_than_the_hosts_budget_are_named(
    prepared: make_bundle.Prepared, tmp_path: Path
) -> None:
    costs = costs_of(prepared.graphs["step"])
    device = replace(costs.device, scratch_targets=(HOST,), host_base_bytes=80 * MIB)
    with pytest.raises(
        make_bundle.InfeasibleError, match=r"operators that run on the CPU.*take 80\.0 MiB.*without --place"
    ):
        bundle.make(
            tmp_path / "job.port", replace(prepared, placed=("cpu", "sim")), Measured((costs.ops,), 0, 0), device, 64 * MIB,
            device_bytes=4 * MIB, page_dir=tmp_path, threads=1, progress=lambda *_: None,
            planner=make_bundle.default_planner(strategy="greedy", time_limit_s=1.0),
        )  # fmt: skip
