"""Test whether multicast DNS works here, for the doctor: one packet per interface, to this device itself."""

import socket
import struct
import time
from dataclasses import dataclass

from port_agent.peers.interfaces import Interface, multicast_interfaces

PORT = 5353
_GROUP, _GROUP_IPV6 = "224.0.0.251", "ff02::fb"
_PATIENCE_S = 1.0
_HEADER = struct.Struct(">6H")
"""Id, flags, counts of questions, answers, authorities, additionals (RFC 1035)."""
_NAME = b"\x0b_port-agent\x04_tcp\x05local\x00"
_POINTER, _IN = 12, 1


@dataclass(frozen=True, slots=True)
class Probe:
    """The test's result on one interface; `trouble` is empty if the packet came back."""

    interface: Interface
    trouble: str


def probe() -> list[Probe]:
    """Return whether multicast DNS works, for each network interface.

    Takes up to a second for each blocked interface.
    """
    return [Probe(interface, _trouble(interface)) for interface in multicast_interfaces()]


def _trouble(interface: Interface) -> str:
    """Send a query for agents and return why it did not come back. The machine's own firewall also sees it."""
    family = socket.AF_INET6 if interface.is_ipv6 else socket.AF_INET
    question = _HEADER.pack(0, 0, 1, 0, 0, 0) + _NAME + struct.pack(">2H", _POINTER, _IN)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as ear, socket.socket(family, socket.SOCK_DGRAM) as mouth:
            _share_port(ear)
            _share_port(mouth)  # firewalls look at both ports
            _join(ear, mouth, interface)
            mouth.sendto(question, (_GROUP_IPV6 if interface.is_ipv6 else _GROUP, PORT))
            return "" if _hears(ear, question) else f"UDP port {PORT} is blocked"
    except OSError as error:
        return f"UDP port {PORT}: {error.strerror or error}"


def _share_port(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("", PORT))


def _join(ear: socket.socket, mouth: socket.socket, interface: Interface) -> None:
    if interface.is_ipv6:
        group = socket.inet_pton(socket.AF_INET6, _GROUP_IPV6) + struct.pack("@I", interface.index)
        ear.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface.index)
        mouth.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        return
    own = socket.inet_aton(interface.address)
    ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP) + own)
    mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
    mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)


def _hears(ear: socket.socket, question: bytes) -> bool:
    end_s = time.monotonic() + _PATIENCE_S
    while (left_s := end_s - time.monotonic()) > 0:
        ear.settimeout(left_s)
        try:
            received, _ = ear.recvfrom(9000)
        except TimeoutError:
            return False
        if received == question:
            return True
    return False
