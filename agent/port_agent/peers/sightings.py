"""The agents that were seen, and when: a table that forgets. It has no network access, and times are passed to it."""

from dataclasses import dataclass, replace

from port_agent.peers.announcement import Announcement, AnnouncementError, from_text

TTL_S = 120
"""Seconds for which an announcement is valid; the usual time of a host's records in mDNS (RFC 6762, section 10)."""
GONE_S = 150.0
"""Seconds after which an unseen device is gone: after four queries without an answer."""
FORGET_S = 1800.0
"""Seconds until an agent is forgotten.

Until then it is queried ever more rarely, so that a switch that was off for a while removes nobody.
"""
QUERY_INTERVAL_S = 15.0
LIMIT = 100
"""Largest number of agents. A flood of forged ones costs no more memory than this, and real ones stay."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent that was seen. `addresses` are its claims; `received_s` is on the monotonic clock."""

    announcement: Announcement
    addresses: tuple[str, ...]
    received_s: float
    query_s: float
    """Time at which to ask whether the device is still there, in monotonic seconds."""
    port: int = 0
    """Port at which the device listens for paired devices; 0 while it has none."""


class Sightings:
    """The agents seen, by id, without this device itself."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._after_s = 0.7 * TTL_S + int(own_id, 16) % QUERY_INTERVAL_S
        """Seconds until a query, which differ for each device, so that all others receive
        the answer to the first one.
        """
        self._peers: dict[str, Peer] = {}

    def received(self, label: str, text: bytes, addresses: tuple[str, ...], now_s: float, port: int = 0) -> bool:
        """Record an announcement under the name `label`; return whether it is valid and kept."""
        try:
            announcement = from_text(text)
        except AnnouncementError:
            return False
        if announcement.id != label or label == self._own_id:
            return False
        known = self._peers.get(label)
        if known is None and len(self._peers) >= LIMIT:
            self._forget(now_s, GONE_S)
            if len(self._peers) >= LIMIT:
                return False
        kept = addresses or (known.addresses if known else ())
        self._peers[label] = Peer(announcement, kept, now_s, now_s + self._after_s, port)
        return True

    def gone(self, label: str) -> None:
        """Record that an agent said goodbye."""
        self._peers.pop(label, None)

    def to_query(self, now_s: float) -> list[str]:
        """Return the ids to query now; silent ones are queried repeatedly and finally forgotten."""
        self._forget(now_s, FORGET_S)
        due = [label for label, peer in self._peers.items() if peer.query_s <= now_s]
        for label in due:
            silent_s = now_s - self._peers[label].received_s
            wait_s = QUERY_INTERVAL_S if silent_s < GONE_S else silent_s / 2
            self._peers[label] = replace(self._peers[label], query_s=now_s + wait_s)
        return due

    def next_s(self) -> float | None:
        """Return the time of the next query; None while no agent is known."""
        return min((peer.query_s for peer in self._peers.values()), default=None)

    def peers(self, now_s: float) -> tuple[Peer, ...]:
        """Return the agents present now, by name."""
        there = [peer for peer in self._peers.values() if now_s - peer.received_s < GONE_S]
        return tuple(sorted(there, key=lambda peer: (peer.announcement.name, peer.announcement.id)))

    def _forget(self, now_s: float, silent_s: float) -> None:
        for label in [label for label, peer in self._peers.items() if now_s - peer.received_s >= silent_s]:
            del self._peers[label]
