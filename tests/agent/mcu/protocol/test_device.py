"""The real firmware, as a process, through the real session: what it does, and what it refuses."""

import math
import struct
import zlib
from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import (
    DeviceResetError,
    IncompatibleError,
    MessageError,
    RefusedError,
    SequenceError,
)
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.effects import (
    Infer,
    Load,
    Options,
    Push,
    RestoreSource,
    Rule,
    Train,
    TrainingOptions,
    TrainingState,
)
from port_agent.mcu.protocol.framing import ATTENTION, FrameDecoder, encode_frame
from port_agent.mcu.protocol.messages import PROTOCOL_VERSION, MessageType, ReplyStatus, decode_reply, encode_request
from port_agent.mcu.protocol.queries import Crc, Echo, MemoryRegion, Read, ResetReason
from port_agent.mcu.protocol.session import Session
from port_agent.mcu.protocol.transport import SerialTransport
from tests.agent.mcu.simulated_board import QUICK, require_board_tools
from tests.agent.mcu.small_model import CLASSES, INPUTS, PARAMETER_BYTES, make_samples, write_model

pytestmark = pytest.mark.process

SAMPLES, LABELS = make_samples(200)


def train_all(device: Device, epochs: int = 1) -> list[int]:
    """Train on all samples in order; return right predictions per epoch."""
    right = []
    size = device.samples_per_request()
    for _ in range(epochs):
        right.append(0)
        for at in range(0, len(SAMPLES), size):
            batch = slice(at, at + size)
            right[-1] += device.train(tuple(LABELS[batch]), b"".join(SAMPLES[batch])).correct
    return right


def test_hello_describes_board_and_model(device: Device, model: Path) -> None:
    info, described = device.info, read_model(model)
    assert (info.board, info.model, info.firmware_version) == ("posix", "small", "0.1.0")
    assert (info.input_bytes, info.class_count, info.parameter_bytes) == (INPUTS, CLASSES, PARAMETER_BYTES)
    assert info.model_hash == described.sha256 and info.arena_bytes == described.arena_bytes
    assert info.trains and not info.has_q88 and info.has_storage and not info.has_snapshot
    assert info.nonce != 0


def test_training_learns_and_counts(device: Device) -> None:
    device.set_training(TrainingOptions(0.02), TrainingState(generator=7, steps=0))
    right = train_all(device, epochs=2)
    assert right[1] > 190 > right[0] / 2
    status = device.status()
    # on a loaded machine a late answer is asked for twice, and the second time it comes from the cache: no error
    assert (status.trained, status.frame_errors, status.refused) == (400, 0, 0)
    assert device.training().state.steps == 400
    assert device.infer(b"".join(SAMPLES[:20])) == tuple(LABELS[:20])
    logits = struct.unpack(f"<{CLASSES}f", device.session.request(Read(0, 4 * CLASSES, MemoryRegion.LOGITS)))
    assert max(range(CLASSES), key=logits.__getitem__) == LABELS[19]


def test_evaluation_changes_nothing(device: Device) -> None:
    before, state = device.parameters_crc(), device.training().state
    result = device.evaluate(tuple(LABELS[:30]), b"".join(SAMPLES[:30]))
    assert result.done == 30 and math.isfinite(result.loss_sum) and result.state == state
    assert device.parameters_crc() == before


def test_parameters_round_trip_and_reset_to_initial(device: Device) -> None:
    initial = device.read_parameters()
    data = bytes((7 * i + 3) & 0xFF for i in range(PARAMETER_BYTES))
    device.load_parameters(data)
    assert device.read_parameters() == data and device.parameters_crc() == zlib.crc32(data)
    assert device.restore(RestoreSource.INITIAL).state.steps == 0
    assert device.read_parameters() == initial
    with pytest.raises(IncompatibleError, match="113 parameter bytes for a model of 112"):
        device.load_parameters(data + b"\0")


def test_pushed_sample_trains_like_an_inline_one(device: Device) -> None:
    device.train((LABELS[0],), SAMPLES[0])
    expected = device.read_parameters()
    device.restore(RestoreSource.INITIAL)
    session = device.session
    session.request(Push(0, SAMPLES[0][:10]))
    with pytest.raises(RefusedError, match="OUT_OF_RANGE"):
        session.request(Push(11, SAMPLES[0][11:]))
    session.request(Push(10, SAMPLES[0][10:]))
    session.request(Train((LABELS[0],), None))
    assert device.read_parameters() == expected
    with pytest.raises(RefusedError, match="NO_INPUT"):
        session.request(Train((LABELS[0],), None))  # an input is used once
    session.request(Push(0, SAMPLES[0]))
    device.abort()
    with pytest.raises(RefusedError, match="NO_INPUT"):
        session.request(Infer(1, None))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (Load(PARAMETER_BYTES - 1, b"ab"), "OUT_OF_RANGE"),
        (Load(0xFFFFFFFF, b"ab"), "OUT_OF_RANGE"),
        (Load(0, b""), "BAD_LENGTH"),
        (Read(0, PARAMETER_BYTES + 1), "OUT_OF_RANGE"),
        (Read(0xFFFFFFFF, 2), "OUT_OF_RANGE"),
        (Read(1, 0xFFFFFFFF), "OUT_OF_RANGE"),
        (Crc(PARAMETER_BYTES, 1), "OUT_OF_RANGE"),
        (Push(INPUTS, b"a"), "OUT_OF_RANGE"),
        (Push(0, bytes(INPUTS + 1)), "OUT_OF_RANGE"),
        (Train((CLASSES,), bytes(INPUTS)), "OUT_OF_RANGE"),
        (Train((0, 1), bytes(INPUTS)), "BAD_LENGTH"),
        (Train((), b""), "OUT_OF_RANGE"),
        (Train((0, 1), None), "BAD_LENGTH"),
        (Infer(0xFFFF, bytes(INPUTS)), "BAD_LENGTH"),
        (Infer(32, bytes(32 * INPUTS)), "OUT_OF_RANGE"),
        (Options(TrainingOptions(math.nan)), "OUT_OF_RANGE"),
        (Options(TrainingOptions(-1.0)), "OUT_OF_RANGE"),
        (Options(TrainingOptions(math.inf)), "OUT_OF_RANGE"),
        (Options(TrainingOptions(0.1, Rule.Q88)), "UNSUPPORTED"),
    ],
    ids=str,
)
def test_wrong_requests_are_refused_and_change_nothing(device: Device, request_: Load, status: str) -> None:
    before = device.training(), device.parameters_crc()
    with pytest.raises(RefusedError, match=status):
        device.session.request(request_)
    assert (device.training(), device.parameters_crc()) == before
    assert device.status().refused == 1


def test_unknown_types_and_versions_are_answered(simulator: Simulator, device: Device) -> None:
    session, nonce = device.session, device.info.nonce
    session.close()
    transport = SerialTransport(str(simulator.port))
    decoder = FrameDecoder()

    def ask(content: bytes) -> tuple[int, bytes]:
        transport.write(encode_frame(content))
        while True:
            for reply in decoder.feed(transport.read(10.0)):
                return reply[3], reply[8:]

    head = struct.Struct("<HBBI")
    assert ask(head.pack(9, MessageType.CRC, PROTOCOL_VERSION + 1, nonce)) == (ReplyStatus.BAD_VERSION, b"")
    assert ask(head.pack(9, MessageType.CRC, PROTOCOL_VERSION, nonce ^ 1)) == (ReplyStatus.WRONG_NONCE, b"")
    assert ask(head.pack(9, 0x0F, PROTOCOL_VERSION, nonce)) == (ReplyStatus.UNKNOWN_TYPE, b"")
    assert ask(head.pack(1, 0x7E, PROTOCOL_VERSION, nonce)) == (ReplyStatus.UNKNOWN_TYPE, b"")
    assert ask(head.pack(9, 0x7E, PROTOCOL_VERSION, nonce)) == (ReplyStatus.BAD_SEQUENCE, b"\x02\x00")
    assert ask(head.pack(9, MessageType.HELLO, 99, 0) + bytes(4))[0] == ReplyStatus.OK
    transport.close()


def test_repeated_effect_is_answered_from_the_cache(simulator: Simulator, device: Device) -> None:
    info = device.info
    device.session.close()
    transport, decoder = SerialTransport(str(simulator.port)), FrameDecoder()
    frame = encode_frame(encode_request(info.next_sequence, info.nonce, Train((1,), SAMPLES[0])))
    transport.write(frame * 5)
    replies: list[bytes] = []
    while len(replies) < 5:
        replies += decoder.feed(transport.read(10.0))
    assert len(set(replies)) == 1
    assert decode_reply(replies[0])[0].status is ReplyStatus.OK
    transport.close()
    status = Device(Session(SerialTransport(str(simulator.port)), QUICK)).status()
    assert (status.trained, status.duplicates) == (1, 4)


def test_snapshot_on_the_device_survives_reset_and_kill(simulator: Simulator, device: Device) -> None:
    with pytest.raises(RefusedError, match="NO_SNAPSHOT"):
        device.restore()
    train_all(device)
    trained, state = device.read_parameters(), device.training().state
    assert device.save().generation == 1
    train_all(device)
    assert device.read_parameters() != trained
    device.session.reset()
    assert device.info.has_snapshot and device.status().reset_reason is ResetReason.REQUEST
    assert device.training().state == state and device.read_parameters() == trained  # it booted from what it saved
    train_all(device)
    assert device.restore().state == state and device.read_parameters() == trained
    simulator.kill()
    simulator.start()
    again = Device(Session(SerialTransport(str(simulator.port)), QUICK))
    assert again.read_parameters() == trained and again.restore().generation == 1
    again.restore(RestoreSource.INITIAL)
    assert again.read_parameters() != trained


def test_torn_snapshot_leaves_the_older_one(simulator: Simulator, device: Device) -> None:
    device.load_parameters(b"\x01" * PARAMETER_BYTES)
    assert device.save().generation == 1
    device.load_parameters(b"\x02" * PARAMETER_BYTES)
    assert device.save().generation == 2
    storage = simulator.port.parent / "storage.bin"
    whole = storage.read_bytes()
    newest = whole.index(b"\x02" * PARAMETER_BYTES) - 72
    simulator.kill()
    for torn in range(newest, newest + 72 + PARAMETER_BYTES, 7):  # power lost while the slot was being written
        storage.write_bytes(
            whole[:torn] + b"\xff" * (newest + 72 + PARAMETER_BYTES - torn) + whole[newest + 72 + PARAMETER_BYTES :]
        )
        simulator.start()
        session = Session(SerialTransport(str(simulator.port)), QUICK)
        again = Device(session)
        assert again.read_parameters() == b"\x01" * PARAMETER_BYTES  # it booted from the newest whole slot
        assert again.restore().generation == 1
        session.close()
        simulator.kill()


def test_reset_behind_our_back_is_noticed_before_anything_runs(simulator: Simulator, device: Device) -> None:
    device.train((LABELS[0],), SAMPLES[0])
    simulator.kill()
    simulator.start()
    with pytest.raises(DeviceResetError):
        device.session.attach(SerialTransport(str(simulator.port)))
    device.session.close()
    other = Device(Session(SerialTransport(str(simulator.port)), QUICK))
    assert other.status().trained == 0


def test_another_program_in_between_is_noticed(simulator: Simulator, device: Device) -> None:
    device.session.close()
    other = Device(Session(SerialTransport(str(simulator.port)), QUICK))
    other.train((LABELS[0],), SAMPLES[0])
    other.session.close()
    with pytest.raises(SequenceError):
        device.session.attach(SerialTransport(str(simulator.port)))


def test_attention_stops_after_the_sample_in_work(simulator: Simulator, device: Device) -> None:
    count = device.samples_per_request()
    # zeros right behind the request: they are read while the first sample trains
    session, info = device.session, device.info
    session.close()
    transport, decoder = SerialTransport(str(simulator.port)), FrameDecoder()
    request = Train(tuple(LABELS[:count]), b"".join(SAMPLES[:count]))
    transport.write(encode_frame(encode_request(info.next_sequence, info.nonce, request)) + ATTENTION)
    replies: list[bytes] = []
    while not replies:
        replies += decoder.feed(transport.read(10.0))
    result = request.read_reply(decode_reply(replies[0])[1])
    assert 1 <= result.done <= count and result.state.steps == result.done
    transport.close()


def test_echo_of_all_sizes(device: Device) -> None:
    for size in [0, 1, 2, 3, 245, 246, 247, 253, 254, 255, 256, 507, 508, 509, device.info.max_payload]:
        for data in (bytes(size), b"\x01" * size, bytes(i & 0xFF for i in range(size))):
            assert device.session.request(Echo(data)) == data


def test_too_long_a_request_is_swallowed(simulator: Simulator, device: Device) -> None:
    device.session.close()
    transport = SerialTransport(str(simulator.port))
    transport.write(encode_frame(b"\x05" * (device.info.max_payload + 9)))
    transport.close()
    assert Device(Session(SerialTransport(str(simulator.port)), QUICK)).status().overlong == 1


def test_an_effect_with_unknown_outcome_must_be_settled(device: Device) -> None:
    device.session.close()
    with pytest.raises(Exception, match="lost the connection"):
        device.train((LABELS[0],), SAMPLES[0])
    with pytest.raises(MessageError, match="give it again"):
        device.train((LABELS[1],), SAMPLES[1])


def test_building_too_large_a_model_names_the_remedy(tmp_path: Path) -> None:
    from port_agent.mcu.board.board_errors import TooLargeError
    from port_agent.mcu.board.firmware import build_firmware

    require_board_tools()
    model = write_model(tmp_path / "large", extra_arena_bytes=20_000)
    with pytest.raises(TooLargeError, match="smaller --ram") as caught:
        build_firmware("qemu-m0", model, tmp_path)
    assert caught.value.memory == "RAM" and caught.value.overflow_bytes > 0
    assert build_firmware("qemu-m4f", model, tmp_path).static_ram_bytes is not None
