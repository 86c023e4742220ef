"""One example of every request and reply, the source of the golden frames in tests/golden/mcu."""

import struct

from port_agent.mcu.protocol.effects import (
    Abort,
    DeviceTraining,
    Eval,
    Infer,
    LearnResult,
    Load,
    Options,
    Push,
    Reset,
    Restore,
    RestoreSource,
    Rule,
    Save,
    Train,
    TrainingOptions,
    TrainingState,
)
from port_agent.mcu.protocol.messages import HEADER, REPLY_BIT, MessageType, ReplyStatus, Request
from port_agent.mcu.protocol.queries import (
    Crc,
    DeviceInfo,
    DevicePages,
    DeviceStatus,
    Echo,
    Hello,
    MemoryRegion,
    Pages,
    Read,
    ResetReason,
    Status,
)

SEQUENCE, NONCE = 0x0102, 0x11223344
SAMPLE = bytes(range(24))
TRAINING = struct.pack("<fBBHIII", 0.03125, 2, 1, 0, 0xDEADBEEF, 1000, 7)
TRAINED = DeviceTraining(TrainingOptions(0.03125, Rule.TRUNCATE, True), TrainingState(0xDEADBEEF, 1000), 7)
LEARNT = struct.pack("<HHfII", 2, 1, 1.5, 99, 12)
HELLO = struct.pack(
    "<BBBBHHIIIHHIIIIII32s24s32s8s", 1, 1, 0, 1, 3, 1024, 262144, 1048576, NONCE, 5, 4, 24, 112, 40, 0b1101, 4096,
    25_000_000, bytes(range(32)), b"qemu-m4f", b"small", b"\x01\x02\x03\x04\x05\x06\x07\x08",
)  # fmt: skip
INFO = DeviceInfo(
    protocol=1, oldest_protocol=1, firmware=(0, 1, 3), max_payload=1024, ram_bytes=262144, flash_bytes=1048576,
    nonce=NONCE, next_sequence=5, class_count=4, input_bytes=24, parameter_bytes=112, arena_bytes=40, trains=True,
    has_q88=False, has_storage=True, has_snapshot=True, has_targets=False, slot_bytes=4096, ticks_hz=25_000_000,
    model_hash=bytes(range(32)), board="qemu-m4f", model="small", serial=b"\x01\x02\x03\x04\x05\x06\x07\x08",
)  # fmt: skip
STATUS = struct.pack("<14IQ", *range(1, 11), 476, 0xFFFFFFFF, 1424, 4, 1 << 33)
COUNTED = DeviceStatus(
    frames=1, bad_crc=2, bad_cobs=3, overlong=4, duplicates=5, refused=6, overruns=7, trained=8, evaluated=9, saves=10,
    stack_used_bytes=476, stack_bytes=None, static_ram_bytes=1424, reset_reason=ResetReason.WATCHDOG, ticks=1 << 33,
)  # fmt: skip

PAGES = struct.pack("<8sIIIQQIII", b"psram", 1 << 24, 4, 14784, 1 << 33, 1 << 32, 1, 2, 1)
PAGED = DevicePages("psram", 1 << 24, 4, 14784, 1 << 33, 1 << 32, 1, 2, torn=True)

CASES: tuple[tuple[str, Request[object], bytes, object], ...] = (
    ("hello", Hello(0xCAFEBABE), HELLO, INFO),
    ("status", Status(), STATUS, COUNTED),
    ("pages", Pages(), PAGES, PAGED),
    ("echo", Echo(b"\0\x01\0zero\0"), b"\0\x01\0zero\0", b"\0\x01\0zero\0"),
    ("read", Read(16, 4, MemoryRegion.LOGITS), b"\0\0\x80\x3f", b"\0\0\x80\x3f"),
    ("crc", Crc(0, 112), b"\x78\x56\x34\x12", 0x12345678),
    ("load", Load(4, b"\xff\0\x7f"), b"", None),
    ("options", Options(TrainingOptions(0.03125, Rule.TRUNCATE), TrainingState(0xDEADBEEF, 1000)), TRAINING, TRAINED),
    ("options_read", Options(), TRAINING, TRAINED),
    ("push", Push(0, SAMPLE), b"", None),
    ("train", Train((1, 3), SAMPLE * 2), LEARNT, LearnResult(2, 1, 1.5, TrainingState(99, 12))),
    ("train_pushed", Train((2,), None), LEARNT, LearnResult(2, 1, 1.5, TrainingState(99, 12))),
    ("eval", Eval((0,), SAMPLE), LEARNT, LearnResult(2, 1, 1.5, TrainingState(99, 12))),
    ("infer", Infer(2, SAMPLE * 2), b"\x02\0\x01\0\x03\0", (1, 3)),
    ("infer_pushed", Infer(1, None), b"\x01\0\x03\0", (3,)),
    ("save", Save(), TRAINING, TRAINED),
    ("restore", Restore(RestoreSource.INITIAL), TRAINING, TRAINED),
    ("abort", Abort(), b"", None),
    ("reset", Reset(), b"", None),
)


def reply_content(kind: MessageType, payload: bytes, status: ReplyStatus = ReplyStatus.OK) -> bytes:
    """Return the frame content of a reply."""
    return HEADER.pack(SEQUENCE, kind | REPLY_BIT, status, NONCE) + payload
