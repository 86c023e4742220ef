"""The session's patience, against a scripted line and a clock of its own: nothing here waits."""

import itertools
from collections.abc import Callable

import pytest

from port_agent.mcu.board.board_errors import (
    DeviceResetError,
    DisconnectedError,
    IncompatibleError,
    NoAnswerError,
    SequenceError,
)
from port_agent.mcu.protocol.effects import Load, Train
from port_agent.mcu.protocol.framing import FrameDecoder, encode_frame
from port_agent.mcu.protocol.messages import HEADER, REPLY_BIT, MessageType, ReplyStatus
from port_agent.mcu.protocol.queries import Crc, Echo
from port_agent.mcu.protocol.session import Patience, Session
from tests.agent.mcu.examples import HELLO, LEARNT, NONCE

PATIENCE = Patience(first_s=1.0, longest_s=4.0, give_up_s=20.0, wire_bytes_per_s=1e9)


class Script:
    """A device whose answers a test decides; time passes only while the host waits."""

    name = "scripted"

    def __init__(self, answer: Callable[[int, int, bytes], bytes | None] | None = None) -> None:
        self.now = 0.0
        self.seen: list[tuple[float, int, int]] = []
        self.answer = answer or (lambda sequence, kind, payload: b"")
        self.hello = HELLO
        self.nonce = NONCE
        self.dead = False
        self._decoder = FrameDecoder()
        self._replies: list[bytes] = []

    def clock(self) -> float:
        return self.now

    def write(self, data: bytes) -> None:
        if self.dead:
            raise DisconnectedError(self.name, "scripted")
        for content in self._decoder.feed(data):
            sequence, kind, _, _ = HEADER.unpack_from(content)
            self.seen.append((self.now, sequence, kind))
            payload = self.hello if kind == MessageType.HELLO else self.answer(sequence, kind, content[8:])
            if payload is not None:
                self.reply(sequence, kind, payload)

    def reply(self, sequence: int, kind: int, payload: bytes, status: ReplyStatus = ReplyStatus.OK) -> None:
        self._replies.append(encode_frame(HEADER.pack(sequence, kind | REPLY_BIT, status, self.nonce) + payload))

    def read(self, timeout_s: float) -> bytes:
        if self.dead:
            raise DisconnectedError(self.name, "scripted")
        if self._replies:
            return self._replies.pop(0)
        self.now += timeout_s
        return b""

    def discard(self) -> None:
        self._replies.clear()

    def close(self) -> None:
        pass


class SlowLine(Script):
    """A line on which each byte takes its time, both ways; what is sent again waits behind what was sent before."""

    byte_s = 1 / 300

    def __init__(self) -> None:
        super().__init__()
        self.free = 0.0
        self.due: list[float] = []

    def write(self, data: bytes) -> None:
        self.free = max(self.free, self.now) + len(data) * self.byte_s
        super().write(data)
        self.due += [self.free] * (len(self._replies) - len(self.due))

    def read(self, timeout_s: float) -> bytes:
        if not self._replies or self.due[0] > self.now + timeout_s:
            self.now += timeout_s
            return b""
        self.now = max(self.now, self.due.pop(0))
        return self._replies.pop(0)


def open_session(script: Script) -> Session:
    return Session(script, PATIENCE, script.clock, token=lambda: 7)


def test_silence_is_asked_again_ever_more_slowly_and_then_given_up() -> None:
    script = Script(lambda sequence, kind, payload: None)
    session = open_session(script)
    script.seen.clear()
    with pytest.raises(NoAnswerError, match="mcu flash") as caught:
        session.request(Crc(0, 1))
    times = [time for time, _, _ in script.seen]
    gaps = [round(after - before, 1) for before, after in itertools.pairwise(times)]
    assert gaps[:4] == [1.0, 2.0, 4.0, 4.0] and caught.value.tries == len(times) and 20 <= script.now < 21
    assert len({sequence for _, sequence, _ in script.seen}) == 1  # the same request, not another one


def test_long_work_is_waited_for_before_asking_again() -> None:
    script = Script(lambda sequence, kind, payload: None)
    session = open_session(script)
    script.seen.clear()
    with pytest.raises(NoAnswerError):
        session.request(Train((0,), bytes(24)), work_s=30.0)
    assert script.seen[1][0] - script.seen[0][0] > 45.0


def test_a_slow_line_is_measured_and_then_waited_for() -> None:
    line = SlowLine()
    session = Session(line, Patience(), line.clock, token=lambda: 7)
    for number in range(12):
        session.request(Load(0, bytes(1000)))
        if number == 5:
            tries, before = session.counters.retries, line.now
    assert tries > 0 and session.counters.retries == tries  # it learnt, and sends each request once
    assert (line.now - before) / 6 < 1.1 * 1020 * line.byte_s
    line.byte_s = 1e-6
    for _ in range(12):
        session.request(Load(0, bytes(1000)))
    assert session._byte_s == 1 / 11_520


def test_a_fast_line_that_loses_every_second_frame_is_not_taken_for_a_slow_one() -> None:
    lost = itertools.cycle([True, False])
    script = Script(lambda sequence, kind, payload: None if next(lost) else b"")
    session = Session(script, Patience(), script.clock, token=lambda: 7)
    for _ in range(200):
        session.request(Load(0, bytes(1000)))
        session.request(Load(1, b"a"))
    assert script.now < 400 * 1.0  # as if each took its first wait


def test_late_and_foreign_replies_are_not_taken_for_the_answer() -> None:
    def answer(sequence: int, kind: int, payload: bytes) -> bytes:
        script.reply(sequence - 1, kind, b"old")
        script.reply(sequence, MessageType.STATUS, b"other")
        return payload

    script = Script(answer)
    session = open_session(script)
    assert session.request(Echo(b"mine")) == b"mine"
    assert session.counters.stray_replies == 2


def test_effects_count_and_queries_do_not() -> None:
    script = Script(lambda sequence, kind, payload: payload if kind == MessageType.ECHO else b"")
    session = open_session(script)
    script.seen.clear()
    session.request(Load(0, b"a"))
    session.request(Echo(b"x"))
    session.request(Load(1, b"b"))
    effects = [sequence for _, sequence, kind in script.seen if kind == MessageType.LOAD]
    assert effects == [5, 6]  # HELLO said 5 is next


def cut_off(script: Script) -> Session:
    """Return a session whose TRAIN was sent and never answered, because the line broke."""
    session = open_session(script)

    def breaks(sequence: int, kind: int, payload: bytes) -> None:
        script.dead = True

    script.answer = breaks
    with pytest.raises(DisconnectedError):
        session.request(Train((1, 3), bytes(48)))
    assert isinstance(session.unfinished, Train)
    return session


@pytest.mark.parametrize("executed", [False, True])
def test_effect_is_finished_with_its_own_number_after_a_replug(executed: bool) -> None:
    session = cut_off(Script())
    again = Script(lambda sequence, kind, payload: LEARNT)
    again.hello = HELLO[:20] + (6 if executed else 5).to_bytes(2, "little") + HELLO[22:]
    session._clock = again.clock
    session.attach(again)
    assert session.request(Train((1, 3), bytes(48))).done == 2
    assert [sequence for _, sequence, kind in again.seen if kind == MessageType.TRAIN] == [5]
    assert session.unfinished is None


def test_reset_meanwhile_is_not_survived() -> None:
    session = cut_off(Script())
    again = Script()
    again.hello = HELLO[:16] + b"\x01\0\0\0" + HELLO[20:]
    with pytest.raises(DeviceResetError, match="00000001"):
        session.attach(again)


def test_sequence_that_somebody_else_moved_is_noticed() -> None:
    session = cut_off(Script())
    again = Script()
    again.hello = HELLO[:20] + b"\x07\0" + HELLO[22:]
    with pytest.raises(SequenceError, match="expects request 7, not 5"):
        session.attach(again)


def test_other_protocol_versions_name_the_remedy() -> None:
    script = Script()
    script.hello = b"\x09\x08" + HELLO[2:]
    with pytest.raises(IncompatibleError, match=r"speaks protocol 8\.\.9, but this agent speaks 1; reflash with"):
        open_session(script)
    script.hello = HELLO[:-1]
    with pytest.raises(IncompatibleError, match="143 bytes, expected 144"):
        open_session(script)


def test_refused_request_has_used_its_number() -> None:
    script = Script()

    def refuse(sequence: int, kind: int, payload: bytes) -> None:
        script.reply(sequence, kind, b"", ReplyStatus.OUT_OF_RANGE)

    session = open_session(script)
    script.answer = refuse
    for expected in (5, 6):
        with pytest.raises(Exception, match="OUT_OF_RANGE"):
            session.request(Load(9999, b"a"))
        assert script.seen[-1][1] == expected
