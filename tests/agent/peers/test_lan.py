"""Real agents on networks of their own (`make check-peers`): found, paired, lost, across subnets,
IPv6 alone, and a stranger.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.daemon import status_kb
from benchmarks.peers import Place, measure
from port_agent.peers.identity.keys import own_identity
from tests.agent.peers.bridge import Agent, Host, agent_on, network, pair
from tests.waiting import until

FOUND_S, GONE_S = 3.0, 30.0
AGENTS, AGENT_BYTES, AGENT_CPU_PERCENT = 50, 40_000_000, 1.0
WATCHED_S = 60.0
"""What the project promises of a local network."""
PORT, PAIRING_PORT = 9478, 9479

pytestmark = [pytest.mark.root, pytest.mark.long]

OPEN_PORTS = """
import asyncio, json, sys

async def is_open(host, port):
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5.0)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True

async def main():
    host, found = sys.argv[1], []
    for begin in range(1, 65536, 500):
        ports = range(begin, min(begin + 500, 65536))
        found += [port for port, open_ in zip(ports, await asyncio.gather(*(is_open(host, port) for port in ports))) if open_]
    print(json.dumps(found))

asyncio.run(main())
"""
"""Prints which TCP ports of a host are open."""

STRANGER = """
import json, socket, ssl, sys

def learn(version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["port-agent/1"])
    context.minimum_version = context.maximum_version = version
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as raw, context.wrap_socket(raw) as line:
            certificate = line.getpeercert(binary_form=True)
            return {"certificate": certificate.hex(), "read": line.recv(1000).decode("latin-1")}
    except OSError as error:
        return {"error": str(error), "read": ""}

with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as raw:
    raw.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    plain = raw.recv(1000)
print(json.dumps({
    "plain": plain.hex(), "1.2": learn(ssl.TLSVersion.TLSv1_2), "1.3": learn(ssl.TLSVersion.TLSv1_3),
}))
"""
"""Prints what a host that is not paired gets out of a port by talking plainly, by TLS 1.2 and by TLS 1.3."""


def seconds_until(agent: Agent, others: set[str]) -> float:
    """Return how long it takes until exactly these paired devices are there."""
    began_s = time.monotonic()
    until(lambda: agent.connected() == others, agent.told)
    return time.monotonic() - began_s


def open_ports(stranger: Host, host: Host) -> list[int]:
    done = stranger.run(sys.executable, "-c", OPEN_PORTS, host.address)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def two_agents(tmp_path: Path, one: Host, other: Host, *peers: str) -> Iterator[tuple[Agent, Agent]]:
    told = peers or ("discover = true\n", "discover = true\n")
    with (
        agent_on(one, tmp_path / "a", "attic", told[0]) as attic,
        agent_on(other, tmp_path / "c", "cellar", told[1]) as cellar,
    ):
        yield attic, cellar


def test_found_paired_killed_and_back(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.79.0.{number}/24") for number in (1, 2)]
        for name in ("a", "c"):  # a first key takes a while longer
            (tmp_path / name / "state").mkdir(parents=True)
            own_identity(tmp_path / name / "state")
        with two_agents(tmp_path, hosts[0], hosts[1]) as (attic, cellar):
            began_s = time.monotonic()
            until(lambda: attic.sees("cellar") and cellar.sees("attic"))
            found_s = time.monotonic() - began_s
            pair(attic, cellar)
            until(lambda: attic.connected() == {"cellar"} and cellar.connected() == {"attic"})
            cellar.process.kill()
            killed_s = seconds_until(attic, set())
            with agent_on(hosts[1], tmp_path / "c", "cellar"):
                back_s = seconds_until(attic, {"cellar"})
                net.unplug(hosts[1])
                unplugged_s = seconds_until(attic, set())
        print(
            f"found in {found_s:.1f} s; killed: gone in {killed_s:.1f} s, back in {back_s:.1f} s; unplugged: "
            f"{unplugged_s:.1f} s"
        )


def test_two_subnets_are_joined_by_a_static_address(tmp_path: Path) -> None:
    with network() as net:
        one = net.host(net.bridge(), "10.80.1.2/24")
        other = net.host(net.bridge(), "10.80.2.2/24")
        net.route("10.80.1.1/24", "10.80.2.1/24")
        net.default_route(one, "10.80.1.1")
        net.default_route(other, "10.80.2.1")
        static = f'discover = true\nstatic = ["10.80.2.2:{PORT}"]\n'
        with two_agents(tmp_path, one, other, static, "discover = true\n") as (attic, cellar):
            pair(cellar, attic, at=other.address)
            until(lambda: attic.connected() == {"cellar"} and cellar.connected() == {"attic"})
            assert not attic.sees("cellar") and not cellar.sees("attic"), "multicast stays in its subnet"
            assert attic.told()["paired"][0]["address"] == ["10.80.2.2", PORT]


def test_ipv6_alone_is_enough(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"fd00:79::{number}/64") for number in (1, 2)]
        with two_agents(tmp_path, hosts[0], hosts[1]) as (attic, cellar):
            until(lambda: attic.sees("cellar") and cellar.sees("attic"))
            pair(attic, cellar)
            until(lambda: attic.connected() == {"cellar"} and cellar.connected() == {"attic"})


def test_a_stranger_finds_no_port_before_the_first_pairing_and_learns_nothing_after(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        one, other, stranger = (net.host(bridge, f"10.79.0.{number}/24") for number in (1, 2, 3))
        with two_agents(tmp_path, one, other) as (attic, cellar):
            until(lambda: attic.sees("cellar") and cellar.sees("attic"))
            assert open_ports(stranger, one) == []
            pair(attic, cellar)
            until(lambda: attic.connected() == {"cellar"})
            assert open_ports(stranger, one) == [PORT]
            done = stranger.run(sys.executable, "-c", STRANGER, one.address, str(PORT))
            assert done.returncode == 0, done.stderr
            learnt = json.loads(done.stdout)
            assert learnt["1.2"]["read"] == learnt["1.3"]["read"] == ""
            assert "error" in learnt["1.2"] and "alert" in learnt["1.3"]["error"].lower()
            assert bytes.fromhex(learnt["plain"])[:1] in (b"", b"\x15"), "nothing, or a TLS alert"
            assert attic.connected() == {"cellar"} and attic.client.get("/v1/status")["state"] == "idle"


SENDS, GROWTH_BYTES = 178_000, 3_000_000
SENDER = """
import contextlib, random, socket, ssl, sys

numbers, sent, left = random.Random(64), 0, int(sys.argv[3])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["port-agent/1"])
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
with contextlib.suppress(ssl.SSLWantReadError):
    context.wrap_bio(incoming, outgoing).do_handshake()
hello = outgoing.read()

def chunk():
    match numbers.randrange(5):
        case 0:
            return numbers.randbytes(numbers.randrange(1, 2000))
        case 1:
            return hello
        case 2:
            begun = bytearray(hello)
            begun[numbers.randrange(len(begun))] ^= 1 << numbers.randrange(8)
            return bytes(begun)
        case 3:
            return hello[:numbers.randrange(1, len(hello))]
    return bytes([numbers.choice((20, 21, 22, 23, 24)), 3, numbers.randrange(5)]) + numbers.randbytes(numbers.randrange(1, 300))

while sent < left:
    with contextlib.suppress(OSError), socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as line:
        for _ in range(numbers.randrange(1, 20)):
            sent += 1
            line.sendall(chunk())
print(sent)
"""
"""Sends to a port what is no greeting, or the beginning of one that was changed, and prints how often."""


def test_the_port_holds_whatever_a_stranger_sends(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        one, other, stranger = (net.host(bridge, f"10.79.0.{number}/24") for number in (1, 2, 3))
        with two_agents(tmp_path, one, other) as (attic, cellar):
            until(lambda: attic.sees("cellar") and cellar.sees("attic"))
            pair(attic, cellar)
            until(lambda: attic.connected() == {"cellar"})
            process = attic.process.pid
            figures = []
            for count in (SENDS // 10, SENDS - SENDS // 10):  # what is kept for the first strangers is no leak
                done = stranger.run(sys.executable, "-c", SENDER, one.address, str(PORT), str(count))
                assert done.returncode == 0, done.stderr
                until(lambda: attic.connected() == {"cellar"}, attic.told)
                figures.append(held(process))
            (descriptors, memory), _ = figures
            until(lambda: held(process)[0] <= descriptors + 2, lambda: held(process))
            until(
                lambda: held(process)[1] <= memory + GROWTH_BYTES, lambda: held(process)
            )  # free memory goes back from time to time
            print(f"{SENDS} sends: {figures[0]} descriptors and bytes after a tenth, {held(process)} after all")
            assert not any("blocked" in entry["text"] for entry in attic.told()["history"]), "nobody paired is blamed"


def held(process: int) -> tuple[int, int]:
    """Return how many descriptors a process holds, and its resident bytes."""
    return len(list(Path(f"/proc/{process}/fd").iterdir())), status_kb(process, "status", "VmRSS")


NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default")
NEIGHBOURS_HELD = ("gc_thresh3", "gc_thresh2")


@contextlib.contextmanager
def room_for_neighbours(count: int) -> Iterator[None]:
    """Have the kernel's table hold so many: machines have one each, namespaces of one machine share it.

    Left as it was.
    """
    before = {name: (NEIGHBOURS / name).read_text() for name in NEIGHBOURS_HELD}
    try:
        for name, held in before.items():
            (NEIGHBOURS / name).write_text(str(max(count, int(held))))
        yield
    finally:
        for name in reversed(NEIGHBOURS_HELD):
            (NEIGHBOURS / name).write_text(before[name])


def test_fifty_agents_on_one_bridge_are_light() -> None:
    with network() as net, room_for_neighbours(2 * AGENTS**2):
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.81.0.{number}/24") for number in range(1, AGENTS + 1)]
        shares = measure(
            [Place(host.address, PORT, ("ip", "netns", "exec", host.namespace)) for host in hosts], WATCHED_S
        )
    heaviest, busiest = max(share.rss_bytes for share in shares), max(share.cpu_percent for share in shares)
    middle = statistics.median(share.rss_bytes for share in shares)
    print(
        f"{AGENTS} agents, all paired: {middle / 1e6:.1f} MB, at most {heaviest / 1e6:.1f} MB and {busiest:.2f} % of a "
        "core"
    )
    assert all(share.connections == AGENTS - 1 for share in shares)
    assert heaviest <= AGENT_BYTES and busiest <= AGENT_CPU_PERCENT
