"""Messages between the supervisor and the pairing processes. It loads no cryptography, like the supervisor."""

from typing import Annotated

import msgspec

from port_agent.peers.announcement import NAME_LIMIT


class PairingPlace(msgspec.Struct, frozen=True):
    """What a pairing process needs to know about this device."""

    state_dir: str
    name: str
    fleet_port: int


class ShowCode(msgspec.Struct, frozen=True):
    """Show a code and wait on a port for the device where it is typed."""

    place: PairingPlace
    port: int
    lifetime_s: float


class JoinDevice(msgspec.Struct, frozen=True):
    """Pair with the device that shows the typed code, at the first of its addresses that can be reached."""

    place: PairingPlace
    code: str
    hosts: tuple[str, ...]
    port: int


class CodeShown(msgspec.Struct, frozen=True, tag_field="event", tag="code"):
    """A code is shown, and the device waits on a port."""

    code: str
    port: int
    left_s: float


class WrongCode(msgspec.Struct, frozen=True, tag_field="event", tag="wrong"):
    """A device called that does not know the code."""

    host: str
    tries_left: int


class CallersTurnedAway(msgspec.Struct, frozen=True, tag_field="event", tag="turned-away"):
    """A host calls more often than an honest device does. Reported once for each host; the code stays valid."""

    host: str


class PairingFailed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    """The last event: no device was paired."""

    reason: str


class NewPartner(msgspec.Struct, frozen=True, tag_field="event", tag="paired"):
    """The last event: a device has just proved to know the code."""

    certificate: bytes
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    address: tuple[str, int]


LastEvent = PairingFailed | NewPartner
PairingEvent = CodeShown | WrongCode | CallersTurnedAway | LastEvent
