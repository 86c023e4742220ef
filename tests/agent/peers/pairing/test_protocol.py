"""What pairing processes say comes as it went."""

import msgspec
import pytest

from port_agent.peers.announcement import NAME_LIMIT
from port_agent.peers.pairing.protocol import (
    CodeShown,
    NewPartner,
    PairingEvent,
    PairingFailed,
    WrongCode,
)

_DECODER: "msgspec.json.Decoder[PairingEvent]" = msgspec.json.Decoder(PairingEvent)


def test_events_come_as_they_went() -> None:
    events = (
        CodeShown("482-193-059", 9479, 300.0),
        WrongCode("10.0.0.2", 2),
        PairingFailed("nobody"),
        NewPartner(bytes(range(256)), "attic", ("10.0.0.2", 9478)),
    )
    for event in events:
        assert _DECODER.decode(msgspec.json.encode(event)) == event


def test_a_name_that_is_too_long_is_no_event() -> None:
    with pytest.raises(msgspec.ValidationError):
        _DECODER.decode(msgspec.json.encode(NewPartner(b"", "a" * (NAME_LIMIT + 1), ("h", 1))))
