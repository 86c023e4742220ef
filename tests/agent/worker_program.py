"""A small real worker in pure Python: gradient descent on a linear model, with the supervisor's whole protocol.

It computes, pauses between two instructions, leaves, keeps A/B checkpoints with checksums and resumes bit-exactly, so
that the supervisor is tested end to end without torch. Its "bundle" is a JSON file:

    {"dimension": 8, "steps": 40, "instructions": 10, "instruction_s": 0.001, "checkpoint_every": 5, "seed": 1,
     "plans": [{"peak_bytes": .., "seconds": .., "joules": ..}], "faults": {"crash_at": 7, "ignore": ["pause"]}, ...}
"""

import argparse
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
from pathlib import Path
from typing import Any


class Leave(Exception):
    """The supervisor wants the memory back."""


class Control:
    """The worker's end of the socket pair."""

    def __init__(self, descriptor: int, ignore: list[str]) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.ignore = ignore
        self.buffer = b""
        self.paused = False
        self.wants_checkpoint = False
        self.plan: int | None = None

    def say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"v": 1, "event": event, **fields}) + "\n"
        try:
            self.socket.sendall(line.encode())
        except OSError:
            raise Leave from None

    def listen(self, step: int) -> None:
        """Take in commands; stays inside while paused."""
        while True:
            readable, _, _ = select.select([self.socket], [], [], None if self.paused else 0)
            if not readable:
                return
            data = self.socket.recv(65536)
            if not data:
                raise Leave
            *lines, self.buffer = (self.buffer + data).split(b"\n")
            for line in lines:
                self.obey(json.loads(line), step)

    def obey(self, command: dict[str, Any], step: int) -> None:
        name = command["cmd"]
        if name in self.ignore:
            return
        if name == "pause" and not self.paused:
            self.paused = True
            self.say("paused", step=step)
        elif name == "resume" and self.paused:
            self.paused = False
            self.say("resumed", step=step)
        elif name == "leave":
            raise Leave
        elif name == "checkpoint":
            self.wants_checkpoint = True
        elif name == "plan":
            self.plan = int(command["plan"])
            self.say("plan", plan=self.plan, reason=command["reason"])


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


def read_data(directory: Path | None) -> list[float]:
    if directory is None:
        return []
    return [float(line) for path in sorted(directory.iterdir()) for line in path.read_text().split()]


def run(arguments: argparse.Namespace, bundle: dict[str, Any], control: Control) -> int:
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
    control.say(
        "ready",
        pid=os.getpid(),
        step=state["step"],
        total_steps=total,
        plan=plan,
        planned_peak_bytes=plans[plan]["peak_bytes"],
    )
    control.listen(state["step"])
    count = bundle["instructions"]
    width = max(1, bundle["dimension"] // count)
    while state["step"] < total:
        step = state["step"]
        if faults.get("crash_at") == step and (
            not faults.get("once") or not (arguments.state_dir / "crashed").exists()
        ):
            (arguments.state_dir / "crashed").touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        if faults.get("fail_at") == step:
            control.say("failed", code="test", message="told to fail", retry=True)
            return 1
        if faults.get("memory_error_above", 1 << 62) <= plans[plan]["peak_bytes"] and step >= faults.get("from", 0):
            control.say("failed", code="out-of-memory", message="allocation refused", retry=True)
            return 1
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
            "step",
            step=state["step"],
            epoch=0,
            loss=abs(weights[0] - 0.5),
            wall_s=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
            phases_s={"forward": 0.0},
            paged_in_bytes=0,
            paged_out_bytes=0,
            hidden_s=0.0,
            peak_rss_bytes=0,
            planned_s=plans[plan]["seconds"],
            planned_joules=plans[plan]["joules"],
        )
        every = arguments.checkpoint_every or bundle["checkpoint_every"]
        if control.wants_checkpoint or state["step"] % every == 0:
            control.wants_checkpoint = False
            save(control, arguments.state_dir, state)
    save(control, arguments.state_dir, state)
    if arguments.out:
        text = json.dumps({"step": state["step"], "weights": [weight.hex() for weight in state["weights"]]})
        arguments.out.write_text(text)
    control.say("finished", step=state["step"], out=str(arguments.out) if arguments.out else None)
    return 0


def save(control: Control, directory: Path, state: dict[str, Any]) -> None:
    began = time.perf_counter()
    state["written"] += 1
    written = write_checkpoint(directory, state)
    control.say("checkpoint", step=state["step"], bytes=written, wall_s=time.perf_counter() - began)


def leave_on_sigterm(number: int, frame: object) -> None:
    raise Leave


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("--bundle", Path),
        ("--state-dir", Path),
        ("--control-fd", int),
        ("--plan", int),
        ("--data", Path),
        ("--epochs", int),
        ("--steps", int),
        ("--out", Path),
        ("--checkpoint-every", int),
        ("--round", int),
    ):
        parser.add_argument(name, type=kind)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, leave_on_sigterm)
    try:
        bundle = json.loads(arguments.bundle.read_text())
    except (OSError, ValueError) as error:
        control = Control(arguments.control_fd, [])
        control.say("failed", code="bad-bundle", message=f"the bundle cannot be read: {error}", retry=False)
        return 2
    print("worker starts", bundle.get("note", ""), flush=True)
    time.sleep(bundle.get("import_s", 0.0))
    control = Control(arguments.control_fd, bundle.get("faults", {}).get("ignore", []))
    try:
        return run(arguments, bundle, control)
    except Leave:
        return 75


if __name__ == "__main__":
    sys.exit(main())
