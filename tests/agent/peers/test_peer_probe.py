"""The doctor's test of multicast DNS: on real sockets of the loopback interface, at a port of the test's own."""

import socket

import pytest

from port_agent.health.doctor import Verdict, check_discovery
from port_agent.peers import peer_probe
from port_agent.peers.interfaces import Interface
from port_agent.policy.config import AgentOptions

LOOPBACK = Interface("lo", 1, "127.0.0.1", False)
ON = AgentOptions(discover_peers=True)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the port that is probed, a free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 0))
        number = int(sock.getsockname()[1])
    monkeypatch.setattr(peer_probe, "PORT", number)
    monkeypatch.setattr(peer_probe, "multicast_interfaces", lambda: (LOOPBACK,))
    return number


def test_a_packet_that_comes_back(port: int) -> None:
    check = check_discovery(ON)
    assert (check.verdict, check.finding) == (Verdict.GOOD, "on; lo: works")


def test_a_packet_that_does_not_come_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "_join", lambda ear, mouth, interface: None)
    monkeypatch.setattr(peer_probe, "_PATIENCE_S", 0.05)
    check = check_discovery(ON)
    assert check.verdict is Verdict.BAD and f"lo: UDP port {port} is blocked" in check.finding
    assert "ufw allow 5353/udp" in check.cure


def test_a_port_that_another_program_holds_alone(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selfish:
        selfish.bind(("", port))
        check = check_discovery(ON)
    assert check.verdict is Verdict.BAD and "in use" in check.finding and "disallow-other-stacks" in check.cure


def test_off_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_probe, "multicast_interfaces", lambda: ())
    assert check_discovery(ON).verdict is Verdict.NOTE
    assert check_discovery(AgentOptions()).finding.startswith("off")
