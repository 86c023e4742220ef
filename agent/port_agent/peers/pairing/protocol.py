"""Messages between the supervisor and the pairing processes. Light: the supervisor has no cryptography."""

from typing import Annotated

import msgspec

from port_agent.peers.announcement import NAME_LIMIT


class PairingPlace(msgspec.Struct, frozen=True):
    """What a pairing process receives about this device."""

    state_dir: str
    name: str
    fleet_port: int


class ShowCode(msgspec.Struct, frozen=True):
    """Show a code and wait on a port for the device where it is typed."""

    place: PairingPlace
    port: int
    lifetime_s: float


class JoinDevice(msgspec.Struct, frozen=True):
    """Pair with the device that shows the typed code, at the first of its addresses where it is reached."""

    place: PairingPlace
    code: str
    hosts: tuple[str, ...]
    port: int


class CodeShown(msgspec.Struct, frozen=True, tag_field="event", tag="code"):
    """A code is shown, and its device waits on a port."""

    code: str
    port: int
    left_s: float


class WrongCode(msgspec.Struct, frozen=True, tag_field="event", tag="wrong"):
    """A device called that does not know the code."""

    host: str
    tries_left: int


class CallersTurnedAway(msgspec.Struct, frozen=True, tag_field="event", tag="turned-away"):
    """A host calls more often than one that pairs does. Told once of each host; the code holds."""

    host: str


class PairingFailed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    """The last event: no device was paired."""

    reason: str


class NewPartner(msgspec.Struct, frozen=True, tag_field="event", tag="paired"):
    """The last event: a device just proved that it knows the code."""

    certificate: bytes
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    address: tuple[str, int]


LastEvent = PairingFailed | NewPartner
PairingEvent = CodeShown | WrongCode | CallersTurnedAway | LastEvent
