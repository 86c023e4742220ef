"""What the events of a run add up to, and what the report says of it beside what was planned."""

import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest

from port_agent.cli.follow_job import follow, print_report
from port_agent.foreground.run import TrainReport
from port_agent.worker.protocol import (
    EvaluationDone,
    Event,
    StepDone,
    TrainingFailed,
    TrainingFinished,
    WorkerReady,
    encode_message,
)
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.ir.bundle.manifest import Manifest
from tests.agent.foreground.speaking_worker import run_of
from tests.agent.jobs_small import small_bundle

READY = WorkerReady(pid=1, step=0, total_steps=2, planned_peak_bytes=300 << 20)
STEP = StepDone(
    step=1,
    epoch=0,
    loss=0.5,
    wall_s=2.0,
    cpu_s=1.0,
    phases_s={},
    paged_in_bytes=10,
    paged_out_bytes=20,
    transfer_s=1.0,
    hidden_s=0.75,
    peak_rss_bytes=200 << 20,
)
LAST = StepDone(step=2, epoch=0, loss=0.25, wall_s=4.0, cpu_s=3.0, phases_s={}, peak_rss_bytes=None)
EVENTS: tuple[Event, ...] = (
    READY,
    EvaluationDone(step=0, loss=0.75, metric=0.5),
    STEP,
    LAST,
    EvaluationDone(step=2, loss=0.5, metric=0.75),
    TrainingFinished(step=2, out="/home/[me]/w", digest="ab12", peak_rss_bytes=250 << 20),
)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return replace(read_manifest(small_bundle()), name="birds")


def taken(events: Sequence[Event]) -> TrainReport:
    summary = TrainReport()
    for event in events:
        summary.take(event)
    return summary


def test_events_add_up() -> None:
    summary = taken(EVENTS)
    assert (summary.steps, summary.wall_s, summary.cpu_s, summary.first_loss, summary.last_loss) == (
        2,
        6.0,
        4.0,
        0.5,
        0.25,
    )
    assert (summary.read_bytes, summary.written_bytes, summary.transfer_s, summary.hidden_s) == (10, 20, 1.0, 0.75)
    assert (summary.planned_peak_bytes, summary.peak_rss_bytes, len(summary.evaluations)) == (300 << 20, 250 << 20, 2)
    assert taken([TrainingFailed(code="E", message="too big")]).failure == "too big"


def shown(capsys: pytest.CaptureFixture[str], summary: TrainReport, manifest: Manifest) -> str:
    print_report(summary, manifest, 0)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.slow
def test_a_report_says_what_the_run_did(
    capsys: pytest.CaptureFixture[str], manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    out = shown(capsys, taken(EVENTS), manifest)
    for words in (
        "birds: 2 steps",
        "planned peak 300.0 MiB",
        "measured peak 250.0 MiB",
        "75 % hidden behind compute",
        "3.0 s on average",
        "evaluation metric 0.5000 -> 0.7500",
        "checksum ab12",
        "weights /home/[me]/w",
    ):
        assert words in out, words


def test_a_report_leaves_out_what_was_not(
    capsys: pytest.CaptureFixture[str], manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    out = shown(capsys, taken([READY]), manifest)
    assert "birds: 0 steps" in out
    assert not any(word in out for word in ("on average", "loss", "evaluation", "transfers", "checksum", "weights"))


def followed(program: str, manifest: Manifest, *, as_json: bool = True) -> int:
    return follow(run_of(program), manifest, 0, as_json=as_json)


@pytest.mark.process
def test_json_is_what_the_worker_said(capsys: pytest.CaptureFixture[str], manifest: Manifest) -> None:
    assert followed("say(READY, STEP, TrainingFinished(step=1))", manifest) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [f"{line}\n".encode() for line in lines] == [
        encode_message(WorkerReady(pid=0, step=0, total_steps=2)),
        encode_message(StepDone(step=1, epoch=0, loss=None, wall_s=1.0, cpu_s=1.0, phases_s={})),
        encode_message(TrainingFinished(step=1)),
    ]


@pytest.mark.process
@pytest.mark.parametrize(("presses", "heard"), [(1, "StopAfterStep"), (2, "LeaveNow")])
def test_ctrl_c_asks_to_stop_and_again_to_leave(
    capsys: pytest.CaptureFixture[str], manifest: Manifest, presses: int, heard: str
) -> None:
    """The worker presses for the user, and answers each time."""
    program = f"""
say(READY)
for _ in range({presses}):
    os.kill(os.getppid(), signal.SIGINT)
    last = hear()[-1]
say(TrainingFinished(step=0, out=last.__name__))
sys.exit(75)
"""
    before = signal.getsignal(signal.SIGINT)
    assert followed(program, manifest) == 130
    assert signal.getsignal(signal.SIGINT) is before, "the handler of before is back"
    out, err = capsys.readouterr()
    assert heard in out and "the same command continues from the last checkpoint" in err


@pytest.mark.process
def test_a_worker_that_left_by_itself_is_no_interruption(manifest: Manifest) -> None:
    assert followed("sys.exit(75)", manifest) == 75
