"""The doctor's test of multicast DNS: on real sockets of the loopback interface, at a port of the test's own."""

import socket

import psutil
import pytest

from agent.health.doctor import Verdict, check_discovery
from agent.peers import interfaces, probe
from agent.peers.interfaces import Interface, multicast_interfaces
from agent.policy.config import AgentOptions

LOOPBACK = Interface("lo", 1, "127.0.0.1", False)
ON = AgentOptions(discover_peers=True)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the port that is probed, a free one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("", 0))
        number = int(sock.getsockname()[1])
    monkeypatch.setattr(probe, "PORT", number)
    monkeypatch.setattr(probe, "multicast_interfaces", lambda: (LOOPBACK,))
    return number


def test_a_packet_that_comes_back(port: int) -> None:
    check = check_discovery(ON)
    assert (check.verdict, check.finding) == (Verdict.GOOD, "on; lo: works")


def test_a_packet_that_does_not_come_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_join", lambda ear, mouth, interface: None)
    monkeypatch.setattr(probe, "_PATIENCE_S", 0.05)
    check = check_discovery(ON)
    assert check.verdict is Verdict.BAD and f"lo: UDP port {port} is blocked" in check.finding
    assert "ufw allow 5353/udp" in check.cure


def test_a_port_that_another_program_holds_alone(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selfish:
        selfish.bind(("", port))
        check = check_discovery(ON)
    assert check.verdict is Verdict.BAD and "in use" in check.finding and "disallow-other-stacks" in check.cure


def test_off_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "multicast_interfaces", lambda: ())
    assert check_discovery(ON).verdict is Verdict.NOTE
    assert check_discovery(AgentOptions()).finding.startswith("off")


def test_which_interfaces_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(flags: str, *, up: bool = True) -> object:
        return type("State", (), {"isup": up, "flags": flags})()

    def address(family: int, text: str) -> object:
        return type("Address", (), {"family": family, "address": text})()

    lan = "up,broadcast,running,multicast"
    states = {
        "eth0": state(lan), "wlan0": state(lan), "old0": state(lan, up=False), "tun0": state("up,pointopoint,multicast"),
        "lo": state("up,loopback,running,multicast"), "can0": state("up,running"), "bare0": state(lan),
    }  # fmt: skip
    four, six = socket.AF_INET, socket.AF_INET6
    addresses = {
        "wlan0": [address(six, "fe80::2%wlan0"), address(psutil.AF_LINK, "02:00:00:00:00:01")],
        "eth0": [address(six, "fe80::1%eth0"), address(four, "10.0.0.5"), address(four, "10.0.0.6")],
        **{name: [address(four, "10.1.0.1")] for name in ("old0", "tun0", "lo", "can0", "gone0")},
        "bare0": [address(psutil.AF_LINK, "02:00:00:00:00:02")],
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(interfaces.socket, "if_nametoindex", lambda name: len(name))
    assert multicast_interfaces() == (
        Interface("eth0", 4, "10.0.0.5", False),
        Interface("wlan0", 5, "fe80::2", True),
    )
