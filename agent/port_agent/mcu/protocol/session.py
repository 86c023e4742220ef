"""Requests to one device, each with exactly one effect, over a line that may lose bytes or be unplugged.

A request is repeated until it is answered; the device answers a repeated effect from its cache. The session outlives
the transport: `attach` continues it on a new one. While the boot nonce stays the same, an interrupted effect is
completed with the same sequence number. A changed nonce means that the device lost its RAM.
"""

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from port_agent.mcu.board.board_errors import (
    DeviceResetError,
    IncompatibleError,
    MessageError,
    NoAnswerError,
    PagesFailedError,
    RefusedError,
    SequenceError,
)
from port_agent.mcu.protocol.effects import Reset
from port_agent.mcu.protocol.framing import DELIMITER, FrameDecoder, encode_frame
from port_agent.mcu.protocol.messages import (
    PROTOCOL_VERSION,
    MessageType,
    ReplyHeader,
    ReplyStatus,
    Request,
    decode_reply,
    encode_request,
)
from port_agent.mcu.protocol.queries import DeviceInfo, Hello
from port_agent.mcu.protocol.transport import Transport

R = TypeVar("R")
SEQUENCES = 1 << 16
EFFECT_REPLY_BYTES = 80
HELLO_REPLY_BYTES = 160
"""Frame sizes in bytes of the largest replies, except READ's."""
SLOWEST_BYTE_S = 1 / 30
"""Seconds per byte of the slowest supported line, 300 baud."""
LINE_GROWTH = 4
"""Factor by which a line is assumed to be slower after requests were repeated too early."""

SESSION_OVER = {ReplyStatus.BAD_SEQUENCE, ReplyStatus.WRONG_NONCE, ReplyStatus.BAD_VERSION}
"""Statuses by which the device rejects a request for good."""

REMEDIES = {
    ReplyStatus.UNKNOWN_TYPE: "the firmware is older than this agent; reflash with: port-agent mcu flash",
    ReplyStatus.BAD_VERSION: "firmware and agent speak different protocol versions; reflash with: port-agent mcu flash",
    ReplyStatus.BAD_LENGTH: "the request does not fit this model; reflash with the job's model: port-agent mcu flash",
    ReplyStatus.OUT_OF_RANGE: "a label, offset or option is outside this model; check data set and model",
    ReplyStatus.NO_INPUT: "push the whole input first",
    ReplyStatus.NO_SNAPSHOT: "the device holds no snapshot of this model; train from the start",
    ReplyStatus.NO_STORAGE: "this board keeps no snapshots; the host's snapshots are used instead",
    ReplyStatus.STORAGE_FAILED: "its flash may be worn out; the host's snapshots are used instead",
    ReplyStatus.UNSUPPORTED: "the model was compiled for inference only or without Q8.8; compile it again for training",
    ReplyStatus.ENGINE_FAILED: "the engine stopped; please report this with the output of port-agent mcu logs",
    ReplyStatus.MEDIUM_FAILED: "its external memory does not respond; check card, chip "
    "and wiring, then resume from the snapshot",
    ReplyStatus.PAGE_DAMAGED: "its external memory returned other data than was written; resume from the snapshot",
    ReplyStatus.MODEL_TORN: "a training step was interrupted; resume from the snapshot, nothing of that step is kept",
}
PAGES_FAILED = frozenset({ReplyStatus.MEDIUM_FAILED, ReplyStatus.PAGE_DAMAGED, ReplyStatus.MODEL_TORN})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait and how often to repeat a request. All in seconds."""

    first_s: float = 0.5
    """Wait before the first repetition of a quick request; doubles with each."""
    longest_s: float = 2.0
    give_up_s: float = 20.0
    """Seconds without an answer after which the device counts as dead; long requests add their own time."""
    wire_bytes_per_s: float = 11_520.0
    """Bytes per second of the fastest line that is assumed: 115200 baud, 8N1. Slower lines are measured.

    USB and simulated ports are faster, which costs no more than a later first repetition.
    """


DEFAULT_PATIENCE = Patience()


@dataclass(slots=True)
class SessionCounters:
    """What has happened in a session."""

    requests: int = 0
    retries: int = 0
    stray_replies: int = 0
    damaged_replies: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    request: Request[object]
    sequence: int
    frame: bytes


class Session:
    """A session with one device, over the transport that connects it at the moment."""

    def __init__(
        self,
        transport: Transport,
        patience: Patience = DEFAULT_PATIENCE,
        clock: Callable[[], float] = time.monotonic,
        token: Callable[[], int] = lambda: secrets.randbits(32),
    ) -> None:
        """Send HELLO over `transport`."""
        self.counters = SessionCounters()
        self._patience = patience
        self._clock = clock
        self._token = token
        self._decoder = FrameDecoder()
        self._transport = transport
        self._query_sequence = secrets.randbelow(SEQUENCES)
        self._pending: _Pending | None = None
        self._byte_s = 1 / patience.wire_bytes_per_s
        """Seconds per byte on this line, by the latest answers."""
        self._strays = 0
        self.info = self._hello()
        self._next_sequence = self.info.next_sequence

    @property
    def port(self) -> str:
        """Return the name of the port in use."""
        return self._transport.name

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def attach(self, transport: Transport) -> None:
        """Continue over a new transport.

        Raises DeviceResetError if the device has lost its state meanwhile, and SequenceError if it expects a
        number that was never sent.
        """
        self._transport.close()
        self._transport = transport
        self._decoder.clear()
        info = self._hello()
        if info.nonce != self.info.nonce or info.model_hash != self.info.model_hash:
            raise DeviceResetError(self.port, self.info.nonce, info.nonce)
        possible = {self._next_sequence}
        if self._pending:
            possible.add((self._next_sequence + 1) % SEQUENCES)  # the effect ran, and only its reply was lost
        if info.next_sequence not in possible:
            raise SequenceError(self.port, self._next_sequence, info.next_sequence)

    def reset(self) -> None:
        """Restart the device and open a new session with it."""
        # the reply may be lost; the repeated request then meets the new boot
        with contextlib.suppress(DeviceResetError):
            self.request(Reset())
        self._pending = None
        self._decoder.clear()
        self.info = self._hello()
        self._next_sequence = self.info.next_sequence

    def request(self, request: Request[R], work_s: float = 0.0) -> R:
        """Return the reply to `request`.

        `work_s`: seconds that the device needs for it, besides the transfer. If DisconnectedError or NoAnswerError
        interrupts an effect, repeating the same request completes it.
        """
        self.counters.requests += 1
        if request.type.is_effect:
            return self._effect(request, work_s)
        self._query_sequence = (self._query_sequence + 1) % SEQUENCES
        frame = encode_frame(encode_request(self._query_sequence, self.info.nonce, request))
        header, payload = self._exchange(request, self._query_sequence, frame, work_s)
        return self._finish(request, self._query_sequence, header, payload)

    def _effect(self, request: Request[R], work_s: float) -> R:
        if self._pending is not None and self._pending.request != request:
            self._settle()
        if self._pending is None:
            frame = encode_frame(encode_request(self._next_sequence, self.info.nonce, request))
            self._pending = _Pending(request, self._next_sequence, frame)
        pending = self._pending
        header, payload = self._exchange(request, pending.sequence, pending.frame, work_s)
        if header.status not in SESSION_OVER:
            self._pending = None
            self._next_sequence = (pending.sequence + 1) % SEQUENCES
        return self._finish(request, pending.sequence, header, payload)

    def _settle(self) -> None:
        """Complete an interrupted effect whose reply is no longer needed."""
        if self._pending is None:
            return
        kind = self._pending.request.type
        if kind is MessageType.TRAIN:
            raise MessageError(f"{kind.name} was interrupted and its outcome is unknown; give it again first")
        self._effect(self._pending.request, work_s=1.0)

    @property
    def unfinished(self) -> Request[object] | None:
        """Return the effect whose outcome is unknown and which must be repeated; None if there is none."""
        return self._pending.request if self._pending else None

    def _finish(self, request: Request[R], sequence: int, header: ReplyHeader, payload: bytes) -> R:
        match header.status:
            case ReplyStatus.OK:
                return request.read_reply(payload)
            case ReplyStatus.WRONG_NONCE:
                raise DeviceResetError(self.port, self.info.nonce, header.nonce)
            case ReplyStatus.BAD_SEQUENCE:
                raise SequenceError(self.port, sequence, int.from_bytes(payload, "little"))
            case status if status in PAGES_FAILED:
                raise PagesFailedError(request.type.name, status.name, REMEDIES[status])
            case _:
                raise RefusedError(request.type.name, header.status.name, REMEDIES[header.status])

    def _exchange(
        self, request: Request[object], sequence: int, frame: bytes, work_s: float
    ) -> tuple[ReplyHeader, bytes]:
        size = len(frame) + self._reply_bytes(request.type)
        expected_s = work_s + size * self._byte_s
        wait = self._patience.first_s + 1.5 * expected_s
        longest = max(self._patience.longest_s, wait)
        start = self._clock()
        end = start + self._patience.give_up_s + 4 * expected_s
        tries = 0
        while True:
            now = self._clock()
            if now >= end:
                raise NoAnswerError(self.port, request.type.name, now - start, tries)
            # a leading delimiter ends any noise or partial frame before it
            self._transport.write(DELIMITER + frame if tries else frame)
            tries, sent = tries + 1, self._clock()
            reply = self._receive(request.type, sequence, min(end, self._clock() + wait))
            if reply is not None:
                self._measure_line(tries == 1, (self._clock() - sent - work_s) / size)
                return reply
            self.counters.retries += 1
            wait = min(2 * wait, longest)

    def _reply_bytes(self, kind: MessageType) -> int:
        if kind is MessageType.READ:
            return self.info.max_payload
        return EFFECT_REPLY_BYTES if kind.is_effect else HELLO_REPLY_BYTES

    def _measure_line(self, is_first: bool, byte_s: float) -> None:
        """Update the line's speed from an answer, by the time since the request was last sent.

        After a repetition, that time is a lower bound: the answer may belong to an earlier attempt. Repeated answers to
        one request distinguish a slow line, on which repetitions arrive, from one that loses frames.
        """
        repeated = self.counters.stray_replies - self._strays
        self._strays = self.counters.stray_replies
        if repeated:
            byte_s = max(byte_s, LINE_GROWTH * self._byte_s)
        elif not is_first:
            byte_s = max(byte_s, self._byte_s)
        self._byte_s = min(max(1 / self._patience.wire_bytes_per_s, byte_s), SLOWEST_BYTE_S)

    def _receive(self, kind: MessageType, sequence: int, deadline: float) -> tuple[ReplyHeader, bytes] | None:
        while (left := deadline - self._clock()) > 0:
            reply = None
            for content in self._decoder.feed(self._transport.read(left)):
                reply = self._match(content, kind, sequence) or reply
            self.counters.damaged_replies = self._decoder.counters.damaged + self._decoder.counters.overlong
            if reply is not None:
                return reply
        return None

    def _match(self, content: bytes, kind: MessageType, sequence: int) -> tuple[ReplyHeader, bytes] | None:
        try:
            header, payload = decode_reply(content)
        except MessageError:
            self.counters.stray_replies += 1
            return None
        if header.sequence != sequence or header.type != kind:
            self.counters.stray_replies += 1
            return None
        return header, payload

    def _hello(self) -> DeviceInfo:
        """Return the device's self-description; each repetition has a new token and number."""
        self._transport.write(DELIMITER * 2)
        start = self._clock()
        wait, tries = self._patience.first_s, 0
        while self._clock() < start + self._patience.give_up_s:
            tries += 1
            self._query_sequence = (self._query_sequence + 1) % SEQUENCES
            request = Hello(self._token())
            self._transport.write(DELIMITER + encode_frame(encode_request(self._query_sequence, 0, request)))
            reply = self._receive(MessageType.HELLO, self._query_sequence, self._clock() + wait)
            if reply is not None:
                return self._read_hello(request, *reply)
            wait = min(2 * wait, self._patience.longest_s)
        raise NoAnswerError(self.port, "HELLO", self._clock() - start, tries)

    def _read_hello(self, request: Hello, header: ReplyHeader, payload: bytes) -> DeviceInfo:
        try:
            info = request.read_reply(payload)
        except MessageError as error:
            raise IncompatibleError(
                f"{error}; {self.port} runs incompatible firmware, reflash with: port-agent mcu flash"
            ) from error
        if not info.oldest_protocol <= PROTOCOL_VERSION <= info.protocol:
            raise IncompatibleError(
                f"firmware {info.firmware_version} on {self.port} speaks protocol {info.oldest_protocol}.."
                f"{info.protocol}, but this agent speaks {PROTOCOL_VERSION}; reflash with: port-agent mcu flash"
            )
        return info
