"""The worker process of a microcontroller job, driven over its control socket as the supervisor does."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.session import Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_agent.mcu.snapshot import read_snapshot
from port_agent.worker.protocol import (
    Command,
    LeaveNow,
    PauseTraining,
    ResumeTraining,
    decode_event,
    encode_message,
    plain_values,
)
from port_agent.worker.worker_options import BOARD_WORKER
from tests.agent.mcu.simulated_board import QUICK
from tests.agent.mcu.small_model import make_samples

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """One worker process and our end of its socket."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(240)  # one test's worker compiles the firmware, on whatever is left of the machine
        command = [*BOARD_WORKER, *arguments, "--control-fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stderr=subprocess.PIPE)
        theirs.close()
        self._lines = self.ours.makefile("rb")

    def send(self, command: Command) -> None:
        self.ours.sendall(encode_message(command))

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            yield plain_values(decode_event(line))

    def until(self, kind: str) -> dict[str, Any]:
        for event in self.events():
            if event["event"] == kind:
                return event
        raise AssertionError(f"the worker ended without {kind}: {(self.process.stderr or sys.stdin).read()!r}")

    def end(self) -> int:
        code = self.process.wait(timeout=240)
        if self.process.stderr is not None:
            self.process.stderr.close()
        self._lines.close()
        self.ours.close()
        return code


@pytest.fixture
def job(model: Path, simulator: Simulator, tmp_path: Path) -> Path:
    """A job file for the running process, with its data in an inbox of two files."""
    rows, labels = make_samples(600)
    samples = np.frombuffer(b"".join(rows), np.int8).reshape(600, -1)
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    np.savez(inbox / "a.npz", codes=samples[:250], y=np.array(labels[:250]))
    np.savez(inbox / "b.npz", codes=samples[250:], y=np.array(labels[250:]))
    path = tmp_path / "job.json"
    settings = {"epochs": 3, "learning_rate": 0.02, "rule": "stochastic", "snapshot_every": 300}
    content = {"v": 1, "model": str(model), "data": "inbox", "port": str(simulator.port), "settings": settings}
    path.write_text(json.dumps(content))
    return path


def parameters(simulator: Simulator) -> bytes:
    session = Session(SerialTransport(str(simulator.port)), QUICK)
    try:
        return Device(session).read_parameters()
    finally:
        session.close()


def test_job_runs_to_its_end(job: Path, simulator: Simulator, tmp_path: Path) -> None:
    out = tmp_path / "trained.portmcu"
    worker = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "state"), "--out", str(out))
    events = list(worker.events())
    assert worker.end() == 0
    kinds = [event["event"] for event in events]
    assert kinds[0] == "ready" and kinds[-1] == "finished" and {"step", "eval", "checkpoint"} <= set(kinds)
    assert events[0]["total_steps"] == 480 * 3  # every fifth sample is held out
    evaluations = [event["metric"] for event in events if event["event"] == "eval"]
    assert len(evaluations) == 4 and evaluations[-1] > 0.95 > evaluations[0]
    snapshot = read_snapshot(out)
    assert snapshot is not None and snapshot.parameters == parameters(simulator) and snapshot.position.step == 1440


def test_worker_loads_no_torch(job: Path, tmp_path: Path) -> None:
    code = "import sys, port_agent.mcu.board_worker, port_agent.cli.mcu.training, port_agent.cli.mcu.boards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_leave_pause_and_kill_end_with_the_same_weights(job: Path, simulator: Simulator, tmp_path: Path) -> None:
    straight = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "straight"))
    straight.until("finished")
    assert straight.end() == 0
    expected = parameters(simulator)

    state = str(tmp_path / "broken")
    worker = Worker("--bundle", str(job), "--state-dir", state)
    worker.until("step")
    worker.send(PauseTraining())
    paused = worker.until("paused")
    worker.send(ResumeTraining())
    assert worker.until("resumed")["step"] == paused["step"]
    worker.send(LeaveNow())
    left_at = max([paused["step"]] + [event["step"] for event in worker.events() if event["event"] == "step"])
    assert worker.end() == 75

    worker = Worker("--bundle", str(job), "--state-dir", state)
    assert worker.until("ready")["step"] == left_at  # the device still had it all
    worker.until("checkpoint")
    worker.process.send_signal(signal.SIGKILL)
    worker.end()

    worker = Worker("--bundle", str(job), "--state-dir", state)
    snapshot = read_snapshot(Path(state) / "snapshot.portmcu")
    assert snapshot is not None and worker.until("ready")["step"] == snapshot.position.step  # back to the snapshot
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 75
    simulator.kill()
    simulator.start()

    worker = Worker("--bundle", str(job), "--state-dir", state)
    worker.until("step")
    worker.ours.shutdown(socket.SHUT_RDWR)  # the supervisor dies
    assert worker.end() == 75

    worker = Worker("--bundle", str(job), "--state-dir", state)
    worker.until("finished")
    assert worker.end() == 0
    assert parameters(simulator) == expected


def test_wrong_model_can_never_run(job: Path, tmp_path: Path) -> None:
    from tests.agent.mcu.small_model import write_model

    content = json.loads(job.read_text()) | {"model": str(write_model(tmp_path / "other", "other"))}
    job.write_text(json.dumps(content))
    worker = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "state"))
    failed = worker.until("failed")
    assert (
        failed["code"] == "IncompatibleError"
        and failed["cause"] == "impossible"
        and "reflash with:" in failed["message"]
    )
    assert worker.end() == 2


def test_board_that_is_not_there_is_waited_for(job: Path, simulator: Simulator, tmp_path: Path) -> None:
    simulator.kill()
    worker = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "state"))
    assert "no port for" in worker.until("interrupted")["reason"]
    simulator.start()
    worker.until("step")
    worker.send(LeaveNow())
    assert worker.end() == 75


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere"}, "no data in"),
        ({"v": 2}, "version 2"),
        ({"settings": {"speed": 9}}, "speed"),
        ({"settings": {"epochs": 0}}, "epochs is 0; give at least 1"),
        ({"settings": {"learning_rate": -1}}, "learning_rate is -1"),
        ({"model": "."}, "holds no compiled model"),
    ],
)
def test_bad_jobs_say_what_is_wrong(job: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    job.write_text(json.dumps(json.loads(job.read_text()) | change))
    worker = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "state"))
    failed = worker.until("failed")
    assert message in failed["message"] and failed["cause"] == "impossible"
    assert worker.end() == 2


def test_next_round_goes_on_with_the_weights(job: Path, simulator: Simulator, tmp_path: Path) -> None:
    arguments = ("--bundle", str(job), "--state-dir", str(tmp_path / "state"), "--epochs", "1", "--round")
    worker = Worker(*arguments, "1")
    worker.until("finished")
    worker.end()
    trained = parameters(simulator)
    for _ in range(2):  # the same round again has nothing to do
        worker = Worker(*arguments, "1")
        assert worker.until("ready")["step"] == 480
        worker.until("finished")
        worker.end()
        assert parameters(simulator) == trained
    worker = Worker(*arguments, "2")
    assert worker.until("ready")["step"] == 0
    assert worker.until("eval")["metric"] > 0.9
    assert worker.until("finished")["step"] == 480
    worker.end()
    assert parameters(simulator) != trained


def test_job_can_bring_its_own_simulated_board(model: Path, job: Path, tmp_path: Path) -> None:
    content = json.loads(job.read_text()) | {"simulate": True, "board": "posix", "port": None}
    job.write_text(json.dumps(content))
    worker = Worker("--bundle", str(job), "--state-dir", str(tmp_path / "state"), "--epochs", "1")
    assert worker.until("finished")["step"] == 480
    assert worker.end() == 0
    assert not (tmp_path / "state" / "simulator" / "port").exists()
