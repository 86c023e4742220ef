"""The protocol of a worker and its supervisor: frozen events and commands, one JSON object per line, both ways.

A line has the version alongside the message: `{"v":1,"event":"paused","step":7}`. Unknown fields are skipped; a line
that is not a valid message of this version is rejected with ProtocolError, and the reader continues. Figures that are
not finite (a diverged loss) are sent as null.
"""

from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec

from port_planner.base.errors import PortError
from port_planner.ir.costs import PackingCost

VERSION = 1
MAX_LINE_BYTES = 1 << 20
"""Largest line in bytes, longer than any message; a peer that sends more without a newline is broken."""
COSTS_IN_A_LINE = 1000
"""Largest number of costs of `PackingProbed` in a line, 200 bytes each."""


class ProtocolError(PortError):
    """A line that is not a valid message of this version."""


class FailureCause(StrEnum):
    """The meaning of a failure for the job."""

    OUT_OF_MEMORY = "out-of-memory"
    """The job outgrew its plan: the next run uses a smaller one."""
    IMPOSSIBLE = "impossible"
    """The job can never run as it is."""
    DIVERGED = "diverged"
    """The training's numbers became NaN or infinite; the same steps would give the same numbers again."""
    OTHER = "failed"
    """The job may be tried again."""


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the protocol."""


class _EventMessage(_Message, frozen=True, tag_field="event"):
    """A message from the worker."""


class WorkerReady(_EventMessage, frozen=True, kw_only=True, tag="ready"):
    """The job is loaded and its first step begins. `step`: number of finished steps in this round."""

    pid: int
    step: int
    total_steps: int | None
    plan: int = 0
    planned_peak_bytes: int | None = None
    resident_bytes: int | None = None
    start_peak_bytes: int | None = None
    """The peak while Python, torch and the bundle were loaded."""


class StepDone(_EventMessage, frozen=True, kw_only=True, tag="step"):
    """A step (for a board: a request of several samples) is done.

    Values that were not measured or planned are None.
    """

    step: int
    epoch: int
    loss: float | None
    wall_s: float
    cpu_s: float
    phases_s: dict[str, float]
    paged_in_bytes: int = 0
    paged_out_bytes: int = 0
    unworn_bytes: int = 0
    """The part of the paged-out bytes that went to compressed RAM, which writing does not wear out."""
    packed_bytes: int = 0
    """Bytes of packed tensors in RAM; `packed_from_bytes`: their unpacked size."""
    packed_from_bytes: int = 0
    packing_overflows: int = 0
    """Tensors that needed more memory when packed than the plan reserves, and went to flash instead."""
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    """Seconds of transfers that overlapped with compute."""
    peak_rss_bytes: int | None = None
    device_peak_bytes: int | None = None
    """Peak of the device's memory, for tensors, context and libraries; None if the step computes on the CPU."""
    device_excess_bytes: int = 0
    """Bytes by which tensors exceeded their planned share of the device's memory, which no kernel may have stopped."""
    planned_s: float | None = None
    planned_compute_s: float | None = None
    planned_joules: float | None = None
    samples: int | None = None
    total_steps: int | None = None


class EvaluationDone(_EventMessage, frozen=True, kw_only=True, tag="eval"):
    """Loss and metric over the evaluation data. `best`: better than any before."""

    step: int
    loss: float | None
    metric: float | None = None
    best: bool = False
    paged_in_bytes: int = 0
    paged_out_bytes: int = 0
    unworn_bytes: int = 0


class CheckpointWritten(_EventMessage, frozen=True, kw_only=True, tag="checkpoint"):
    """The state at `step` is safe on disk, from which a killed run resumes."""

    step: int
    bytes: int
    wall_s: float


class PackingProbed(_EventMessage, frozen=True, kw_only=True, tag="packing"):
    """What packing the tensors of a graph would cost, as measured in a dry run; a large graph needs
    several of these messages.
    """

    graph: str
    costs: tuple[PackingCost, ...]


class StateRecovered(_EventMessage, frozen=True, kw_only=True, tag="recovered"):
    """A part of the state was damaged; the run continues from the commit at `step`.

    `lost_steps` are trained again; None if their number is unknown.
    """

    step: int
    reason: str
    lost_steps: int | None = None


class PlanSwitched(_EventMessage, frozen=True, kw_only=True, tag="plan"):
    """From the next step on another plan of the bundle is run."""

    plan: int
    reason: str = ""


class WorkerPaused(_EventMessage, frozen=True, kw_only=True, tag="paused", omit_defaults=True):
    """No instruction runs until the supervisor allows it; the memory stays."""

    step: int
    operator: str | None = None
    """Operator of an attached program that was running at the request, and that ended `waited_s` later."""
    waited_s: float = 0.0


class MemoryReleased(_EventMessage, frozen=True, kw_only=True, tag="released"):
    """An attached program computes nothing, and its tensors are in its page file; `wall_s`:
    seconds since the request.
    """

    step: int
    resident_bytes: int
    wall_s: float
    paged_out_bytes: int = 0
    unworn_bytes: int = 0


class WorkerResumed(_EventMessage, frozen=True, kw_only=True, tag="resumed"):
    """The run continues after a pause."""

    step: int


class WorkerLeaving(_EventMessage, frozen=True, kw_only=True, tag="leaving"):
    """No instruction runs any longer; finished steps are committed if there is time, then the process ends."""

    step: int


class DeviceInterrupted(_EventMessage, frozen=True, kw_only=True, tag="interrupted"):
    """The training device was disconnected (`step` is None while it is waited for) or is back at `step`."""

    reason: str
    step: int | None = None


class TrainingFinished(_EventMessage, frozen=True, kw_only=True, tag="finished"):
    """The job is done.

    `out`: the file of its weights. `out_checksum`: the CRC-32 of that file. `digest`: a checksum over its state, if
    requested. `untouched_block_bytes`: bytes above the peak by which resident memory may grow without an allocation.
    """

    step: int
    out: str | None = None
    out_checksum: str | None = None
    digest: str | None = None
    peak_rss_bytes: int | None = None
    untouched_block_bytes: int = 0


class TrainingFailed(_EventMessage, frozen=True, kw_only=True, tag="failed"):
    """The worker ends with a known error.

    `code`: the error's class, `message`: a sentence for the user.
    """

    code: str
    message: str
    cause: FailureCause = FailureCause.OTHER


Event = (
    WorkerReady | StepDone | EvaluationDone | CheckpointWritten | PackingProbed | StateRecovered | PlanSwitched | WorkerPaused
    | WorkerResumed | MemoryReleased | WorkerLeaving | DeviceInterrupted | TrainingFinished | TrainingFailed
)  # fmt: skip


class _CommandMessage(_Message, frozen=True, tag_field="cmd"):
    """A message from the supervisor."""


class PauseTraining(_CommandMessage, frozen=True, tag="pause"):
    """Stop between two instructions, and keep the memory."""


class ResumeTraining(_CommandMessage, frozen=True, kw_only=True, tag="resume", omit_defaults=True):
    """Continue after a pause."""

    cpu_percent: float = 100.0
    """Share of all CPUs that an attached program may take, in percent; workers are limited by their cgroups."""


class ReleaseMemory(_CommandMessage, frozen=True, kw_only=True, tag="release"):
    """Command to an attached program: stop between two operators, release the memory, and wait for `resume`."""

    reason: str = ""


class LeaveNow(_CommandMessage, frozen=True, kw_only=True, tag="leave", omit_defaults=True):
    """End and release the memory, at once or after a commit of the finished steps that takes less than `within_s`.

    An attached program gets Ctrl-C.
    """

    within_s: float = 0.0


class StopAfterStep(_CommandMessage, frozen=True, tag="stop"):
    """Finish the step, write a checkpoint and end."""


class WriteCheckpoint(_CommandMessage, frozen=True, tag="checkpoint"):
    """Write a checkpoint after the current step."""


class SwitchPlan(_CommandMessage, frozen=True, kw_only=True, tag="plan"):
    """Switch to another plan of the bundle after the current step."""

    plan: int
    reason: str = ""


class TakeWork(_CommandMessage, frozen=True, kw_only=True, tag="work"):
    """Task for a worker that was started before its work was known, in the words of a worker's command line."""

    words: tuple[str, ...]


Command = (
    PauseTraining | ResumeTraining | ReleaseMemory | LeaveNow | StopAfterStep | WriteCheckpoint | SwitchPlan | TakeWork
)


class _Head(msgspec.Struct):
    v: Literal[1]


M = TypeVar("M")

_head = msgspec.json.Decoder(_Head)
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_encoder = msgspec.json.Encoder()


def encode_message(message: Event | Command) -> bytes:
    """Return the line of a message, newline included."""
    return b'{"v":%d,%b\n' % (VERSION, _encoder.encode(message)[1:])


def plain_values(message: Event | Command) -> dict[str, Any]:
    """Return the content of a message's line, as plain values."""
    values: dict[str, Any] = msgspec.to_builtins(message)
    return {"v": VERSION, **values}


def decode_event(line: bytes) -> Event:
    """Return the event of a line; raises ProtocolError."""
    return _decode(_events, line)


def decode_command(line: bytes) -> Command:
    """Return the command of a line; raises ProtocolError."""
    return _decode(_commands, line)


def _decode(decoder: "msgspec.json.Decoder[M]", line: bytes) -> M:
    try:
        _head.decode(line)
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of version {VERSION} ({error}): {line[:200]!r}") from error


class LineSplitter:
    """Splits received bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are now complete; raises ProtocolError if one does not end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line has more than {MAX_LINE_BYTES} bytes; the other side is defective")
        return lines
