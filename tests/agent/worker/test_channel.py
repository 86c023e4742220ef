"""The line between a worker and who started it: messages in order, nonsense skipped, ends
seen by the side that reads.
"""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from port_agent.worker.channel import Channel
from port_agent.worker.protocol import (
    MAX_LINE_BYTES,
    Command,
    Event,
    LeaveNow,
    PauseTraining,
    StepDone,
    SwitchPlan,
    WorkerPaused,
    encode_message,
)

PATIENCE_S = 60.0
STEP = StepDone(step=3, epoch=0, loss=None, wall_s=1.0, cpu_s=1.0, phases_s={})


class Line:
    """Our end as a channel, theirs as a socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.theirs.settimeout(PATIENCE_S)
        self.channel = Channel(ours.detach())


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.theirs.close()
    made.channel.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_events_come_whole_however_they_are_cut(line: Line, size: int) -> None:
    said: list[Event] = [STEP, WorkerPaused(step=3), STEP]
    data = b"".join(map(encode_message, said))

    def speak() -> None:
        with line.theirs:
            for start in range(0, len(data), size):
                line.theirs.sendall(data[start : start + size])

    thread = threading.Thread(target=speak)
    thread.start()
    assert list(line.channel.events()) == said
    thread.join(PATIENCE_S)


def test_what_is_no_event_is_skipped_and_half_a_line_is_none(line: Line) -> None:
    line.theirs.sendall(b"\n[]\n" + encode_message(PauseTraining()) + encode_message(STEP) + encode_message(STEP)[:-1])
    line.theirs.close()
    assert list(line.channel.events()) == [STEP]


def test_a_line_without_an_end_ends_the_conversation(line: Line) -> None:
    def babble() -> None:
        with line.theirs:
            line.theirs.sendall(encode_message(STEP) + b"x" * (MAX_LINE_BYTES + 1))

    thread = threading.Thread(target=babble)
    thread.start()
    assert list(line.channel.events()) == [STEP]
    thread.join(PATIENCE_S)


def test_commands_are_heard_in_a_thread_and_then_that_the_other_side_is_gone(line: Line) -> None:
    heard: list[Command | str] = []
    thread = line.channel.listen(heard.append, lambda: heard.append("gone"))
    assert thread.daemon, "a worker that ends does not wait for its supervisor"
    commands: list[Command] = [PauseTraining(), SwitchPlan(plan=2), LeaveNow()]
    line.theirs.sendall(b'{"v":1,"cmd":"dance"}\n' + b"".join(map(encode_message, commands)))
    line.theirs.close()
    thread.join(PATIENCE_S)
    assert heard == [*commands, "gone"]


def test_saying_something_to_nobody_is_no_error(line: Line) -> None:
    line.theirs.close()
    for _ in range(2):  # the first may still be buffered
        line.channel.send(STEP)


def test_messages_of_several_threads_are_not_mixed(line: Line) -> None:
    """The trainer, the control thread and a board's reader all speak."""
    count = 200

    def speak(step: int) -> None:
        for _ in range(count):
            line.channel.send(WorkerPaused(step=step))

    threads = [threading.Thread(target=speak, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    data = b""
    wanted = 4 * count
    while data.count(b"\n") < wanted:
        data += line.theirs.recv(1 << 16)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(set(data.splitlines())) == [encode_message(WorkerPaused(step=step))[:-1] for step in range(4)]


def test_closing_gives_the_descriptor_back() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        number = ours.fileno()
        Channel(ours.detach()).close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        assert theirs.recv(1) == b""
