"""One run of a worker in this process: what it tells and when, and what it does with what it is asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from port_agent.training import run
from port_agent.worker.control import Control, LeftOnRequest
from port_agent.worker.protocol import (
    CheckpointWritten,
    Command,
    EvaluationDone,
    Event,
    LeaveNow,
    PlanSwitched,
    StepDone,
    StopAfterStep,
    SwitchPlan,
    TrainingFinished,
    WorkerLeaving,
    WorkerReady,
    WriteCheckpoint,
)
from port_agent.worker.worker_options import TorchOptions
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import write_revision
from port_planner.ir.costs import Speeds
from port_planner.search.revise_plans import revise
from tests.agent.jobs_small import make_job, small_bundle, write_job

STEPS = 9
A_PASS = 6
"""Steps in one pass over the small job's data."""


def given(state: Path, **options: Any) -> TorchOptions:
    return TorchOptions(
        **{"bundle": small_bundle(), "state_dir": state, "steps": STEPS, "checkpoint_every": 4, **options}
    )


def train(options: TorchOptions, asked: dict[int, Command] | None = None) -> list[Event]:
    """Return what a run tells; after step N the command `asked[N]` arrives. Whatever it raises is its last event."""
    events: list[Any] = []

    def abandon() -> None:
        raise AssertionError("there is a trainer to leave")

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone) and asked and event.step in asked:
            control.handle(asked[event.step])

    control = Control(emit, abandon)
    try:
        run.train(options, control, emit)
    except LeftOnRequest as left:
        events.append(left)
    return events


def kinds(events: list[Event]) -> str:
    """Return the reported events, one letter for each."""
    letters = {
        WorkerReady: "R",
        EvaluationDone: "E",
        StepDone: "s",
        CheckpointWritten: "C",
        PlanSwitched: "P",
        WorkerLeaving: "W",
    }
    return "".join(letters.get(type(event), "F" if isinstance(event, TrainingFinished) else "L") for event in events)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    folder = tmp_path_factory.mktemp("run")
    return train(given(folder, out=folder / "out.safetensors", digest=True))


@pytest.mark.slow
def test_the_order_of_an_undisturbed_run(undisturbed: list[Event]) -> None:
    """Evaluated before the first step and after each pass; committed every four steps and at the end."""
    assert kinds(undisturbed) == "REssssCssEssCsCF"
    ready, finished = undisturbed[0], undisturbed[-1]
    assert isinstance(ready, WorkerReady) and (ready.step, ready.total_steps, ready.plan) == (0, STEPS, 0)
    assert ready.planned_peak_bytes == Bundle(small_bundle()).manifest.plans[0].peak_bytes
    assert ready.resident_bytes and ready.start_peak_bytes and ready.start_peak_bytes >= ready.resident_bytes
    assert isinstance(finished, TrainingFinished) and finished.step == STEPS and finished.digest
    assert finished.out is not None and Path(finished.out).stat().st_size > 0


def test_the_best_weights_so_far_are_kept(undisturbed: list[Event]) -> None:
    finished = undisturbed[-1]
    assert isinstance(finished, TrainingFinished) and finished.out is not None
    best = Path(finished.out).with_name("best.safetensors")
    (evaluated,) = [event for event in undisturbed if isinstance(event, EvaluationDone) and event.step == A_PASS]
    assert best.exists() is evaluated.best
    if best.exists():
        with safe_open(best, framework="pt") as kept, safe_open(finished.out, framework="pt") as last:
            assert set(kept.keys()) == set(last.keys())


@pytest.mark.slow
def test_a_run_that_is_taken_up_does_not_evaluate_again(tmp_path: Path, undisturbed: list[Event]) -> None:
    assert kinds(train(given(tmp_path), {5: StopAfterStep()})) == "REssssCsCL"
    rest = train(given(tmp_path, digest=True))
    ready, finished = rest[0], rest[-1]
    assert isinstance(ready, WorkerReady) and ready.step == 5
    assert kinds(rest) == "RsEsssCF", "the pass ends with step 6; commits count from where it was taken up"
    assert isinstance(finished, TrainingFinished) and isinstance(undisturbed[-1], TrainingFinished)
    assert finished.digest == undisturbed[-1].digest


@pytest.mark.slow
def test_a_checkpoint_is_written_after_the_step_at_hand(tmp_path: Path) -> None:
    events = train(given(tmp_path, checkpoint_every=100), {3: WriteCheckpoint()})
    assert kinds(events) == "REsssCsssEsssCF"
    written = events[5]
    assert isinstance(written, CheckpointWritten) and written.step == 3 and written.bytes > 0


@pytest.mark.slow
def test_a_switch_of_plans_holds_from_the_next_step(tmp_path: Path, undisturbed: list[Event]) -> None:
    events = train(given(tmp_path, checkpoint_every=100, digest=True), {2: SwitchPlan(plan=1, reason="heat")})
    assert kinds(events) == "REssPssssEsssCF"
    assert events[4] == PlanSwitched(plan=1, reason="heat")
    paged = [event.paged_in_bytes + event.paged_out_bytes for event in events if isinstance(event, StepDone)]
    assert paged[1] == 0 and all(paged[2:]), "the first step reads its weights in"
    finished = events[-1]
    assert isinstance(finished, TrainingFinished) and isinstance(undisturbed[-1], TrainingFinished)
    assert finished.digest == undisturbed[-1].digest


@pytest.mark.slow
def test_leaving_commits_nothing(tmp_path: Path) -> None:
    assert kinds(train(given(tmp_path), {2: LeaveNow()})) == "REssWL"


@pytest.mark.slow
def test_a_job_without_evaluation_data_evaluates_nothing(tmp_path: Path) -> None:
    write_job(tmp_path / "plain.port", make_job(eval_data=()), seeds=(0,))
    events = train(given(tmp_path, bundle=tmp_path / "plain.port"))
    assert kinds(events) == "RssssCssssCsCF"
    assert not (tmp_path / "best.safetensors").exists() and not list(tmp_path.glob("out*"))


class _Allocator:
    """Remembers its limit. Live blocks took 30 MiB at their peak, and 5 MiB since that was reset."""

    def __init__(self) -> None:
        self.peak, self.limit = 30 << 20, 0

    def peak_live_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = 5 << 20

    def set_limit(self, limit_bytes: int) -> None:
        self.limit = limit_bytes


@pytest.mark.parametrize(("new_plan", "limit_mib"), [(False, 30), (True, 20)])
def test_freed_blocks_are_kept_up_to_the_plan_or_the_peak_of_live_ones(
    monkeypatch: pytest.MonkeyPatch, new_plan: bool, limit_mib: int
) -> None:
    allocator = _Allocator()
    monkeypatch.setattr(run, "active", lambda: allocator)
    costs = SimpleNamespace(device=SimpleNamespace(base_bytes=100 << 20, host=None))
    trainer: Any = SimpleNamespace(
        programs=SimpleNamespace(peak_bytes=120 << 20), bundle=SimpleNamespace(costs={"step": costs})
    )
    run._limit_cache(trainer, new_plan=new_plan)
    assert allocator.limit == limit_mib << 20


@pytest.mark.slow
def test_revised_plans_train_to_the_same_bits(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    revision = tmp_path / "plans"
    write_revision(revision, revise(bundle, Speeds(1.0, 1e5, 1e5), 1.0))
    own = train(given(tmp_path / "own", plan=1, digest=True))
    again = train(given(tmp_path / "again", plan=1, digest=True, revision=revision))
    steps = [[event for event in events if isinstance(event, StepDone)] for events in (own, again)]
    assert [s.loss for s in steps[0]] == [s.loss for s in steps[1]]
    assert sum(s.paged_out_bytes for s in steps[0]) > sum(s.paged_out_bytes for s in steps[1])
    ends = [event for events in (own, again) for event in events if isinstance(event, TrainingFinished)]
    assert ends[0].digest == ends[1].digest is not None


@pytest.mark.slow
def test_a_run_goes_on_under_revised_plans(tmp_path: Path) -> None:
    revision = tmp_path / "plans"
    write_revision(revision, revise(Bundle(small_bundle()), Speeds(1.0, 1e5, 1e5), 1.0))
    whole = train(given(tmp_path / "whole", plan=1, digest=True))
    train(given(tmp_path / "state", plan=1, steps=4))
    rest = train(given(tmp_path / "state", plan=1, digest=True, revision=revision))
    ends = [event for events in (whole, rest) for event in events if isinstance(event, TrainingFinished)]
    assert ends[0].digest == ends[1].digest is not None
