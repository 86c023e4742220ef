"""Operate one device from the host: read and load parameters, train, evaluate, infer, take snapshots.

Sizes respect the limits in HELLO.
"""

import struct
import time
import zlib
from collections.abc import Callable
from typing import cast

from port_agent.mcu.board.board_errors import IncompatibleError, MessageError, RefusedError
from port_agent.mcu.protocol.effects import (
    Abort,
    DeviceTraining,
    Eval,
    Infer,
    LearnResult,
    Load,
    Options,
    Push,
    Restore,
    RestoreSource,
    Save,
    Train,
    TrainingOptions,
    TrainingState,
)
from port_agent.mcu.protocol.messages import ReplyStatus, Request
from port_agent.mcu.protocol.queries import (
    Crc,
    DeviceInfo,
    DevicePages,
    DeviceStatus,
    MemoryRegion,
    Pages,
    Read,
    Status,
)
from port_agent.mcu.protocol.session import Session


class Device:
    """Operations on the device of a session.

    After DisconnectedError or NoAnswerError, attach the session to a new transport and call the same operation with the
    same arguments; finished parts are not run again.
    """

    def __init__(self, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self.session = session
        self._clock = clock
        self._sample_s = 0.0

    @property
    def info(self) -> DeviceInfo:
        """Return the device's self-description."""
        return self.session.info

    @property
    def seconds_per_sample(self) -> float:
        """Return the recent time per sample, transfer included; 0 before the first."""
        return self._sample_s

    def status(self) -> DeviceStatus:
        """Return the device's counters."""
        return self.session.request(Status())

    def pages(self) -> DevicePages | None:
        """Return the device's page figures; None from firmware that does not page."""
        try:
            found = self.session.request(Pages())
        except RefusedError as error:
            if error.status != ReplyStatus.UNKNOWN_TYPE.name:
                raise
            return None
        return found if found.medium or found.needed_bytes else None

    def training(self) -> DeviceTraining:
        """Return the device's options and state."""
        return self.session.request(Options())

    def set_training(
        self, options: TrainingOptions | None = None, state: TrainingState | None = None
    ) -> DeviceTraining:
        """Set options, state or both, and return the resulting ones."""
        return self.session.request(Options(options, state))

    def read_parameters(self) -> bytes:
        """Return all parameter bytes, checked against the device's own CRC.

        Raises MessageError if they arrive damaged.
        """
        size, chunk = self.info.parameter_bytes, self.info.max_payload
        requests = (Read(at, min(chunk, size - at)) for at in range(0, size, chunk))
        data = b"".join(self.session.request(request) for request in requests)
        if zlib.crc32(data) != self.parameters_crc():
            raise MessageError(
                f"{size:,} parameter bytes read from {self.session.port} differ from their CRC; read again"
            )
        return data

    def parameters_crc(self) -> int:
        """Return the CRC-32 of all parameter bytes, computed by the device; 0 for a model without parameters."""
        return self.session.request(Crc(0, self.info.parameter_bytes)) if self.info.parameter_bytes else 0

    def load_parameters(self, data: bytes) -> None:
        """Overwrite all parameters, checked by the device's own CRC.

        Raises IncompatibleError if the number of bytes differs from the model's, MessageError if the
        device then has other ones.
        """
        if len(data) != self.info.parameter_bytes:
            raise IncompatibleError(
                f"{len(data):,} parameter bytes for a model of {self.info.parameter_bytes:,}; "
                "the snapshot belongs to another model, reflash with: port-agent mcu flash"
            )
        chunk = self.info.max_payload - 4
        for at in range(0, len(data), chunk):
            self.session.request(Load(at, data[at : at + chunk]))
        if zlib.crc32(data) != self.parameters_crc():
            raise MessageError(
                f"{len(data):,} parameter bytes loaded into {self.session.port} differ from their CRC there; load again"
            )

    def samples_per_request(self, labelled: bool = True) -> int:
        """Return how many samples fit into one request; 0 if a sample must be pushed in parts."""
        per_sample = self.info.sample_bytes + 2 if labelled else self.info.input_bytes
        return (self.info.max_payload - 4) // per_sample

    def push(self, sample: bytes) -> None:
        """Write one sample in parts, with its targets if the device must learn from it."""
        chunk = self.info.max_payload - 4
        for at in range(0, len(sample), chunk):
            self.session.request(Push(at, sample[at : at + chunk]))

    def train(self, labels: tuple[int, ...], samples: bytes) -> LearnResult:
        """Train on one request of samples (`samples_per_request`, at least 1)."""
        return self._learn(Train, labels, samples)

    def evaluate(self, labels: tuple[int, ...], samples: bytes) -> LearnResult:
        """Evaluate one request of samples."""
        return self._learn(Eval, labels, samples)

    def infer(self, samples: bytes) -> tuple[int, ...]:
        """Return the predicted classes of one request of samples."""
        count = len(samples) // self.info.input_bytes
        pushed = self.samples_per_request(labelled=False) == 0
        request = Infer(count, None if pushed else samples)
        if pushed and self.session.unfinished != request:
            self.push(samples)
        return self.session.request(request, count * self._sample_s)

    def outputs(self, sample: bytes) -> tuple[float, ...]:
        """Return the outputs for one sample: logits, or the numbers of a model with targets."""
        self.infer(sample)
        size, chunk = 4 * self.info.class_count, self.info.max_payload // 4 * 4
        requests = (Read(at, min(chunk, size - at), MemoryRegion.LOGITS) for at in range(0, size, chunk))
        data = b"".join(self.session.request(request) for request in requests)
        return struct.unpack(f"<{self.info.class_count}f", data)

    def save(self) -> DeviceTraining:
        """Write a snapshot on the device."""
        return self.session.request(Save(), work_s=1.0)  # erasing flash pages: 20 to 90 ms each

    def restore(self, source: RestoreSource = RestoreSource.SNAPSHOT) -> DeviceTraining:
        """Restore the parameters from the device's snapshot or its flash image."""
        return self.session.request(Restore(source))

    def abort(self) -> None:
        """Discard a pushed input."""
        self.session.request(Abort())

    def _learn(self, kind: type[Train] | type[Eval], labels: tuple[int, ...], samples: bytes) -> LearnResult:
        pushed = self.samples_per_request() == 0
        request = kind(labels, None if pushed else samples)
        if pushed and self.session.unfinished != request:
            self.push(samples)
        start = self._clock()
        retries = self.session.counters.retries
        result = self.session.request(cast(Request[LearnResult], request), len(labels) * self._sample_s)
        if self.session.counters.retries == retries:
            self._sample_s = max(0.9 * self._sample_s, (self._clock() - start) / max(1, result.done))
        return result
