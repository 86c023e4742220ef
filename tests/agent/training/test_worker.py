"""The worker process as its supervisor sees it: killed, asked to pause, leave, stop, switch
plans; and when it refuses.
"""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from port_agent.malloc import PreloadMode, preload_mode
from port_agent.worker.protocol import (
    LeaveNow,
    PauseTraining,
    ResumeTraining,
    StopAfterStep,
    SwitchPlan,
    WriteCheckpoint,
    plain_values,
)
from port_agent.worker.start import Worker, start_worker, torch_worker
from port_agent.worker.worker_options import TorchOptions
from tests.agent.jobs_small import make_job, small_bundle, unseen_row, write_job
from tests.planner.bundles import rewrite
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

STEPS = 9


def start(state: Path, *, bundle: Path | None = None, data_limit_bytes: int | None = None, **options: Any) -> Worker:
    told = TorchOptions(bundle=bundle or small_bundle(), state_dir=state, steps=STEPS, digest=True, **options)
    return start_worker(
        torch_worker(told), limit_bytes=1 << 30, stderr=subprocess.DEVNULL, data_limit_bytes=data_limit_bytes
    )


def said(worker: Worker) -> Iterator[dict[str, Any]]:
    """Yield what the worker says, as plain values."""
    return map(plain_values, worker.events())


def finish(worker: Worker) -> dict[str, Any]:
    """Wait for the end of a worker that must succeed; return its last event."""
    events = list(said(worker))
    assert worker.process.returncode == 0, events[-1:]
    assert events[-1]["event"] == "finished"
    return events[-1]


def until(worker: Worker, events: Iterator[dict[str, Any]], name: str, step: int = 0) -> dict[str, Any]:
    """Return the next event of this name from `step` on."""
    for event in events:
        if event["event"] == name and event.get("step", 0) >= step:
            return event
    raise AssertionError(f"the worker ended with {worker.process.wait()} without saying {name!r}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the state directory of a run that nobody disturbed, and its digest."""
    state = tmp_path_factory.mktemp("reference")
    return state, str(finish(start(state, plan=0))["digest"])


@pytest.fixture(scope="module")
def reference(finished: tuple[Path, str]) -> str:
    return finished[1]


def test_events_of_an_undisturbed_run(tmp_path: Path, reference: str) -> None:
    out = tmp_path / "w.safetensors"
    worker = start(tmp_path / "state", plan=1, verify=5, out=out)
    events = list(said(worker))
    assert worker.process.returncode == 0
    kinds = [e["event"] for e in events]
    assert all(e["v"] == 1 for e in events)
    assert kinds[0] == "ready" and events[0]["pid"] == worker.process.pid and events[0]["total_steps"] == STEPS
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, STEPS + 1))
    assert [e["step"] for e in events if e["event"] == "checkpoint"] == list(range(1, STEPS + 1))
    assert [e["step"] for e in events if e["event"] == "eval"] == [0, 6]
    assert events[-1]["digest"] == reference and events[-1]["out"] == str(out) and out.stat().st_size > 1000
    assert not list((tmp_path / "state").glob("scratch*")), "scratch files are removed"


def _kill_and_resume(state: Path, rng: random.Random, kills: int, reference: str) -> None:
    """Kill at random moments of the run (before, between and inside steps), then let it finish."""
    for _ in range(kills):
        worker = start(state, plan=1)
        target = rng.randrange(0, STEPS)
        seen = 0
        for event in said(worker):
            if event["event"] in ("ready", "step", "checkpoint"):
                seen += 1
                if seen > target:
                    # anywhere in what follows this event: the worker runs on while we send the signal
                    os.kill(worker.process.pid, signal.SIGKILL)
                    break
        worker.process.wait()
        assert worker.process.returncode in (-signal.SIGKILL, 0)
    assert finish(start(state, plan=1))["digest"] == reference


def test_five_kills(tmp_path: Path, reference: str) -> None:
    _kill_and_resume(tmp_path, random.Random(1), 5, reference)


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path, reference: str) -> None:
    rng = random.Random(2)
    for round_ in range(25):
        _kill_and_resume(tmp_path / str(round_), rng, 4, reference)


def _left(worker: Worker, events: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    rest = list(events)
    assert worker.process.wait(PATIENCE_S) == 75
    return rest


@pytest.mark.parametrize("way", ["leave", "SIGTERM", "EOF"])
def test_leaving(way: str, tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    events = said(worker)
    until(worker, events, "checkpoint", 2)
    if way == "leave":
        worker.send(LeaveNow())
    elif way == "SIGTERM":
        worker.process.send_signal(signal.SIGTERM)
    else:
        worker.channel._socket.shutdown(2)
    if way == "EOF":
        assert worker.process.wait(PATIENCE_S) == 75
    else:
        _left(worker, events)
    assert finish(start(tmp_path))["digest"] == reference


def test_leaving_with_time_for_a_commit_loses_the_open_step_alone(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path, checkpoint_every=100)
    events = said(worker)
    until(worker, events, "step", 4)
    worker.send(LeaveNow(within_s=60.0))
    rest = _left(worker, events)
    done = max([4, *(event["step"] for event in rest if event["event"] == "step")])
    assert [event["step"] for event in rest if event["event"] == "checkpoint"] == [done]
    assert [event["event"] for event in rest[-2:]] == ["leaving", "checkpoint"], "it says when it computes no more"
    again = start(tmp_path, checkpoint_every=100)
    events = said(again)
    assert until(again, events, "ready")["step"] == done
    assert list(events)[-1]["digest"] == reference


def test_a_place_for_the_weights_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    worker = start(tmp_path / "state", out=tmp_path / "missing/w.safetensors")
    (failed,) = said(worker)
    assert worker.process.returncode == 2
    assert failed["code"] == "ResultPlaceError" and "no directory" in failed["message"]


def test_two_runs_in_one_state_directory_are_refused(tmp_path: Path, reference: str) -> None:
    first = start(tmp_path)
    events = said(first)
    until(first, events, "step", 2)
    first.send(PauseTraining())
    until(first, events, "paused")
    (failed,) = said(start(tmp_path))
    assert failed["code"] == "StateInUseError" and f"process {first.process.pid} is training" in failed["message"]
    first.send(ResumeTraining())
    assert list(events)[-1]["digest"] == reference


def test_leaving_while_torch_is_loaded_is_at_once_and_without_a_trace(tmp_path: Path) -> None:
    worker = start(tmp_path / "state")
    worker.send(LeaveNow())
    assert _left(worker, said(worker)) == []
    assert not (tmp_path / "state").exists()


def test_a_pause_that_comes_before_the_bundle_is_open_holds(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    worker.send(PauseTraining())
    events = said(worker)
    assert until(worker, events, "paused")["step"] == 0
    worker.send(ResumeTraining())
    last = list(events)[-1]
    assert last["digest"] == reference


def test_pause_holds_every_step_until_resume(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    events = said(worker)
    until(worker, events, "step", 2)
    worker.send(PauseTraining())
    paused = until(worker, events, "paused")
    worker.send(ResumeTraining())
    assert until(worker, events, "resumed")["step"] == paused["step"], "no step while paused"
    last = list(events)[-1]
    assert last["digest"] == reference


@pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the allocator cannot be preloaded here")
def test_generated_code_is_closed_for_writing_and_no_data(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    events = said(worker)
    until(worker, events, "step", 1)
    worker.send(PauseTraining())
    until(worker, events, "paused")
    mapped = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
    generated = [words[1] for line in mapped if len(words := line.split()) == 5 and "x" in words[1]]
    worker.send(ResumeTraining())
    assert list(events)[-1]["digest"] == reference
    assert generated and set(generated) == {"r-xp"}


@pytest.mark.long
def test_leaving_while_paused(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    events = said(worker)
    until(worker, events, "step", 2)
    worker.send(PauseTraining())
    until(worker, events, "paused")
    worker.send(LeaveNow())
    rest = _left(worker, events)
    assert not [e for e in rest if e["event"] == "step"]
    assert finish(start(tmp_path))["digest"] == reference


NONSENSE = (
    b"\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"v": 9, "cmd": "leave"}\n', b'{"v": 1}\n', b'{"v": 1, "cmd": 7}\n',
    b'{"v": 1, "cmd": "plan"}\n', b'{"v": 1, "cmd": "plan", "plan": "x"}\n',
)  # fmt: skip


def test_stop_finishes_the_step_and_commits_and_nonsense_before_it_is_ignored(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path, checkpoint_every=100)
    for line in NONSENSE:
        worker.channel._socket.sendall(line)
    events = said(worker)
    until(worker, events, "step", 2)
    worker.send(StopAfterStep())
    rest = _left(worker, events)
    assert rest[-1]["event"] == "checkpoint"
    resumed = start(tmp_path)
    events = said(resumed)
    assert until(resumed, events, "ready")["step"] == rest[-1]["step"]
    assert list(events)[-1]["digest"] == reference


def test_checkpoint_on_request_and_plan_switch(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path, checkpoint_every=100)
    events = said(worker)
    until(worker, events, "step", 1)
    worker.send(WriteCheckpoint())
    assert until(worker, events, "checkpoint")["step"] < STEPS
    worker.send(SwitchPlan(plan=1, reason="less memory"))
    switched = until(worker, events, "plan")
    assert (switched["plan"], switched["reason"]) == (1, "less memory")
    assert list(events)[-1]["digest"] == reference


def test_a_switch_to_a_plan_that_does_not_exist_fails_and_can_be_retried(tmp_path: Path, reference: str) -> None:
    worker = start(tmp_path)
    events = said(worker)
    until(worker, events, "step", 1)
    worker.send(SwitchPlan(plan=99))
    assert list(events)[-1]["event"] == "failed"
    assert worker.process.wait(PATIENCE_S) == 1
    assert finish(start(tmp_path))["digest"] == reference


# -- refusals


def _refused(worker: Worker, code: int) -> dict[str, Any]:
    events = list(said(worker))
    assert worker.process.wait(PATIENCE_S) == code, events
    assert events[-1]["event"] == "failed" and (events[-1]["cause"] == "impossible") == (code == 2)
    return events[-1]


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "bad.port"
    bad.write_bytes(b"PK nothing")
    assert _refused(start(tmp_path / "s", bundle=bad), 2)["code"] == "BundleError"
    assert _refused(start(tmp_path / "s", bundle=tmp_path / "none.port"), 2)["code"] == "BundleError"


def test_a_damaged_bundle(tmp_path: Path) -> None:
    data = bytearray(small_bundle().read_bytes())
    data[200] ^= 1
    bad = tmp_path / "bad.port"
    bad.write_bytes(data)
    _refused(start(tmp_path / "s", bundle=bad), 2)


def test_a_plan_over_its_budget(tmp_path: Path) -> None:
    bundle = tmp_path / "tight.port"
    with_budget(small_bundle(), bundle, 1000)
    failure = _refused(start(tmp_path / "s", bundle=bundle), 2)
    assert failure["code"] == "BudgetError" and "MiB" in failure["message"]


def with_budget(source: Path, target: Path, ram_bytes: int) -> None:
    """Copy a bundle with another number for the budget of each plan; hashes fit again."""

    def tighten(choices: Any) -> Any:
        for choice in choices:
            for plan in choice.values():
                plan[1][0] = ram_bytes
        return choices

    rewrite(source, target, {"plans.msgpack": tighten})


def test_the_state_of_another_job_is_refused(finished: tuple[Path, str]) -> None:
    failure = _refused(start(finished[0], bundle=small_bundle(3)), 1)
    assert failure["code"] == "CheckpointError" and "another job" in failure["message"]


def test_a_branch_that_turns_is_detected(tmp_path: Path) -> None:
    """All recordings took one branch; a row that none of them saw takes the other."""
    bundle = tmp_path / "branch.port"

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        from torch.nn import functional

        out = model(x)
        return functional.cross_entropy(out if bool(x.sum() > -1e6) else -out, y)

    job = make_job(eval_data=())
    job.loss_fn = loss_fn
    job.data[0][unseen_row(job)] = -1e6
    write_job(bundle, job, seeds=(0,), compared=0)
    failure = _refused(start(tmp_path / "s", bundle=bundle), 2)
    assert failure["code"] == "GraphChangedError"
    assert "test_worker.py:" in failure["message"] and "which was True when" in failure["message"]


@pytest.mark.long
def test_a_full_or_forbidden_page_directory(tmp_path: Path) -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("needs a directory in which nobody can create files")
    failure = _refused(start(Path("/proc/self/fd/port-agent")), 1)
    assert failure["message"]


def test_a_hard_limit_on_data_is_a_clean_failure_or_a_full_run(tmp_path: Path, reference: str) -> None:
    assert finish(start(tmp_path / "enough", data_limit_bytes=600 << 20))["digest"] == reference
    worker = start(tmp_path / "little", data_limit_bytes=60 << 20)
    list(said(worker))
    assert worker.process.wait(PATIENCE_S) != 0


def test_without_a_channel_errors_go_to_stderr(tmp_path: Path) -> None:
    command = torch_worker(TorchOptions(bundle=tmp_path / "none.port", state_dir=tmp_path / "s"))
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "does not exist" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.long
def test_messages_are_json_lines(tmp_path: Path) -> None:
    worker = start(tmp_path)
    receive: Callable[[int], bytes] = worker.channel._socket.recv
    data = b""
    while chunk := receive(65536):
        data += chunk
    worker.process.wait()
    lines = data.split(b"\n")
    assert lines[-1] == b""
    assert all(isinstance(json.loads(line), dict) for line in lines[:-1])
