"""Requests that change the device, each exactly once, with their replies: parameters, options, training, snapshots.

The other end: firmware/src/effects.c.
"""

import enum
import struct
from dataclasses import dataclass
from typing import ClassVar

from port_agent.mcu.board.board_errors import MessageError
from port_agent.mcu.protocol.messages import MessageType, expect_empty, unpack_reply


class Rule(enum.IntEnum):
    """How the int8 update is rounded (port_rule of firmware/include/port_engine.h)."""

    STOCHASTIC = 0
    NEAREST = 1
    TRUNCATE = 2
    Q88 = 3


class RestoreSource(enum.IntEnum):
    """The place from which RESTORE takes the parameters."""

    SNAPSHOT = 0
    INITIAL = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Overwrite parameter bytes from `offset`."""

    offset: int
    data: bytes
    type: ClassVar[MessageType] = MessageType.LOAD

    def payload(self) -> bytes:
        return struct.pack("<I", self.offset) + self.data

    def read_reply(self, payload: bytes) -> None:
        expect_empty(payload, "LOAD")


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Learning rate and rounding of the update.

    `scaling` is quantisation-aware scaling.
    """

    learning_rate: float
    rule: Rule = Rule.STOCHASTIC
    scaling: bool = True


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a snapshot needs besides parameters and options."""

    generator: int
    steps: int


@dataclass(frozen=True, slots=True)
class DeviceTraining:
    """The device's options and state.

    `generation` counts snapshots (0: not one).
    """

    options: TrainingOptions
    state: TrainingState
    generation: int


_TRAINING = struct.Struct("<fBBHIII")


def _read_training(payload: bytes, name: str) -> DeviceTraining:
    rate, rule, scaling, _, generator, steps, generation = unpack_reply(_TRAINING, payload, name)
    try:
        options = TrainingOptions(rate, Rule(rule), bool(scaling))
    except ValueError as error:
        raise MessageError(f"{name} reply: {error}") from error
    return DeviceTraining(options, TrainingState(generator, steps), generation)


@dataclass(frozen=True, slots=True)
class Options:
    """Set the given options and read all of them."""

    options: TrainingOptions | None = None
    state: TrainingState | None = None
    type: ClassVar[MessageType] = MessageType.OPTIONS

    def payload(self) -> bytes:
        flags = (self.options is not None) | (self.state is not None) << 1
        options = self.options or TrainingOptions(0.0)
        state = self.state or TrainingState(0, 0)
        return struct.pack(
            "<IfBBHII", flags, options.learning_rate, options.rule, options.scaling, 0, state.generator, state.steps
        )

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "OPTIONS")


@dataclass(frozen=True, slots=True)
class Push:
    """Write a part of the input tensor; parts must be in order, and offset 0 starts again."""

    offset: int
    data: bytes
    type: ClassVar[MessageType] = MessageType.PUSH

    def payload(self) -> bytes:
        return struct.pack("<I", self.offset) + self.data

    def read_reply(self, payload: bytes) -> None:
        expect_empty(payload, "PUSH")


@dataclass(frozen=True, slots=True)
class LearnResult:
    """Outcome of TRAIN or EVAL: `done` samples of those sent.

    Fewer if the host asked for attention.
    """

    done: int
    correct: int
    loss_sum: float
    state: TrainingState


_LEARN = struct.Struct("<HHfII")
_SAMPLES = struct.Struct("<HH")
SAMPLE_PUSHED = 1


def _labelled(labels: tuple[int, ...], samples: bytes | None) -> bytes:
    head = _SAMPLES.pack(len(labels), SAMPLE_PUSHED if samples is None else 0)
    return head + struct.pack(f"<{len(labels)}H", *labels) + (samples or b"")


def _read_learn(payload: bytes, name: str) -> LearnResult:
    done, correct, loss, generator, steps = unpack_reply(_LEARN, payload, name)
    return LearnResult(done, correct, loss, TrainingState(generator, steps))


@dataclass(frozen=True, slots=True)
class Train:
    """Train on samples in sequence, or, with `samples` None and one label, on the pushed input."""

    labels: tuple[int, ...]
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.TRAIN

    def payload(self) -> bytes:
        return _labelled(self.labels, self.samples)

    def read_reply(self, payload: bytes) -> LearnResult:
        return _read_learn(payload, "TRAIN")


@dataclass(frozen=True, slots=True)
class Eval:
    """Count correct predictions and loss; the reply contains the unchanged state."""

    labels: tuple[int, ...]
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.EVAL

    def payload(self) -> bytes:
        return _labelled(self.labels, self.samples)

    def read_reply(self, payload: bytes) -> LearnResult:
        return _read_learn(payload, "EVAL")


INFER_MAX = 31
"""Largest number of samples per INFER, because the reply must fit into the device's reply cache of 64 bytes."""


@dataclass(frozen=True, slots=True)
class Infer:
    """Predict the classes of `count` samples, or (`samples` None) of the pushed input."""

    count: int
    samples: bytes | None
    type: ClassVar[MessageType] = MessageType.INFER

    def payload(self) -> bytes:
        return _SAMPLES.pack(self.count, SAMPLE_PUSHED if self.samples is None else 0) + (self.samples or b"")

    def read_reply(self, payload: bytes) -> tuple[int, ...]:
        """Return the classes, one for each sample.

        Raises MessageError if the reply has another length.
        """
        done, *classes = unpack_reply(struct.Struct(f"<H{self.count}H"), payload, "INFER")
        if done != self.count:
            raise MessageError(f"INFER did {done} of {self.count} samples")
        return tuple(classes)


@dataclass(frozen=True, slots=True)
class Save:
    """Write a snapshot to the device's non-volatile memory."""

    type: ClassVar[MessageType] = MessageType.SAVE

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "SAVE")


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore the parameters from the newest snapshot, or from the flash image."""

    source: RestoreSource = RestoreSource.SNAPSHOT
    type: ClassVar[MessageType] = MessageType.RESTORE

    def payload(self) -> bytes:
        return bytes([self.source])

    def read_reply(self, payload: bytes) -> DeviceTraining:
        return _read_training(payload, "RESTORE")


@dataclass(frozen=True, slots=True)
class Abort:
    """Discard a pushed input. (A running TRAIN is stopped by framing.ATTENTION.)"""

    type: ClassVar[MessageType] = MessageType.ABORT

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> None:
        expect_empty(payload, "ABORT")


@dataclass(frozen=True, slots=True)
class Reset:
    """Restart the device; its RAM and the session are lost."""

    type: ClassVar[MessageType] = MessageType.RESET

    def payload(self) -> bytes:
        return b""

    def read_reply(self, payload: bytes) -> None:
        expect_empty(payload, "RESET")
