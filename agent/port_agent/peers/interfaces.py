"""The network interfaces on which others can be heard."""

import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, order=True)
class Interface:
    """A network interface and the address that stands for it.

    Its first IPv4 one, or an IPv6 one if it has no other.
    """

    name: str
    index: int
    address: str
    is_ipv6: bool


def own_addresses() -> list[str]:
    """Return the addresses of this device by which others of the local network may reach it."""
    return [interface.address for interface in multicast_interfaces()]


def multicast_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, carry multicast and lead to others; no loopback and no tunnels."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        flags = set(state.flags.split(",")) if state else set()
        if state is None or not state.isup or "multicast" not in flags or flags & {"loopback", "pointopoint"}:
            continue
        for family in (socket.AF_INET, socket.AF_INET6):
            own = [item.address.partition("%")[0] for item in addresses if item.family == family]
            if own:
                found.append(Interface(name, socket.if_nametoindex(name), own[0], family == socket.AF_INET6))
                break
    return tuple(sorted(found))
