"""What a run of a bundle's first steps tells."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import nn

from port_agent.prepare.measurement import dry_run as trials
from port_agent.worker.protocol import StepDone, TrainingFailed, TrainingFinished, WorkerReady
from port_agent.worker.start import Worker, start_worker
from port_planner import make_bundle
from port_planner.base.errors import ExitCode
from port_planner.ir.costs import Codec
from port_planner.ir.plan import Plan
from tests.agent.prepare.making.small_bundles import classifier
from tests.planner.steps import costs_of


def step_event(*, wall_s: float, stall_s: float, cpu_s: float, planned_compute_s: float) -> StepDone:
    return StepDone(
        step=1,
        epoch=0,
        loss=0.5,
        wall_s=wall_s,
        cpu_s=cpu_s,
        phases_s={"stall": stall_s},
        planned_compute_s=planned_compute_s,
    )


def test_pace_leaves_out_waiting_and_on_one_thread_what_other_processes_took() -> None:
    disturbed = step_event(wall_s=5.0, stall_s=1.0, cpu_s=3.0, planned_compute_s=2.0)
    assert trials._pace(disturbed, threads=1) == 1.5
    assert trials._pace(disturbed, threads=4) == 2.0
    busy_page_thread = step_event(wall_s=2.2, stall_s=0.2, cpu_s=2.5, planned_compute_s=2.0)
    assert trials._pace(busy_page_thread, threads=1) == 1.0


@pytest.mark.process
def test_a_trial_looks_at_the_tensors_of_real_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    data = [torch.randn(512, 64), torch.randint(0, 10, (512,))]
    made = make_bundle.prepare(classifier(model, data, 256))
    costs = costs_of(made.graphs["step"])
    path = tmp_path / "job.port"
    make_bundle.write(path, made, [{"step": Plan()}], {"step": costs}, [1 << 40], threads=1)
    found = trials.DryRunWorkers(1).dry_run(path, (tmp_path,), probe_packing=True).packings
    relu = next(i for i, op in enumerate(made.graphs["step"].ops) if op.name.startswith("aten::relu"))
    assert set(found) == {"step"} and relu in {made.graphs["step"].writers[c.storage][-1] for c in found["step"]}
    assert all(c.codec is Codec.BITMAP and 0.3 < c.density < 0.7 and c.seconds > 0 for c in found["step"])
    assert not trials.DryRunWorkers(1).dry_run(path, (tmp_path,)).packings, "only when asked"


def worker_that_ended(on_line: list[Any], code: int) -> SimpleNamespace:
    process = SimpleNamespace(returncode=code, poll=lambda: code)
    return SimpleNamespace(events=lambda: iter(on_line), process=process, send=lambda _: None)


@pytest.mark.process
def test_a_worker_loads_torch_while_its_bundle_is_made_and_leaves_where_it_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    made = make_bundle.prepare(classifier(model, [torch.randn(16, 8), torch.randint(0, 10, (16,))], 8))
    started = list[Worker]()

    def starting(*words: Any, **settings: Any) -> Worker:
        started.append(start_worker(*words, **settings))
        return started[-1]

    monkeypatch.setattr(trials, "start_worker", starting)
    path, order = tmp_path / "job.port", list[str]()
    with closing(trials.DryRunWorkers(1)) as workers:
        workers.load()
        workers.load()
        assert len(started) == 1 and started[0].process.poll() is None
        make_bundle.write(path, made, [{"step": Plan()}], {"step": costs_of(made.graphs["step"])}, [1 << 40], threads=1)
        found = workers.dry_run(path, (tmp_path,), meanwhile=lambda: order.append("meanwhile"))
        assert found.peak_bytes > 0 and order == ["meanwhile"]
        workers.load()
    assert [worker.process.returncode for worker in started] == [ExitCode.DONE, ExitCode.LEFT]
    assert [file.name for file in tmp_path.iterdir()] == ["job.port"], "no directory for pages is left"


def test_a_trial_counts_what_huge_pages_may_still_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_line = [
        WorkerReady(
            pid=1, step=0, total_steps=2, plan=0, planned_peak_bytes=300, resident_bytes=50, start_peak_bytes=60
        ),
        replaced(step_event(wall_s=1.0, stall_s=0.0, cpu_s=1.0, planned_compute_s=1.0), peak_rss_bytes=300),
        TrainingFinished(step=2, peak_rss_bytes=310, untouched_block_bytes=7),
    ]
    ended = worker_that_ended(on_line, 0)
    monkeypatch.setattr(trials, "start_worker", lambda *_, **__: ended)
    assert trials.DryRunWorkers(1).dry_run(tmp_path / "job.port", (tmp_path,)).peak_bytes == 317


def test_a_full_device_is_a_finding_and_any_other_end_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code, ended, full in (("OutOfMemoryError", 1, True), ("PageError", ExitCode.DIVERGED, False)):
        on_line = [TrainingFailed(message="no room", code=code)]
        worker = worker_that_ended(on_line, ended)
        monkeypatch.setattr(trials, "start_worker", lambda *_, worker=worker, **__: worker)
        if full:
            assert trials.DryRunWorkers(1).dry_run(tmp_path / "job.port", (tmp_path,)).device_full
            continue
        with pytest.raises(trials.DryRunError, match="no room") as error:
            trials.DryRunWorkers(1).dry_run(tmp_path / "job.port", (tmp_path,))
        assert error.value.exit_code is ExitCode.IMPOSSIBLE
