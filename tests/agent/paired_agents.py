"""Agents that trust each other, each a process with its own state, talking over TLS on this machine."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from port_agent.control.client import ControlClient
from port_agent.peers.fleet.paired import PairedDevices, device_of
from port_agent.peers.identity.keys import own_identity
from tests.agent.live_daemon import CONFIG, daemon
from tests.waiting import until

NAMES = ("attic", "cellar")


@contextmanager
def paired_agents(root: Path, *peers: str) -> Iterator[list[ControlClient]]:
    """Run two agents until they have met; `peers`: what each has under [peers] besides name and port.

    Gives their clients.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("", 0))) for _ in NAMES]
        ports = [sock.getsockname()[1] for sock in held]
    states = [root / name / "state" for name in NAMES]
    for state in states:
        state.mkdir(parents=True, mode=0o700)
    for number, state in enumerate(states):
        other = own_identity(states[1 - number]).certificate
        PairedDevices(state).add(device_of(other, NAMES[1 - number], 1.7e9, ("127.0.0.1", ports[1 - number])))
    with ExitStack() as stack:
        clients = []
        for name, port, more in zip(NAMES, ports, peers, strict=True):
            config = f'{CONFIG}[peers]\nname = "{name}"\nport = {port}\n{more}\n'
            clients.append(stack.enter_context(daemon(root / name, config)))
        until(lambda: all(row(client)["is_connected"] and row(client)["board"] for client in clients))
        yield clients


def row(client: ControlClient) -> dict[str, Any]:
    """Return how an agent sees the other one."""
    found: dict[str, Any] = client.get("/v1/peers")["paired"][0]
    return found


def history(client: ControlClient) -> str:
    """Return what happened between devices, as `port-agent peer list` shows it."""
    return "\n".join(entry["text"] for entry in client.get("/v1/peers")["history"])
