"""Messages against their golden bytes, and refusal of everything else."""

from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import MessageError
from port_agent.mcu.protocol.framing import FrameDecoder
from port_agent.mcu.protocol.messages import HEADER, MessageType, ReplyStatus, Request, decode_reply, encode_request
from tests.agent.mcu.examples import CASES, NONCE, SEQUENCE, reply_content

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "mcu"
NAMED = pytest.mark.parametrize(("name", "request_", "payload", "value"), CASES, ids=[case[0] for case in CASES])


def golden(name: str) -> bytes:
    wire = bytes.fromhex((GOLDEN / f"{name}.hex").read_text().split("#")[0])
    (content,) = FrameDecoder().feed(wire)
    return content


def test_every_type_has_an_example() -> None:
    assert {case[1].type for case in CASES} == set(MessageType)


@NAMED
def test_request_bytes(name: str, request_: Request[object], payload: bytes, value: object) -> None:
    assert encode_request(SEQUENCE, NONCE, request_) == golden(f"{name}.request")


@NAMED
def test_reply_bytes(name: str, request_: Request[object], payload: bytes, value: object) -> None:
    header, found = decode_reply(golden(f"{name}.reply"))
    assert (header.sequence, header.type, header.status, header.nonce) == (SEQUENCE, request_.type, 0, NONCE)
    assert request_.read_reply(found) == value


@NAMED
def test_reply_of_another_length_is_refused(
    name: str, request_: Request[object], payload: bytes, value: object
) -> None:
    if request_.type is MessageType.ECHO:
        return  # any length is right
    for wrong in (payload + b"\0", payload[:-1] if payload else b"\0\0"):
        with pytest.raises(MessageError):
            request_.read_reply(wrong)


def test_refusals() -> None:
    header, payload = decode_reply(golden("sequence.reply"))
    assert header.status is ReplyStatus.BAD_SEQUENCE and payload == b"\x07\x00"
    assert decode_reply(golden("refused.reply"))[0].status is ReplyStatus.OUT_OF_RANGE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2\x81\0\0\0\0",  # one byte short
        HEADER.pack(1, MessageType.HELLO, 0, 0),  # a request
        HEADER.pack(1, 0xFE, 0, 0),  # no such type
        reply_content(MessageType.HELLO, b"")[:3] + b"\x63" + bytes(4),  # no such status
    ],
)
def test_what_is_not_a_reply(content: bytes) -> None:
    with pytest.raises(MessageError):
        decode_reply(content)
