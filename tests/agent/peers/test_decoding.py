"""Whatever is wrong with bytes from another device is one error."""

from typing import Any

import pytest

from port_agent.peers.decoding import PeerCodec
from port_planner.base.errors import PortError

DEEP = b"\x91" * 100_000
"""Lists in lists."""
TEXTS: "PeerCodec[str]" = PeerCodec(str, PortError, "not a valid text")


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xa1\xff", DEEP], ids=["none", "number", "no UTF-8", "deep"])
def test_what_is_no_text_is_refused_by_the_callers_error(content: bytes) -> None:
    with pytest.raises(PortError, match=rf"^not a valid text \({len(content)} bytes\): "):
        TEXTS.decode(content)


def test_lists_without_end_are_refused_whatever_was_expected() -> None:
    with pytest.raises(PortError):
        PeerCodec(Any, PortError, "nothing").decode(DEEP)


def test_what_is_right_is_the_value() -> None:
    assert TEXTS.decode(TEXTS.encode("ä")) == "ä"
