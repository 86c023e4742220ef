"""An introducer's answer: the other devices that chose it, with their certificates, as MessagePack."""

from typing import Annotated

import msgspec

from port_agent.peers.announcement import NAME_LIMIT
from port_agent.peers.decoding import PeerCodec
from port_planner.base.errors import PortError

_CERTIFICATE_BYTES = 4000
_HOST_LIMIT = 255
_MOST = 100
"""Largest number of introduced devices, equal to that of paired devices."""


class IntroductionError(PortError):
    """Bytes that are not an introduction."""


class IntroducedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that chose the same introducer."""

    certificate: Annotated[bytes, msgspec.Meta(max_length=_CERTIFICATE_BYTES)]
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    address: (
        tuple[
            Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)],
            Annotated[int, msgspec.Meta(ge=1, le=65535)],
        ]
        | None
    ) = None
    """Address at which the device was last reached, as a hint."""


class Introductions(msgspec.Struct, frozen=True):
    """All devices that are introduced."""

    devices: Annotated[tuple[IntroducedDevice, ...], msgspec.Meta(max_length=_MOST)]


INTRODUCTIONS: "PeerCodec[Introductions]" = PeerCodec(Introductions, IntroductionError, "not a list of introductions")
