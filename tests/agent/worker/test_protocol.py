"""The lines of the workers' conversation: what is written is read back, and what is no message is refused."""

import math

import pytest

from port_agent.worker import protocol
from port_agent.worker.protocol import (
    Command,
    DeviceInterrupted,
    EvaluationDone,
    Event,
    FailureCause,
    LeaveNow,
    LineSplitter,
    MemoryReleased,
    PauseTraining,
    ProtocolError,
    ReleaseMemory,
    StateRecovered,
    StepDone,
    SwitchPlan,
    TrainingFailed,
    TrainingFinished,
    WorkerPaused,
    WorkerReady,
    decode_command,
    decode_event,
    encode_message,
)

STEP = StepDone(step=3, epoch=0, loss=0.5, wall_s=1.0, cpu_s=0.9, phases_s={"forward": 0.25})


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (WorkerPaused(step=7), b'{"v":1,"event":"paused","step":7}\n'),
        (
            WorkerPaused(step=7, operator="aten::mm", waited_s=0.5),
            b'{"v":1,"event":"paused","step":7,"operator":"aten::mm","waited_s":0.5}\n',
        ),
        (
            MemoryReleased(step=7, resident_bytes=9, wall_s=0.5),
            b'{"v":1,"event":"released","step":7,"resident_bytes":9,"wall_s":0.5,"paged_out_bytes":0,"unworn_bytes":0}\n',
        ),
        (PauseTraining(), b'{"v":1,"cmd":"pause"}\n'),
        (ReleaseMemory(reason="heat"), b'{"v":1,"cmd":"release","reason":"heat"}\n'),
        (SwitchPlan(plan=2, reason="heat"), b'{"v":1,"cmd":"plan","plan":2,"reason":"heat"}\n'),
        (
            TrainingFailed(code="MemoryError", message="none left", cause=FailureCause.OUT_OF_MEMORY),
            b'{"v":1,"event":"failed","code":"MemoryError","message":"none left","cause":"out-of-memory"}\n',
        ),
    ],
)
def test_lines_as_they_are_on_the_wire(message: Event | Command, line: bytes) -> None:
    assert encode_message(message) == line


@pytest.mark.parametrize(
    "event",
    [
        WorkerReady(pid=1, step=0, total_steps=None),
        STEP,
        EvaluationDone(step=3, loss=None),
        DeviceInterrupted(reason="unplugged"),
        StateRecovered(step=3, reason="rot", lost_steps=2),
        TrainingFinished(step=9, out="w.safetensors"),
        TrainingFailed(code="BundleError", message="broken", cause=FailureCause.IMPOSSIBLE),
    ],
)
def test_events_are_read_back(event: Event) -> None:
    assert decode_event(encode_message(event)) == event


def test_a_loss_that_is_not_finite_travels_as_null() -> None:
    decoded = decode_event(encode_message(EvaluationDone(step=1, loss=math.nan, metric=math.inf)))
    assert decoded == EvaluationDone(step=1, loss=None, metric=None)


def test_fields_of_a_later_agent_are_skipped() -> None:
    assert decode_event(b'{"v":1,"event":"paused","step":7,"why":"new"}') == WorkerPaused(step=7)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"[1]", b"\xff\xfe", b'{"v": 9, "cmd": "leave"}', b'{"v": 1}', b'{"cmd": "leave"}',
        b'{"v": 1, "cmd": 7}', b'{"v": 1, "cmd": "plan"}', b'{"v": 1, "cmd": "plan", "plan": "x"}',
        b'{"v": 1, "cmd": "dance"}', b'{"v": 1, "event": "paused", "step": 1}',
    ],
)  # fmt: skip
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message of version 1"):
        decode_command(line)


def test_every_truncation_of_a_line_is_refused() -> None:
    line = encode_message(STEP).rstrip()
    for end in range(len(line)):
        with pytest.raises(ProtocolError):
            decode_event(line[:end])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_are_cut_however_they_arrive(size: int) -> None:
    data = encode_message(PauseTraining()) + encode_message(LeaveNow())
    splitter = LineSplitter()
    lines = [line for at in range(0, len(data), size) for line in splitter.feed(data[at : at + size])]
    assert [decode_command(line) for line in lines] == [PauseTraining(), LeaveNow()]


def test_a_line_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINE_BYTES", 100)
    splitter = LineSplitter()
    assert splitter.feed(b"x" * 100) == []
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        splitter.feed(b"x")
