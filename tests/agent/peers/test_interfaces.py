"""Which network interfaces count."""

import socket

import psutil
import pytest

from port_agent.peers.interfaces import Interface, multicast_interfaces


def test_which_interfaces_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(flags: str, *, up: bool = True) -> object:
        return type("State", (), {"isup": up, "flags": flags})()

    def address(family: int, text: str) -> object:
        return type("Address", (), {"family": family, "address": text})()

    lan = "up,broadcast,running,multicast"
    states = {
        "eth0": state(lan),
        "wlan0": state(lan),
        "old0": state(lan, up=False),
        "tun0": state("up,pointopoint,multicast"),
        "lo": state("up,loopback,running,multicast"),
        "can0": state("up,running"),
        "bare0": state(lan),
    }
    four, six = socket.AF_INET, socket.AF_INET6
    addresses = {
        "wlan0": [address(six, "fe80::2%wlan0"), address(psutil.AF_LINK, "02:00:00:00:00:01")],
        "eth0": [address(six, "fe80::1%eth0"), address(four, "10.0.0.5"), address(four, "10.0.0.6")],
        **{name: [address(four, "10.1.0.1")] for name in ("old0", "tun0", "lo", "can0", "gone0")},
        "bare0": [address(psutil.AF_LINK, "02:00:00:00:00:02")],
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: len(name))
    assert multicast_interfaces() == (
        Interface("eth0", 4, "10.0.0.5", False),
        Interface("wlan0", 5, "fe80::2", True),
    )
