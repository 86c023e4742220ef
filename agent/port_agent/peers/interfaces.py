"""The network interfaces on which others can be reached."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_INTERFACES = Path("/sys/class/net")
_ELSEWHERE = ("192.0.2.1", 9)
"""A reserved address (RFC 5737), to which nothing is sent; only the route is looked up."""


@dataclass(frozen=True, slots=True, order=True)
class Interface:
    """A network interface and its address: its first IPv4 address, or an IPv6 one if it has no other."""

    name: str
    index: int
    address: str
    is_ipv6: bool


def own_addresses() -> list[str]:
    """Return the addresses at which others on the local network may reach this device, the likeliest first."""
    found = [interface.address for interface in multicast_interfaces()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(_ELSEWHERE)
        usual = asking.getsockname()[0]
        found.sort(key=lambda address: address != usual)
    return found


def elsewhere(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return another device's addresses that are not also this one's, as those of container bridges are;
    all of them if none is left.
    """
    return foreign(addresses) or tuple(addresses)


def foreign(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that are not this device's."""
    own = {item.address.partition("%")[0] for items in psutil.net_if_addrs().values() for item in items}
    return tuple(address for address in addresses if address.partition("%")[0] not in own)


def multicast_interfaces(interfaces: Path = _INTERFACES) -> tuple[Interface, ...]:
    """Return the interfaces that are up, carry multicast and lead to others, so without loopback, tunnels
    and bridges of containers.

    `interfaces`: where Linux describes them.
    """
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        flags = set(state.flags.split(",")) if state else set()
        if state is None or not state.isup or "multicast" not in flags or flags & {"loopback", "pointopoint"}:
            continue
        if _is_container_bridge(interfaces / name):
            continue
        for family in (socket.AF_INET, socket.AF_INET6):
            own = [item.address.partition("%")[0] for item in addresses if item.family == family]
            if own:
                found.append(Interface(name, socket.if_nametoindex(name), own[0], family == socket.AF_INET6))
                break
    return tuple(sorted(found))


def _is_container_bridge(interface: Path) -> bool:
    """Return whether an interface is a bridge without any port of this machine or of a network based on one."""
    if not (interface / "bridge").is_dir():
        return False
    ports = [interface.parent / port.name for port in (interface / "brif").glob("*")]
    return not any((port / "device").exists() or _kind(port) for port in ports)


def _kind(interface: Path) -> str:
    """Return Linux's name for the kind of an interface, such as "vlan" or "bond"; nothing for a container's cable."""
    try:
        lines = (interface / "uevent").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("DEVTYPE=") for line in lines if line.startswith("DEVTYPE=")), "")
