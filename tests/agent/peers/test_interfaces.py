"""Which network interfaces count."""

import socket
from pathlib import Path

import psutil
import pytest

from port_agent.peers.interfaces import Interface, elsewhere, multicast_interfaces


def test_which_interfaces_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "br0": state(lan),
        "docker0": state(lan),
    }
    for bridge, port, kind in (("br0", "eth1.7", "DEVTYPE=vlan"), ("docker0", "veth12", "INTERFACE=veth12")):
        for folder in (tmp_path / bridge / "bridge", tmp_path / bridge / "brif" / port, tmp_path / port):
            folder.mkdir(parents=True)
        (tmp_path / port / "uevent").write_text(f"{kind}\nIFINDEX=4\n")
    four, six = socket.AF_INET, socket.AF_INET6
    addresses = {
        "wlan0": [address(six, "fe80::2%wlan0"), address(psutil.AF_LINK, "02:00:00:00:00:01")],
        "eth0": [address(six, "fe80::1%eth0"), address(four, "10.0.0.5"), address(four, "10.0.0.6")],
        **{name: [address(four, "10.1.0.1")] for name in ("old0", "tun0", "lo", "can0", "gone0")},
        "bare0": [address(psutil.AF_LINK, "02:00:00:00:00:02")],
        "br0": [address(four, "10.0.7.5")],
        "docker0": [address(four, "172.17.0.1")],
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(socket, "if_nametoindex", lambda name: len(name))
    assert multicast_interfaces(tmp_path) == (
        Interface("br0", 3, "10.0.7.5", False),
        Interface("eth0", 4, "10.0.0.5", False),
        Interface("wlan0", 5, "fe80::2", True),
    )
    assert elsewhere(("172.17.0.1", "fe80::1", "10.0.0.9")) == ("10.0.0.9",)
    assert elsewhere(("172.17.0.1",)) == ("172.17.0.1",), "two agents of one machine"
