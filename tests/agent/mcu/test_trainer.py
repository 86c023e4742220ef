"""Noise, junk, kills and unplugging, against the real firmware. Full size in QEMU under `long`; here a process."""

import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from port_agent.mcu.board.board_errors import DisconnectedError
from port_agent.mcu.board.firmware import Firmware, build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.data import BoardSamples
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.framing import FrameDecoder, cobs_encode, encode_frame
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.messages import HEADER, PROTOCOL_VERSION, MessageType
from port_agent.mcu.protocol.ports import PortSelector
from port_agent.mcu.protocol.queries import DeviceInfo, Status
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport, Transport
from port_agent.mcu.trainer import (
    BoardInterrupted,
    BoardSaved,
    BoardTrainer,
    Event,
    Progress,
    TrainSettings,
    sample_order,
)
from tests.agent.mcu.device_memory import read_result
from tests.agent.mcu.proxy import FaultyLine
from tests.agent.mcu.simulated_board import QUICK
from tests.agent.mcu.small_model import make_samples
from tests.attack.outcome import AttackOutcome, Survived

PATIENT = Patience(first_s=0.1, longest_s=1.0, give_up_s=60.0)
"""For QEMU on a loaded machine."""

TRAIN_LIKE = [MessageType.TRAIN, MessageType.EVAL, MessageType.INFER]


# ---- junk -------------------------------------------------------------------------------------------------------


def junk_frames(rng: random.Random, info: DeviceInfo) -> Iterator[bytes]:
    """Yield wire bytes, each of which must leave the device as it is."""
    while True:
        size = rng.choice([0, 1, 5, 20, 60, 200])
        noise = rng.randbytes(size)
        match rng.randrange(8):
            case 0:
                yield noise + b"\0"
            case 1:
                yield bytes(rng.randrange(1, 7)) + b"\0"  # fewer than an attention signal
            case 2:
                yield cobs_encode(noise) + b"\0"  # good COBS, bad CRC
            case 3:
                yield encode_frame(noise[:7])  # good CRC, no header
            case 4:  # a whole frame for another boot
                head = HEADER.pack(
                    rng.randrange(65536), rng.randrange(256), PROTOCOL_VERSION, info.nonce ^ rng.randrange(1, 1 << 32)
                )
                yield encode_frame(head + noise)
            case 5:  # right nonce, wild query
                kind = rng.choice([MessageType.READ, MessageType.CRC, 0x00, 0x07, 0x0F])
                fields = struct.pack("<III", *(rng.choice([0, 1, 111, 112, 0x7FFFFFFF, 0xFFFFFFFF]) for _ in range(3)))
                yield encode_frame(
                    HEADER.pack(rng.randrange(65536), kind, PROTOCOL_VERSION, info.nonce) + fields[: rng.randrange(13)]
                )
            case 6:  # right nonce, wrong sequence
                sequence = (info.next_sequence + rng.randrange(40_000, 60_000)) % 65536
                kind = rng.randrange(0x10, 0x80)
                yield encode_frame(HEADER.pack(sequence, kind, PROTOCOL_VERSION, info.nonce) + noise)
            case _:  # another version of the protocol
                yield encode_frame(HEADER.pack(info.next_sequence, rng.randrange(0x10, 0x80), 2, info.nonce) + noise)


def invalid_effects(rng: random.Random, info: DeviceInfo) -> Iterator[bytes]:
    """Yield contents after the header of effects in the right sequence that must be refused."""
    while True:
        wild = struct.pack("<I", rng.choice([info.parameter_bytes, 0xFFFFFFFF, 0x80000000]))
        match rng.randrange(5):
            case 0:
                yield bytes([MessageType.LOAD]) + wild + rng.randbytes(rng.randrange(1, 50))
            case 1:
                yield bytes([MessageType.PUSH]) + wild + rng.randbytes(rng.randrange(1, 50))
            case 2:
                yield (
                    bytes([rng.choice(TRAIN_LIKE)])
                    + struct.pack("<HH", rng.randrange(2, 65536), rng.choice([0, 1]))
                    + bytes(7)
                )
            case 3:
                labels = struct.pack("<H", rng.randrange(info.class_count, 65536))
                yield bytes([MessageType.TRAIN]) + struct.pack("<HH", 1, 0) + labels + rng.randbytes(info.input_bytes)
            case _:
                yield bytes([rng.choice([0x13, 0x23, 0x32, 0x40, 0x7F])]) + rng.randbytes(rng.randrange(40))


def fuzz(simulator: Simulator, frames: int, patience: Patience, window: int = 50) -> int:
    """Send junk in windows, asking for an echo after each; return the frames sent. The device must not change."""
    rng = random.Random(20)
    session = Session(SerialTransport(str(simulator.port)), patience)
    device = Device(session)
    before = device.training(), device.read_parameters()
    session.close()
    sent = 0
    transport = SerialTransport(str(simulator.port))
    junk = junk_frames(rng, device.info)
    while sent < frames:
        transport.write(b"".join(next(junk) for _ in range(window)))
        sent += window
        wait_for_echo(transport, device.info, sent & 0xFFFF, patience)
    sequence = Session(transport, patience).info.next_sequence
    assert sequence == device.session.info.next_sequence + 1  # the one OPTIONS above
    refusals = invalid_effects(rng, device.info)
    for _ in range(frames // 20):
        kind_and_rest = next(refusals)
        head = HEADER.pack(sequence, kind_and_rest[0], PROTOCOL_VERSION, device.info.nonce)
        transport.write(encode_frame(head + kind_and_rest[1:]))
        sequence = (sequence + 1) % 65536
        sent += 1
        wait_for_echo(transport, device.info, sent & 0xFFFF, patience)
    transport.close()
    after = Device(Session(SerialTransport(str(simulator.port)), patience))
    assert (after.training(), after.read_parameters()) == before
    assert after.info.nonce == device.info.nonce  # it did not even restart
    assert after.status().trained == 0
    after.session.close()
    return sent


def wait_for_echo(transport: Transport, info: DeviceInfo, sequence: int, patience: Patience) -> None:
    """Return when the device echoes; repeated, as junk may have swallowed the request."""
    data = os.urandom(8)
    frame = encode_frame(HEADER.pack(sequence, MessageType.ECHO, PROTOCOL_VERSION, info.nonce) + data)
    decoder = FrameDecoder()
    for _ in range(int(patience.give_up_s / patience.longest_s)):
        transport.write(b"\0" + frame)
        while chunk := transport.read(patience.longest_s):
            if any(content[8:] == data for content in decoder.feed(chunk)):
                return
    raise AssertionError("the device hangs")


@pytest.mark.process
def test_a_hundred_thousand_junk_frames_change_nothing(simulator: Simulator) -> None:
    assert fuzz(simulator, 100_000, QUICK) >= 100_000


def sanitized(model: Path, folder: Path) -> Firmware:
    """Build the firmware as a process that ends at anything undefined and at every access beyond its memory."""
    return build_firmware(
        "posix", model, folder, "-O1", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    )


def test_junk_touches_no_foreign_memory(model: Path, tmp_path: Path, survived: Survived) -> None:
    with Simulator(sanitized(model, tmp_path), tmp_path / "simulator") as simulator:
        sent = fuzz(simulator, 10_000, QUICK)
    assert sent >= 10_000
    survived(
        AttackOutcome(
            "ASan + UBSan, firmware, junk frames", sent, sent, notes="the device answers, its model is as before"
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("board", ["qemu-m4f", "qemu-m0"])
def test_a_hundred_thousand_junk_frames_in_qemu(board: str, built: Callable[[str], Firmware], tmp_path: Path) -> None:
    with Simulator(built(board), tmp_path / "simulator") as simulator:
        assert fuzz(simulator, 100_000, PATIENT, window=25) >= 100_000


# ---- jobs over bad lines -----------------------------------------------------------------------------------------


@dataclass
class MeasurementWorker:
    """A job on a simulated board whose power and line a test can cut."""

    simulator: Simulator
    folder: Path
    samples: BoardSamples
    settings: TrainSettings
    transport: Transport | None = None

    def trainer(
        self, port: Path, emit: Callable[[Event], None] = lambda event: None, patience: Patience = QUICK
    ) -> BoardTrainer:
        model = read_model(self.simulator.firmware.model)
        link = Link(PortSelector(path=str(port)), model, patience, self.open)
        return BoardTrainer(link, model, self.samples, self.settings, self.folder / "job", emit, wait=pause_briefly)

    def open(self, path: str) -> Transport:
        """Open a port, and remember it as the one in use."""
        self.transport = SerialTransport(path)
        return self.transport

    def reference(self, folder: Path, firmware: Firmware) -> bytes:
        """Return the parameters of the same job, undisturbed, on the process."""
        with Simulator(firmware, folder / "reference", storage=False) as simulator:
            bench = MeasurementWorker(simulator, folder / "reference", self.samples, self.settings)
            trainer = bench.trainer(simulator.port)
            trainer.start()
            assert trainer.run(lambda: False)
            trainer.close()
            return read_result(simulator)


def pause_briefly(seconds: float) -> None:
    """Wait between looks for a port; the product waits a second."""
    threading.Event().wait(min(seconds, 0.02))


def make_bench(
    simulator: Simulator, folder: Path, count: int, epochs: int, snapshot_every: int = 100
) -> MeasurementWorker:
    rows, labels = make_samples(count)
    samples = BoardSamples(np.frombuffer(b"".join(rows), np.int8).reshape(count, -1), np.array(labels))
    return MeasurementWorker(
        simulator, folder, samples, TrainSettings(epochs, 0.02, seed=3, snapshot_every=snapshot_every)
    )


def train_over_faults(
    simulator: Simulator, tmp_path: Path, steps: int, rate: float, patience: Patience
) -> tuple[bytes, MeasurementWorker, int]:
    bench = make_bench(simulator, tmp_path, 500, steps // 500, snapshot_every=1000)
    with FaultyLine(simulator.port, tmp_path / "line", rate, seed=5) as line:
        trainer = bench.trainer(line.port, patience=patience)
        trainer.start()
        assert trainer.run(lambda: False)
        trainer.close()
        faults = line.faults
    session = Session(SerialTransport(str(simulator.port)), patience)
    status = Device(session).status()
    session.close()
    assert status.trained == steps  # exactly once, counted by the device itself
    return read_result(simulator, patience), bench, faults


@pytest.mark.process
def test_training_over_a_noisy_line_is_exactly_once(
    simulator: Simulator, built: Callable[[str], Firmware], tmp_path: Path
) -> None:
    weights, bench, faults = train_over_faults(simulator, tmp_path, 5000, 5e-4, QUICK)
    assert faults > 30
    assert weights == bench.reference(tmp_path, built("posix"))


@pytest.mark.long
@pytest.mark.parametrize("board", ["qemu-m4f", "qemu-m0"])
def test_noisy_line_in_qemu(board: str, built: Callable[[str], Firmware], tmp_path: Path) -> None:
    with Simulator(built(board), tmp_path / "simulator") as simulator:
        weights, bench, faults = train_over_faults(simulator, tmp_path, 5000, 5e-4, PATIENT)
    assert faults > 30
    assert weights == bench.reference(tmp_path, built("posix"))


def train_through_kills(
    simulator: Simulator, tmp_path: Path, kills: int, patience: Patience
) -> tuple[MeasurementWorker, int]:
    """Train while the power is cut at random moments; return the bench and the kills that happened."""
    bench = make_bench(simulator, tmp_path, 400, max(1, kills // 4), snapshot_every=60)
    rng = random.Random(9)
    done = 0
    next_kill = rng.randrange(20, 80)

    def emit(event: Event) -> None:
        nonlocal done, next_kill
        if isinstance(event, Progress) and event.position.step >= next_kill and done < kills:
            done += 1
            next_kill = event.position.step + rng.randrange(5, 60)
            cut_power()

    def cut_power() -> None:
        if rng.random() < 0.5:  # in the middle of a frame
            assert bench.transport is not None
            bench.transport.write(encode_frame(bytes(range(200)))[: rng.randrange(1, 200)])
        simulator.kill()
        simulator.start()

    trainer = bench.trainer(simulator.port, emit, patience)
    trainer.start()
    assert trainer.run(lambda: False)
    trainer.close()
    return bench, done


@pytest.mark.process
def test_kills_resume_bit_exact(simulator: Simulator, built: Callable[[str], Firmware], tmp_path: Path) -> None:
    bench, kills = train_through_kills(simulator, tmp_path, 12, QUICK)
    assert kills == 12
    assert read_result(simulator) == bench.reference(tmp_path, built("posix"))


@pytest.mark.process
def test_a_board_boots_with_what_it_saved_in_the_middle_of_a_training(
    simulator: Simulator, model: Path, tmp_path: Path
) -> None:
    rows, labels = make_samples(300)
    codes = np.frombuffer(b"".join(rows), np.int8).reshape(300, -1)
    link = Link(PortSelector(path=str(simulator.port)), read_model(model), QUICK)
    saved: list[tuple[int, int, bytes]] = []

    def emit(event: Event) -> None:
        if isinstance(event, BoardSaved):
            saved.append((event.step, event.saves, link.device.read_parameters()))

    settings = TrainSettings(epochs=9, save_every=100)
    samples = BoardSamples(codes, np.array(labels))
    trainer = BoardTrainer(link, read_model(model), samples, settings, tmp_path / "state", emit)
    trainer.start()
    assert not trainer.run(lambda: len(saved) == 3 and trainer.position.step >= saved[-1][0] + 40)
    trainer.close()
    later = read_result(simulator)
    simulator.kill()
    simulator.start()
    assert read_result(simulator) == saved[-1][2] != later
    assert [count for _, count, _ in saved] == [1, 2, 3]  # the wear of its flash
    assert all(100 <= step - before < 200 for before, step in pairwise([0, *(step for step, _, _ in saved)]))


@pytest.mark.long
def test_kills_under_sanitizers(
    model: Path, built: Callable[[str], Firmware], tmp_path: Path, survived: Survived
) -> None:
    with Simulator(sanitized(model, tmp_path), tmp_path / "simulator") as simulator:
        bench, kills = train_through_kills(simulator, tmp_path, 50, QUICK)
        assert kills == 50
        assert read_result(simulator) == bench.reference(tmp_path, built("posix"))
    survived(AttackOutcome("ASan + UBSan, firmware, kills", kills, kills, notes="trained, saved, restored to the bit"))


@pytest.mark.long
@pytest.mark.parametrize("board", ["qemu-m4f", "qemu-m0"])
def test_fifty_qemu_kills_resume_bit_exact(board: str, built: Callable[[str], Firmware], tmp_path: Path) -> None:
    with Simulator(built(board), tmp_path / "simulator") as simulator:
        bench, kills = train_through_kills(simulator, tmp_path, 50, PATIENT)
        assert kills == 50
        assert read_result(simulator, PATIENT) == bench.reference(tmp_path, built("posix"))


def train_through_unplugs(
    simulator: Simulator, line: FaultyLine, tmp_path: Path, unplugs: int, patience: Patience
) -> tuple[MeasurementWorker, list[Event]]:
    """Train while the line is pulled and plugged again at random moments, often in the middle of a request."""
    bench = make_bench(simulator, tmp_path, 400, max(1, unplugs // 2), snapshot_every=10_000)
    rng = random.Random(4)
    events: list[Event] = []
    timers: list[threading.Timer] = []
    next_pull, pulled = rng.randrange(10, 60), 0

    def emit(event: Event) -> None:
        nonlocal next_pull, pulled
        events.append(event)
        if isinstance(event, BoardInterrupted) and event.resumed_at is None:
            for timer in timers:
                timer.join()
            line.unplug()
            line.plug()
        if isinstance(event, Progress) and event.position.step >= next_pull and pulled < unplugs:
            for timer in timers:
                timer.join()  # a busy machine would else finish the training before the pull
            pulled += 1
            next_pull = event.position.step + rng.randrange(10, 150)
            timer = threading.Timer(rng.random() * 0.003, line.unplug)
            timers.append(timer)
            timer.start()

    trainer = bench.trainer(line.port, emit, patience)
    trainer.start()
    assert trainer.run(lambda: False)
    trainer.close()
    for timer in timers:
        timer.join()
    line.unplug()  # the test reads the result past the line
    return bench, events


@pytest.mark.process
def test_unplug_and_replug_goes_on_without_losing_a_step(
    simulator: Simulator, line: FaultyLine, built: Callable[[str], Firmware], tmp_path: Path
) -> None:
    bench, events = train_through_unplugs(simulator, line, tmp_path, 6, QUICK)
    assert sum(isinstance(event, BoardInterrupted) and event.resumed_at is not None for event in events) >= 3
    session = Session(SerialTransport(str(simulator.port)), QUICK)
    status = Device(session).status()
    session.close()
    assert status.trained == len(bench.samples) * bench.settings.epochs  # never reset, nothing twice
    assert read_result(simulator) == bench.reference(tmp_path, built("posix"))


@pytest.mark.long
def test_unplug_and_replug_in_qemu(built: Callable[[str], Firmware], tmp_path: Path) -> None:
    with (
        Simulator(built("qemu-m4f"), tmp_path / "simulator") as simulator,
        FaultyLine(simulator.port, tmp_path / "line") as line,
    ):
        bench, events = train_through_unplugs(simulator, line, tmp_path, 20, PATIENT)
        assert sum(isinstance(event, BoardInterrupted) and event.resumed_at is not None for event in events) >= 10
        assert read_result(simulator, PATIENT) == bench.reference(tmp_path, built("posix"))


@pytest.mark.process
def test_a_dead_port_is_one_error(simulator: Simulator) -> None:
    session = Session(SerialTransport(str(simulator.port)), QUICK)
    simulator.kill()
    with pytest.raises(DisconnectedError, match="plug the board in again"):
        session.request(Status())


def test_order_of_an_epoch_never_changes() -> None:
    assert sample_order(8, seed=1, epoch=0) == [0, 3, 7, 1, 2, 4, 5, 6]
    assert sorted(sample_order(100, 1, 1)) == list(range(100)) != sample_order(100, 1, 1)
