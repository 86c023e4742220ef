"""A worker is followed to its end, however it ends."""

import os
import signal
import sys

import pytest

from port_agent.foreground.run import TrainingFailedError
from port_agent.worker.protocol import Event, StepDone, WorkerReady
from tests.agent.foreground.speaking_worker import run_of


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "message", "code"),
    [
        (
            "say(TrainingFailed(code='E', message='the card is full')); sys.exit(1)",
            "the card is full. The last checkpoint",
            1,
        ),
        ("sys.exit(2)", "the worker ended with exit code 2", 2),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the worker was killed by signal 9", 9),
    ],
)
def test_a_worker_that_fails_is_said_with_what_is_safe(program: str, message: str, code: int) -> None:
    with pytest.raises(TrainingFailedError, match=message) as caught:
        run_of(program).finish()
    assert caught.value.exit_code == code and "the same command resumes" in str(caught.value)


@pytest.mark.process
def test_a_failure_that_would_come_again_invites_nobody_to_repeat_it() -> None:
    program = "say(TrainingFailed(code='E', message='the loss is nan', cause='diverged')); sys.exit(4)"
    with pytest.raises(TrainingFailedError, match=r"^the loss is nan$"):
        run_of(program).finish()


@pytest.mark.process
def test_ctrl_c_stops_it_after_its_step_and_the_report_has_what_was_done() -> None:
    program = "say(READY)\nassert hear() == [StopAfterStep]\nsay(STEP)\nsys.exit(75)"
    heard: list[type[Event]] = []

    def listen(event: Event) -> None:
        heard.append(type(event))
        if isinstance(event, WorkerReady):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    run = run_of(program)
    report = run.finish(listen)
    assert run.left and run.stop_requested and heard == [WorkerReady, StepDone]
    assert report.steps == 1 and report.result is None and signal.getsignal(signal.SIGINT) is before


@pytest.mark.process
def test_a_listener_that_fails_leaves_no_worker_behind() -> None:
    def fail(event: Event) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), run_of("say(READY)\nhear()") as run:
        run.finish(fail)
    assert run.ended


HELD = """
import resource, time
wide = resource.getrlimit(resource.RLIMIT_DATA)[0]
say(READY, STEP)
while resource.getrlimit(resource.RLIMIT_DATA)[0] == wide:
    time.sleep(0.01)
try:
    bytearray(400 << 20)
except MemoryError:
    say(TrainingFailed(code="MemoryError", message="no more memory"))
    sys.exit(1)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA of another process needs Linux")
def test_a_worker_is_held_at_its_plan_once_a_step_is_done() -> None:
    with pytest.raises(TrainingFailedError, match="no more memory"):
        run_of(HELD, resident_bytes=300 << 20).finish()
