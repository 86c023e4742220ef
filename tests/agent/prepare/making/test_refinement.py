"""Which trials are run, and what no plan can be tried in."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from port_agent.prepare.making import refinement
from port_agent.prepare.measurement.dry_run import DryRun
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import ExpectedResults
from port_planner.ir.lowering.lower import lower
from port_planner.ir.plan import Plan
from port_planner.job import Bucket
from port_planner.make_bundle import InfeasibleError
from tests.agent.prepare.making.small_bundles import HOST, MIB, SEEN, classifier, fake_trials, shallow, small_made
from tests.planner.steps import costs_of


@pytest.mark.parametrize(("slower", "steps"), [(1.0, [2]), (1e6, [1, 2])])
def test_what_ran_as_planned_runs_no_more_and_where_steps_are_slow_the_first_trial_runs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, steps: list[int]
) -> None:
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    ops = tuple(replace(cost, seconds=slower * max(cost.seconds, 1e-6)) for cost in costs.ops)
    run: list[int] = []

    def dry_run(bundle_file: Path, *_: object, steps: int, **__: object) -> DryRun:
        run.append(steps)
        return DryRun(Bundle(bundle_file).manifest.plans[0].peak_bytes)

    fake_trials(monkeypatch, dry_run)
    small_made(tmp_path / "job.port", captured, 64 << 20, ops=ops)
    assert run == steps


@pytest.mark.slow
def test_the_first_trial_does_not_run_all_shapes_and_tells_what_packing_takes_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one runs them all.

    Of a shape that was not run, the next larger one's tensors tell, as far as they are no smaller.
    """
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    data = [torch.randn(4096, 256), torch.randint(0, 10, (4096,))]
    buckets = [Bucket([column[:rows] for column in data], rows) for rows in (1536, 1024)]
    captured = make_bundle.prepare(classifier(model, data, 2048, buckets))
    captured = replace(captured, reference=ExpectedResults(("0x1p+0",) * 4, 1, "", {}))
    graphs, costs = captured.graphs, [costs_of(graph) for graph in captured.graphs.values()]
    assert [*graphs] == ["step", "step#1", "step#2"]
    place = next(s for s, storage in enumerate(graphs["step"].storages) if storage.nbytes == 2048 * 256 * 4)
    seen = replace(SEEN, storage=place, reserved_bytes=1 << 20)
    run: list[int] = []
    compares: list[int] = []

    def dry_run(bundle_file: Path, *_: object, steps: int, compared: int, probe_packing: bool, **__: object) -> DryRun:
        run.append(steps)
        compares.append(compared)
        return DryRun(
            Bundle(bundle_file).manifest.plans[0].peak_bytes, packings={"step": (seen,)} if probe_packing else {}
        )

    fake_trials(monkeypatch, dry_run)
    kept = lower(graphs["step"], costs[0], Plan()).peak_bytes
    path = tmp_path / "job.port"
    small_made(path, captured, int(0.75 * kept))
    assert (run[0], compares[0]) == (2, 0) and (run[-1], compares[-1]) == (4, 4)
    found = [table.packings[0] for table in Bundle(path).costs.values()]
    assert [one.pack_seconds for one in found] == pytest.approx([1e-3, 0.75e-3, 0.5e-3])
    assert found[0].reserved_bytes > found[1].reserved_bytes > found[2].reserved_bytes >= 1 << 19


def test_no_budget_is_below_what_loading_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, path = shallow(), tmp_path / "job.port"
    for ram_bytes, alone, with_bundle in ((1 << 10, 240 << 20, 0), (64 << 20, 0, 240 << 20)):
        dry_run = DryRun(32 << 20, start_bytes=with_bundle)
        monkeypatch.setattr(refinement, "loading_peak", lambda alone=alone: alone)
        fake_trials(monkeypatch, lambda *_, dry_run=dry_run, **__: dry_run)
        with pytest.raises(InfeasibleError, match=r"loading Python and torch takes 240\.0 MiB") as caught:
            small_made(path, captured, ram_bytes)
        assert caught.value.needed_bytes is not None and caught.value.needed_bytes > 240 << 20
        assert not path.exists()


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_operators_on_the_cpu_that_take_more_than_the_hosts_budget_are_named(tmp_path: Path) -> None:
    captured = shallow()
    costs = costs_of(captured.graphs["step"])
    device = replace(costs.device, scratch_targets=(HOST,), host_base_bytes=80 * MIB)
    with pytest.raises(InfeasibleError, match=r"operators that run on the CPU.*take 80\.0 MiB.*without --place"):
        small_made(
            tmp_path / "job.port",
            replace(captured, placed=("cpu", "sim")),
            64 * MIB,
            device=device,
            device_bytes=4 * MIB,
        )
