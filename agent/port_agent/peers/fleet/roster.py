"""The connected paired devices and their last reports: a table without network access, to which times are passed."""

from dataclasses import dataclass

from port_agent.peers.connection.link import PeerLink
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.identity.device_id import DeviceId

SILENT_S = 22.0
"""Seconds of silence after which a device is gone: two heartbeats are lost.

With `fleet.LOOK_S` that is 27 s at most.
"""


@dataclass(slots=True)
class FleetMember:
    """A connected device. Times are on the monotonic clock."""

    link: PeerLink
    dialed_by_us: bool
    received_s: float
    software: str
    """Version of the device's agent."""
    heartbeat: Heartbeat | None = None


class Roster:
    """The connections, one for each device."""

    def __init__(self, own: DeviceId) -> None:
        self._own = own
        self._members: dict[DeviceId, FleetMember] = {}
        self._last_heartbeat: dict[DeviceId, tuple[float, Heartbeat]] = {}

    def arrive(
        self, device: DeviceId, link: PeerLink, *, dialed_by_us: bool, software: str, now_s: float
    ) -> PeerLink | None:
        """Add a new connection; return the connection to close instead, which may be the new one.

        Of two that cross, both sides keep the one that the device with the smaller id dialed.
        """
        known = self._members.get(device)
        crosses = known is not None and known.link.end is None and known.dialed_by_us != dialed_by_us
        if crosses and dialed_by_us != (self._own < device):
            return link
        self._members[device] = FleetMember(link, dialed_by_us, now_s, software)
        return known.link if known is not None and known.link.end is None else None

    def receive(self, device: DeviceId, link: PeerLink, heartbeat: Heartbeat, now_s: float) -> bool:
        """Record a device's report on its connection; return whether it is the first one there."""
        member = self._members.get(device)
        if member is None or member.link is not link:
            return False
        is_first = member.heartbeat is None
        member.heartbeat, member.received_s = heartbeat, now_s
        self._last_heartbeat[device] = (now_s, heartbeat)
        return is_first

    def notice(self, device: DeviceId, link: PeerLink, now_s: float) -> None:
        """Record that a device sent something; during a busy exchange, its heartbeats wait."""
        member = self._members.get(device)
        if member is not None and member.link is link:
            member.received_s = now_s

    def leave(self, device: DeviceId, link: PeerLink) -> bool:
        """Record the end of a connection; return whether the device is now gone."""
        member = self._members.get(device)
        if member is None or member.link is not link:
            return False
        del self._members[device]
        return True

    def forget(self, device: DeviceId) -> PeerLink | None:
        """Forget a device; return its connection, if there is one, so that it can be closed."""
        self._last_heartbeat.pop(device, None)
        member = self._members.pop(device, None)
        return member.link if member is not None else None

    def member(self, device: DeviceId) -> FleetMember | None:
        """Return a connected device."""
        return self._members.get(device)

    def links(self) -> tuple[PeerLink, ...]:
        """Return all connections."""
        return tuple(member.link for member in self._members.values())

    def silent(self, now_s: float) -> tuple[PeerLink, ...]:
        """Return the connections of devices that were silent for too long."""
        return tuple(member.link for member in self._members.values() if now_s - member.received_s > SILENT_S)

    def last_heartbeat(self, device: DeviceId) -> tuple[float, Heartbeat] | None:
        """Return the time and content of a device's last report; None if there was none since the agent started."""
        return self._last_heartbeat.get(device)
