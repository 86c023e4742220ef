"""Whatever is wrong with bytes from another device is one error."""

import msgspec
import pytest

from port_agent.peers.decoding import decoded
from port_planner.base.errors import PortError

DEEP = b"\x91" * 100_000
"""Lists in lists."""


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xa1\xff", DEEP], ids=["none", "number", "no UTF-8", "deep"])
def test_what_is_no_text_is_refused_by_the_callers_error(content: bytes) -> None:
    with pytest.raises(PortError, match=rf"^no text \({len(content)} bytes\): "):
        decoded(msgspec.msgpack.Decoder(str), content, PortError, "no text")


def test_lists_without_end_are_refused_whatever_was_expected() -> None:
    with pytest.raises(PortError):
        decoded(msgspec.msgpack.Decoder(), DEEP, PortError, "nothing")


def test_what_is_right_is_the_value() -> None:
    assert decoded(msgspec.msgpack.Decoder(str), msgspec.msgpack.encode("ä"), PortError, "no text") == "ä"
