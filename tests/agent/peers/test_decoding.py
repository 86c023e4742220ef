"""Whatever is wrong with bytes from another device is one error."""

from typing import Any

import pytest

from port_agent.peers.decoding import PeerCodec, public_reason
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PortError("/home/A. B/state/jobs/3/bundle.port: no bundle"), "bundle.port: no bundle"),
        (PortError("'/var/lib/x y/z.json' and /tmp/q/w hold 3 / 4 of a/b"), "'z.json' and w hold 3 / 4 of a/b"),
        (OSError(28, "No space left on device", "/home/anna/secret"), "No space left on device"),
        (OSError("/home/anna"), "OSError"),
        (PortError("x" * 300), "x" * 200),
    ],
)
def test_no_folder_of_this_device_is_told(error: Exception, told: str) -> None:
    assert public_reason(error) == told


def test_what_is_right_is_the_value() -> None:
    assert TEXTS.decode(TEXTS.encode("ä")) == "ä"
