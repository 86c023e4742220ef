"""A network of its own for tests: namespaces on bridges, each with an agent.

Needs root and iproute2; nothing leaves it.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from port_agent.control.client import ControlClient, ControlError
from tests.agent.live_daemon import CONFIG
from tests.agent.peers.networks import ROOT, ip
from tests.waiting import until

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace with one interface, `eth0`."""

    namespace: str
    address: str

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a program there."""
        command = ["ip", "netns", "exec", self.namespace, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


class Network:
    """Bridges in a namespace that leads nowhere."""

    def __init__(self, mark: str) -> None:
        self._mark, self._hosts, self._bridges = mark, list[str](), list[str]()
        self._switch = f"{mark}sw"
        ip("netns", "add", self._switch)
        self._hosts.append(self._switch)

    def bridge(self) -> str:
        """Return the name of a new bridge."""
        name = f"br{len(self._bridges)}"
        ip("-n", self._switch, "link", "add", name, "type", "bridge")
        ip("-n", self._switch, "link", "set", name, "up")
        self._bridges.append(name)
        return name

    def host(self, bridge: str, *addresses: str) -> Host:
        """Return a new host on a bridge, with these addresses and their prefix lengths; with
        none IPv6 alone, link-local.
        """
        number = len(self._hosts)
        name = f"{self._mark}h{number}"
        ip("netns", "add", name)
        self._hosts.append(name)
        ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"p{number}", "netns", self._switch)
        ip("-n", self._switch, "link", "set", f"p{number}", "master", bridge, "up")
        ip("-n", name, "link", "set", "lo", "up")
        for address in addresses:
            ip("-n", name, "addr", "add", address, "dev", "eth0", *(["nodad"] if ":" in address else []))
        ip("-n", name, "link", "set", "eth0", "up")
        return Host(name, addresses[0].partition("/")[0] if addresses else "")

    def route(self, *nets: str) -> None:
        """Let the switch forward between bridges: `nets` are its addresses on them, in order."""
        for bridge, address in zip(self._bridges, nets, strict=True):
            ip("-n", self._switch, "addr", "add", address, "dev", bridge)
        forward = ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]
        subprocess.run(["ip", "netns", "exec", self._switch, *forward], check=True, capture_output=True)

    def default_route(self, host: Host, via: str) -> None:
        """Give a host a way out of its subnet."""
        ip("-n", host.namespace, "route", "add", "default", "via", via)

    def unplug(self, host: Host) -> None:
        """Pull the cable of a host."""
        number = self._hosts.index(host.namespace)
        ip("-n", self._switch, "link", "set", f"p{number}", "down")

    def plug_in(self, host: Host) -> None:
        """Put the cable of a host back."""
        number = self._hosts.index(host.namespace)
        ip("-n", self._switch, "link", "set", f"p{number}", "up")

    def close(self) -> None:
        """Remove everything."""
        for name in self._hosts:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def network() -> Iterator[Network]:
    """Give an empty network; skips where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = Network(f"pp{os.getpid()}{next(_NUMBERS)}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Agent:
    """An agent that runs on a host."""

    host: Host
    root: Path
    client: ControlClient
    process: "subprocess.Popen[bytes]"

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of its command line there."""
        return self.host.run(sys.executable, "-m", "port_agent.cli", *words, "--runtime-dir", str(self.root / "run"))

    def told(self) -> dict[str, Any]:
        """Return what it knows of others; an agent that still starts knows nothing."""
        try:
            told: dict[str, Any] = self.client.get("/v1/peers")
        except ControlError:
            return {"peers": [], "paired": []}
        return told

    def sees(self, name: str) -> bool:
        """Return whether discovery shows another agent."""
        return any(peer["name"] == name for peer in self.told()["peers"] or ())

    def connected(self) -> set[str]:
        """Return the names of the paired devices that are there."""
        return {device["name"] for device in self.told()["paired"] if device["is_connected"] and device["board"]}


@contextmanager
def agent_on(host: Host, root: Path, name: str, peers: str = "discover = true\n") -> Iterator[Agent]:
    """Run an agent on a host until the block ends."""
    (root / "sys/class/power_supply").mkdir(parents=True, exist_ok=True)
    (root / "config.toml").write_text(f'{CONFIG}[peers]\nname = "{name}"\n{peers}')
    words = [str(root / part) for part in ("state", "run", "config.toml", "sys")]
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "tests.agent.live", *words]
    with subprocess.Popen(command, cwd=ROOT) as process:
        agent = Agent(host, root, ControlClient(root / "run"), process)
        try:
            until(lambda: (root / "run/control.sock").exists())
            yield agent
        finally:
            process.kill()


def pair(one: Agent, other: Agent, at: str | None = None) -> None:
    """Pair two agents by the code that the first shows, which the other finds by itself or at `at`."""
    code = one.client.post("/v1/pairing", lifetime_s=120.0)["code"]
    words = ["--at", at] if at is not None else []

    def joined() -> bool:
        done = other.command("pair", code, "--json", *words)
        told = done.stdout or done.stderr
        assert done.returncode == 0 or "shows a code" in told, told
        return done.returncode == 0

    until(joined)
    until(lambda: one.told()["paired"])
