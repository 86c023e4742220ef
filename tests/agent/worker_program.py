"""A small real worker in pure Python: gradient descent on a linear model, with the supervisor's whole protocol.

It computes, pauses between two instructions, leaves, keeps A/B checkpoints with checksums and resumes bit-exactly, so
that the supervisor is tested end to end without torch. Its "bundle" is a JSON file:

    {"dimension": 8, "steps": 40, "instructions": 10, "instruction_s": 0.001, "checkpoint_every": 5, "seed": 1,
     "plans": [{"peak_bytes": .., "seconds": .., "joules": ..}], "faults": {"crash_at": 7, "ignore": ["pause"]}, ...}

A step begins only when the file `wait_for` of the faults is there; the worker obeys while it waits.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum
from port_agent.worker.control import LeftOnRequest
from port_agent.worker.protocol import (
    CheckpointWritten,
    Command,
    Event,
    FailureCause,
    LeaveNow,
    LineSplitter,
    PauseTraining,
    PlanSwitched,
    ProtocolError,
    ResumeTraining,
    StepDone,
    StopAfterStep,
    SwitchPlan,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerReady,
    WorkerResumed,
    WriteCheckpoint,
    decode_command,
    encode_message,
    plain_values,
)
from port_agent.worker.worker_options import BoardOptions
from port_planner.base.errors import ExitCode


class FakeControl:
    """The worker's end of the line, looked at between two instructions; `ignore`: commands it will not obey."""

    def __init__(self, descriptor: int, ignore: list[str]) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.ignore = ignore
        self.lines = LineSplitter()
        self.paused = self.stopping = self.wants_checkpoint = False
        self.plan: int | None = None

    def say(self, event: Event) -> None:
        try:
            self.socket.sendall(encode_message(event))
        except OSError:
            raise LeftOnRequest("the supervisor is gone") from None

    def listen(self, step: int) -> None:
        """Take in commands; stays inside while paused."""
        while True:
            readable, _, _ = select.select([self.socket], [], [], None if self.paused else 0)
            if not readable:
                return
            data = self.socket.recv(65536)
            if not data:
                raise LeftOnRequest("the supervisor is gone")
            for line in self.lines.feed(data):
                with contextlib.suppress(ProtocolError):
                    self.obey(decode_command(line), step)

    def obey(self, command: Command, step: int) -> None:
        if plain_values(command)["cmd"] in self.ignore:
            return
        match command:
            case PauseTraining() if not self.paused:
                self.paused = True
                self.say(WorkerPaused(step=step))
            case ResumeTraining() if self.paused:
                self.paused = False
                self.say(WorkerResumed(step=step))
            case LeaveNow():
                raise LeftOnRequest("left on request")
            case StopAfterStep():
                self.stopping = True
            case WriteCheckpoint():
                self.wants_checkpoint = True
            case SwitchPlan():
                self.plan = command.plan
                self.say(PlanSwitched(plan=command.plan, reason=command.reason))


def write_checkpoint(directory: Path, state: dict[str, Any]) -> int:
    """Write the slot that is not the newest, with checksum and fsync; returns its bytes."""
    body = json.dumps(state).encode()
    content = struct.pack("<I", zlib.crc32(body)) + body
    path = directory / f"slot-{state['written'] % 2}"
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return len(content)


def read_checkpoint(directory: Path) -> dict[str, Any] | None:
    """Return the newest slot whose checksum is right."""
    found = []
    for number in (0, 1):
        try:
            content = (directory / f"slot-{number}").read_bytes()
        except OSError:
            continue
        if len(content) > 4 and struct.unpack("<I", content[:4])[0] == zlib.crc32(content[4:]):
            found.append(json.loads(content[4:]))
    return max(found, key=lambda state: state["written"], default=None)


def train_instruction(weights: list[float], row: list[float], target: float, lo: int, hi: int, seconds: float) -> None:
    """Update weights[lo:hi] by one gradient; spins until the instruction has taken its time."""
    end = time.perf_counter() + seconds
    error = sum(w * x for w, x in zip(weights, row, strict=True)) - target
    for index in range(lo, hi):
        weights[index] -= 0.05 * error * row[index]
    while time.perf_counter() < end:
        pass


def sample(bundle: dict[str, Any], data: list[float], step: int) -> tuple[list[float], float]:
    rng = random.Random(bundle["seed"] * 1_000_003 + step)
    row = [rng.uniform(-1, 1) for _ in range(bundle["dimension"])]
    shift = data[step % len(data)] if data else 0.0
    return row, sum(row) * 0.5 + shift


def undisturbed_weights(bundle: dict[str, Any]) -> list[str]:
    """Return what a run without interruption and without data of its own computes, as hexadecimal floats."""
    weights = [0.0] * bundle["dimension"]
    width = max(1, bundle["dimension"] // bundle["instructions"])
    for step in range(bundle["steps"]):
        row, target = sample(bundle, [], step)
        for number in range(bundle["instructions"]):
            train_instruction(weights, row, target, number * width, (number + 1) * width, 0.0)
    return [weight.hex() for weight in weights]


def read_data(directory: Path | None) -> list[float]:
    if directory is None:
        return []
    return [float(line) for path in sorted(directory.iterdir()) for line in path.read_text().split()]


def run(arguments: BoardOptions, bundle: dict[str, Any], control: FakeControl) -> ExitCode:
    faults = bundle.get("faults", {})
    arguments.state_dir.mkdir(parents=True, exist_ok=True)
    state = read_checkpoint(arguments.state_dir)
    if state is None:
        state = {"written": 0, "step": 0, "round": 0, "round_start": 0, "weights": [0.0] * bundle["dimension"]}
    data = read_data(arguments.data)
    number = arguments.round or 0
    if number != state["round"]:
        state["round"], state["round_start"] = number, state["step"]
    length = arguments.steps or (arguments.epochs * len(data) if arguments.epochs and data else bundle["steps"])
    total = state["round_start"] + length
    plan = arguments.plan or 0
    plans = bundle.get("plans") or [{"peak_bytes": 0, "seconds": None, "joules": None}]
    ballast = bytearray(bundle.get("ballast_bytes", 0))
    for page in range(0, len(ballast), 4096):
        ballast[page] = 1
    trace = (arguments.state_dir / "trace").open("ab", buffering=0) if bundle.get("trace") else None
    planned_peak_bytes = plans[plan]["peak_bytes"]
    control.say(
        WorkerReady(
            pid=os.getpid(), step=state["step"], total_steps=total, plan=plan, planned_peak_bytes=planned_peak_bytes
        )
    )
    control.listen(state["step"])
    count = bundle["instructions"]
    width = max(1, bundle["dimension"] // count)
    while state["step"] < total:
        step = state["step"]
        while faults.get("wait_for") and not Path(faults["wait_for"]).exists():
            control.listen(step)
            time.sleep(0.001)
        if faults.get("crash_at") == step and (
            not faults.get("once") or not (arguments.state_dir / "crashed").exists()
        ):
            (arguments.state_dir / "crashed").touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        if faults.get("fail_at") == step:
            control.say(TrainingFailed(code="FakeError", message="told to fail"))
            return ExitCode.FAILED
        if faults.get("memory_error_above", 1 << 62) <= plans[plan]["peak_bytes"] and step >= faults.get("from", 0):
            cause = FailureCause.OUT_OF_MEMORY
            control.say(TrainingFailed(code="MemoryError", message="allocation refused", cause=cause))
            return ExitCode.FAILED
        if faults.get("grow_bytes") and (arguments.state_dir / "grow").exists():
            try:
                ballast += bytes(faults["grow_bytes"])
            except MemoryError:
                cause = FailureCause.OUT_OF_MEMORY
                control.say(TrainingFailed(code="MemoryError", message="more than the plan", cause=cause))
                return ExitCode.FAILED
        began, cpu = time.perf_counter(), time.process_time()
        weights = list(state["weights"])
        row, target = sample(bundle, data, step)
        for instruction in range(count):
            control.listen(step)
            if trace is not None:
                trace.write(struct.pack("<d", time.monotonic()))
            lo = instruction * width
            train_instruction(weights, row, target, lo, lo + width, bundle["instruction_s"])
        state = {**state, "weights": weights, "step": step + 1}
        if control.plan is not None:
            plan, control.plan = control.plan, None
        control.say(
            StepDone(
                step=state["step"],
                epoch=0,
                loss=abs(weights[0] - 0.5),
                wall_s=time.perf_counter() - began,
                cpu_s=time.process_time() - cpu,
                phases_s={"forward": 0.0},
                peak_rss_bytes=0,
                planned_s=plans[plan]["seconds"],
                planned_joules=plans[plan]["joules"],
            )
        )
        every = arguments.checkpoint_every or bundle["checkpoint_every"]
        if control.wants_checkpoint or control.stopping or state["step"] % every == 0:
            control.wants_checkpoint = False
            save(control, arguments.state_dir, state)
        if control.stopping:
            raise LeftOnRequest("stopped on request")
    save(control, arguments.state_dir, state)
    out = checksum = None
    if arguments.out:
        text = json.dumps({"step": state["step"], "weights": [weight.hex() for weight in state["weights"]]})
        write_atomically(arguments.out, text.encode())
        out, checksum = str(arguments.out), bytes_checksum(text.encode())
    control.say(TrainingFinished(step=state["step"], out=out, out_checksum=checksum))
    return ExitCode.DONE


def save(control: FakeControl, directory: Path, state: dict[str, Any]) -> None:
    began = time.perf_counter()
    state["written"] += 1
    written = write_checkpoint(directory, state)
    control.say(CheckpointWritten(step=state["step"], bytes=written, wall_s=time.perf_counter() - began))


def leave_on_sigterm(number: int, frame: object) -> None:
    raise LeftOnRequest("told to by SIGTERM")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions(BoardOptions):
    """The commands that this worker accepts; it starts without given weights."""

    weights: Path | None = None


def main() -> ExitCode:
    arguments = ProgramOptions.parse(None, program="worker_program")
    descriptor = arguments.control_fd
    if descriptor is None:
        raise SystemExit("the fake worker needs a line to its supervisor: --control-fd")
    signal.signal(signal.SIGTERM, leave_on_sigterm)
    try:
        bundle = json.loads(arguments.bundle.read_text())
    except (OSError, ValueError) as error:
        message, cause = f"the bundle cannot be read: {error}", FailureCause.IMPOSSIBLE
        FakeControl(descriptor, []).say(TrainingFailed(code=type(error).__name__, message=message, cause=cause))
        return ExitCode.IMPOSSIBLE
    print("worker starts", bundle.get("note", ""), flush=True)
    time.sleep(bundle.get("import_s", 0.0))
    control = FakeControl(descriptor, bundle.get("faults", {}).get("ignore", []))
    try:
        return run(arguments, bundle, control)
    except LeftOnRequest:
        return ExitCode.LEFT


if __name__ == "__main__":
    sys.exit(main())
